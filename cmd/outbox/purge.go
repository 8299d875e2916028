package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func (a *app) purgeCommand() *cli.Command {
	return &cli.Command{
		Name:  "purge",
		Usage: "delete messages that ended before a time",
		Description: "Relays delete sent messages after their retention by themselves. This deletes them sooner and, where --state says so, dead\n" +
			"and unknown ones, which nothing else does. What still is to be sent is never deleted. A deleted message's key can be put anew.",
		Flags: []cli.Flag{
			channelFlag(),
			&cli.StringFlag{Name: "before", HideDefault: true, Usage: "that ended before this `time`: 2006-01-02T15:04:05Z, or 2006-01-02 for midnight UTC"},
			&durationFlag{Name: "older-than", HideDefault: true, Usage: "that ended longer than this `duration` ago: 36h, 30d"},
			&cli.StringSliceFlag{Name: "state", DefaultText: "sent", Usage: "those in this `state`: sent, dead or unknown; may be repeated"},
			dryRunFlag(), yesFlag(), jsonFlag(),
		},
		Action: a.purge,
	}
}

// readPurge reads the flags of outbox purge.
func readPurge(c *cli.Command) (outbox.Purge, error) {
	p := outbox.Purge{Limit: amendBatch, Age: c.Duration("older-than"), DryRun: c.Bool("dry-run")}
	var err error
	if p.States, err = readStates(c); err != nil {
		return p, err
	}
	if len(p.States) == 0 {
		p.States = []outbox.State{outbox.StateSent}
	}
	ended := []outbox.State{outbox.StateSent, outbox.StateDead, outbox.StateUnknown}
	for _, s := range p.States {
		if !slices.Contains(ended, s) {
			return p, usagef("%s--state is %s: only sent, dead and unknown messages are purged; outbox discard deletes others", said(c), s)
		}
	}
	switch {
	case c.IsSet("before") == c.IsSet("older-than"):
		return p, usagef("%sgive one of --before TIME and --older-than DURATION", said(c))
	case c.IsSet("before"):
		if p.Before, err = parseTime(c.String("before")); err != nil {
			return p, usagef("%s--before is %q: %w", said(c), c.String("before"), err)
		}
	case p.Age <= 0:
		return p, usagef("%s--older-than is %s; it must be more than 0", said(c), p.Age)
	}
	return p, nil
}

var errNoTime = errors.New("not a time such as 2006-01-02T15:04:05Z or, for midnight UTC, 2006-01-02")

func parseTime(s string) (time.Time, error) {
	for _, layout := range []string{time.RFC3339, time.DateOnly} {
		if t, err := time.Parse(layout, s); err == nil && !t.IsZero() { // the zero time is none
			return t.UTC(), nil
		}
	}
	return time.Time{}, errNoTime
}

func (a *app) purge(ctx context.Context, c *cli.Command) error {
	p, err := readPurge(c)
	if err != nil {
		return err
	}
	v := &verb{app: a, name: "purge", past: "purged"}
	return a.withJournal(ctx, c, toAmend, func(ctx context.Context, j *journal) error {
		selection := fmt.Sprintf("of channel %q that ended (%s) ", j.channel, stateNames(p.States))
		if p.Before.IsZero() {
			selection += "more than " + age(p.Age) + " ago"
		} else {
			selection += "before " + utc(p.Before)
		}
		total := -1
		if p.DryRun || a.terminal || a.asks {
			if total, err = j.countPurge(ctx, p); err != nil {
				return err
			}
			if p.DryRun {
				return v.tell(c, j, total, selection)
			}
		}
		if err := a.confirmed(c, fmt.Sprintf("delete %s %s", counted(total), selection)); err != nil {
			return err
		}
		bar := a.newProgress(v.past, total, c.Bool("json"))
		n, err := j.purge(ctx, p, bar.set)
		bar.end(n, err)
		if err != nil {
			return err
		}
		return v.tell(c, j, n, selection)
	})
}

func (j *journal) countPurge(ctx context.Context, p outbox.Purge) (int, error) {
	p.DryRun, p.Limit = true, math.MaxInt32
	return j.messages.PurgeMessages(ctx, j.channel, p)
}

// purge deletes a batch at a time, and tells how many so far after each. What
// comes of age meanwhile is not its affair: it would go on for ever.
func (j *journal) purge(ctx context.Context, p outbox.Purge, tell func(n int)) (n int, err error) {
	start, older := time.Now(), p.Age
	for {
		if p.Before.IsZero() {
			p.Age = older + time.Since(start)
		}
		batch, err := j.messages.PurgeMessages(ctx, j.channel, p)
		if err != nil || batch == 0 {
			return n, err
		}
		n += batch
		tell(n)
	}
}
