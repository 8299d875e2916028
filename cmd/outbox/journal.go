package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// journal is the channel that a command about messages works on.
type journal struct {
	*session
	*outbox.Journal
	channel string
}

// withJournal connects and calls f, for the channel that --channel names.
func (a *app) withJournal(ctx context.Context, c *cli.Command, p purpose, f func(ctx context.Context, j *journal) error) error {
	channel := c.String("channel")
	if err := outbox.ValidChannel(channel); err != nil {
		return usagef("%s--channel: %w", said(c), err)
	}
	return a.with(ctx, c, p, func(ctx context.Context, s *session) error {
		j, err := outbox.NewJournal(s.messages, outbox.JournalOptions{Channel: channel})
		if err != nil {
			return err
		}
		return f(ctx, &journal{s, j, channel})
	})
}

func channelFlag() cli.Flag {
	return &cli.StringFlag{Name: "channel", Value: outbox.DefaultChannel, Usage: "the messages of this `channel`"}
}

func yesFlag() cli.Flag {
	return &cli.BoolFlag{Name: "yes", Aliases: []string{"y"}, Usage: "do not ask"}
}

// filterFlags select messages.
func filterFlags(all string) []cli.Flag {
	return []cli.Flag{
		channelFlag(),
		&cli.StringSliceFlag{Name: "state", Usage: "only those in this `state`: pending, failed, sending, sent, dead or unknown; may be repeated"},
		&cli.StringFlag{Name: "group", Usage: "only those of this `group`"},
		&cli.StringFlag{Name: "code", Usage: "only those whose last error had this `code`"},
		&cli.BoolFlag{Name: "all", Usage: all},
		jsonFlag(),
	}
}

// readFilter reads the flags of filterFlags.
func readFilter(c *cli.Command) (outbox.MessageFilter, error) {
	f := outbox.MessageFilter{Group: c.String("group"), Code: c.String("code")}
	for _, text := range []string{"group", "code"} {
		if c.IsSet(text) && c.String(text) == "" {
			return f, usagef("%s--%s is empty; leave it out to select by something else", said(c), text)
		}
		if !utf8.ValidString(c.String(text)) {
			return f, usagef("%s--%s is not valid UTF-8", said(c), text)
		}
	}
	var err error
	f.States, err = readStates(c)
	return f, err
}

func readStates(c *cli.Command) (states []outbox.State, err error) {
	for _, text := range c.StringSlice("state") {
		s, err := outbox.ParseState(strings.TrimSpace(text))
		if err != nil {
			return nil, usagef("%s--state: %w", said(c), err)
		}
		if !slices.Contains(states, s) {
			states = append(states, s)
		}
	}
	return states, nil
}

// narrows reports whether a filter selects less than everything.
func narrows(f outbox.MessageFilter) bool {
	return f.Key != "" || f.Group != "" || f.Code != "" || len(f.States) > 0
}

// selection describes a filter: `messages of channel "mails", state dead`.
func (j *journal) selection(f outbox.MessageFilter) string {
	text := fmt.Sprintf("of channel %q", j.channel)
	if len(f.States) > 0 {
		text += ", state " + stateNames(f.States)
	}
	if f.Group != "" {
		text += fmt.Sprintf(", group %q", f.Group)
	}
	if f.Code != "" {
		text += fmt.Sprintf(", code %q", f.Code)
	}
	return text
}

func stateNames(states []outbox.State) string {
	names := make([]string, len(states))
	for i, s := range states {
		names[i] = s.String()
	}
	return strings.Join(names, " or ")
}

// messages writes 1 message, 2 messages.
func messages(n int) string {
	if n == 1 {
		return "1 message"
	}
	return number(n) + " messages"
}

// advise adds to an error about one message what a person can do about it.
func (j *journal) advise(ctx context.Context, allowed string, err error) error {
	switch {
	case errors.Is(err, outbox.ErrNotFound):
		return fmt.Errorf("%w: it was never put, or is gone since, as sent messages are after their retention%s", err, j.others(ctx))
	case errors.Is(err, outbox.ErrState):
		return fmt.Errorf("%w; %s", err, allowed)
	case errors.Is(err, outbox.ErrBusy):
		return fmt.Errorf("%w; nothing was changed: try again in a moment", err)
	}
	return err
}

// others names the other channels in which messages are to be seen, since the
// right name may have been left out or misspelt.
func (j *journal) others(ctx context.Context) string {
	stats, err := j.messages.Stats(ctx)
	if err != nil {
		return ""
	}
	var names []string
	for _, st := range stats {
		if st.Channel.System == outbox.SystemJournal && st.Channel.Name != j.channel {
			names = append(names, fmt.Sprintf("%q", st.Channel.Name))
		}
	}
	if len(names) == 0 {
		return ""
	}
	return "; other channels, to be given by --channel: " + strings.Join(names, ", ")
}

// confirmed returns nil where --yes is given, or a person agrees.
func (a *app) confirmed(c *cli.Command, what string) error {
	switch {
	case c.Bool("yes"):
		return nil
	case !a.asks:
		return usagef("%sthis cannot be undone: --yes confirms that you want to %s", said(c), what)
	case !a.agrees("Really " + what + "?"):
		return errors.New("nothing was changed: not confirmed")
	}
	return nil
}
