package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// amendBatch is how many messages a statement of long work looks at: few
// enough for others not to notice.
const amendBatch = 1000

func (a *app) retryCommand() *cli.Command {
	v := &verb{
		app: a, name: "retry", past: "retried", action: outbox.ActionRetry,
		only: "only a failed, dead or unknown message can be retried",
		byKey: func(ctx context.Context, j *journal, f outbox.Filter) (int64, error) {
			return j.Retry(ctx, f)
		},
		states: []outbox.State{outbox.StateFailed, outbox.StateDead},
	}
	return &cli.Command{
		Name:      "retry",
		Usage:     "send messages again, at once and with their attempts counted anew: one by its key, or many by a filter",
		ArgsUsage: "[KEY]",
		Description: "Failed, dead and unknown messages can be retried. An unknown one may have been sent already, so filters leave those out\n" +
			"unless --state unknown says otherwise. Messages that somebody's transaction holds at the moment are left as they are.",
		Flags:  append(filterFlags("every failed or dead message of the channel"), dryRunFlag()),
		Action: v.run,
	}
}

func (a *app) discardCommand() *cli.Command {
	v := &verb{
		app: a, name: "discard", past: "discarded", action: outbox.ActionDiscard, final: true,
		byKey: func(ctx context.Context, j *journal, f outbox.Filter) (int64, error) {
			return j.Discard(ctx, f)
		},
	}
	return &cli.Command{
		Name:      "discard",
		Usage:     "delete messages, in whatever state, sent or not: one by its key, or many by a filter",
		ArgsUsage: "[KEY]",
		Description: "A message that was not sent is never sent then, unless a relay is just sending it, and its key can be put anew.\n" +
			"Messages that somebody's transaction holds at the moment are left as they are.",
		Flags:  append(filterFlags("every message of the channel"), dryRunFlag(), yesFlag()),
		Action: v.run,
	}
}

func dryRunFlag() cli.Flag {
	return &cli.BoolFlag{Name: "dry-run", Usage: "only count"}
}

// A verb is what a person does to messages.
type verb struct {
	*app
	name, past string
	action     outbox.Action
	byKey      func(ctx context.Context, j *journal, f outbox.Filter) (int64, error)
	only       string         // which messages it can be done to
	states     []outbox.State // those of a filter that names none; nil: all
	final      bool           // it cannot be undone
}

// amended is its outcome in JSON.
type amended struct {
	Channel string `json:"channel"`
	Action  string `json:"action"`
	Count   int    `json:"count"`
	DryRun  bool   `json:"dry_run"`
}

func (v *verb) run(ctx context.Context, c *cli.Command) error {
	f, err := readFilter(c)
	if err != nil {
		return err
	}
	key := c.Args().First()
	switch given := narrows(f); {
	case key != "" && (given || c.Bool("all")):
		return usagef("%sgive KEY or a filter, not both", said(c))
	case c.Args().Len() > 0:
		return v.one(ctx, c, key)
	case !given && !c.Bool("all"):
		return usagef("%swhich messages? Give KEY, a filter (--state, --group, --code), or --all", said(c))
	}
	if len(f.States) == 0 {
		f.States = v.states
	}
	return v.withJournal(ctx, c, toAmend, func(ctx context.Context, j *journal) error { return v.many(ctx, c, j, f) })
}

// one does it to the message of a key.
func (v *verb) one(ctx context.Context, c *cli.Command, key string) error {
	dry := c.Bool("dry-run")
	return v.withJournal(ctx, c, toOperate, func(ctx context.Context, j *journal) error {
		n, err := v.byKey(ctx, j, outbox.Filter{Key: key, DryRun: dry})
		if err != nil {
			return j.advise(ctx, v.only, err)
		}
		if c.Bool("json") || n == 0 {
			return v.tell(c, j, int(n), "")
		}
		format := "message %q of channel %q is %s\n"
		if dry {
			format = "message %q of channel %q would be %s\n"
		}
		fmt.Fprintf(v.stdout, format, key, j.channel, v.past)
		return nil
	})
}

// many does it to all messages of a filter.
func (v *verb) many(ctx context.Context, c *cli.Command, j *journal, f outbox.MessageFilter) error {
	work := outbox.Amendment{Action: v.action, MessageFilter: f, Limit: amendBatch}
	counting := work
	counting.DryRun = true
	if c.Bool("dry-run") {
		n, err := j.amend(ctx, counting, func(int) {})
		if err != nil {
			return err
		}
		return v.tell(c, j, n, j.selection(f))
	}
	total := -1
	if v.terminal || v.asks && v.final { // a person wants to know how many
		n, err := j.amend(ctx, counting, func(int) {})
		if err != nil {
			return err
		}
		total = n
	}
	if v.final {
		if err := v.confirmed(c, fmt.Sprintf("%s %s %s", v.name, counted(total), j.selection(f))); err != nil {
			return err
		}
	}
	p := v.newProgress(v.past, total, c.Bool("json"))
	n, err := j.amend(ctx, work, p.set)
	p.end(n, err)
	if err != nil {
		return err
	}
	return v.tell(c, j, n, j.selection(f))
}

// counted writes how many messages there are, where that is known.
func counted(total int) string {
	if total < 0 {
		return "all messages"
	}
	return messages(total)
}

func (v *verb) tell(c *cli.Command, j *journal, n int, selection string) error {
	dry := c.Bool("dry-run")
	if c.Bool("json") {
		return writeJSON(v.stdout, amended{j.channel, v.name, n, dry})
	}
	would := ""
	if dry {
		would = "would be "
	}
	fmt.Fprintf(v.stdout, "%s%s: %s %s\n", would, v.past, messages(n), selection)
	return nil
}

// amend amends all messages that match, a batch at a time, and tells how many
// so far after each.
func (j *journal) amend(ctx context.Context, work outbox.Amendment, tell func(n int)) (n int, err error) {
	for {
		batch, err := j.messages.AmendMessages(ctx, nil, j.channel, work)
		if err != nil {
			return n, err
		}
		n += batch.Count
		tell(n)
		if batch.Last == 0 {
			return n, nil
		}
		work.After = batch.Last
	}
}

func (a *app) resolveCommand() *cli.Command {
	return &cli.Command{
		Name:      "resolve",
		Usage:     "say what became of a message whose state is unknown",
		ArgsUsage: "KEY",
		Description: "Nobody knows whether such a message was sent: its relay died, or the answer was lost. Ask the receiver, then say what you\n" +
			"have found. In an ordered group the messages behind it wait for that.",
		Flags: []cli.Flag{
			channelFlag(),
			&cli.StringFlag{Name: "sent", HideDefault: true, Usage: "it was sent; `REF` is the receiver's name for it, or \"\""},
			&cli.BoolFlag{Name: "not-sent", Usage: "it was not: send it now"},
			&cli.BoolFlag{Name: "dead", Usage: "do not send it, whether it was sent or not"},
			jsonFlag(),
		},
		Action: a.resolve,
	}
}

func (a *app) resolve(ctx context.Context, c *cli.Command) error {
	verdicts := map[string]outbox.Verdict{"sent": outbox.VerdictSent, "not-sent": outbox.VerdictNotSent, "dead": outbox.VerdictDead}
	var verdict outbox.Verdict
	for name, v := range verdicts {
		switch given := c.IsSet(name) && (name == "sent" || c.Bool(name)); {
		case given && verdict != outbox.VerdictUnknown:
			return usagef("%sgive one of --sent REF, --not-sent and --dead, not several", said(c))
		case given:
			verdict = v
		}
	}
	if verdict == outbox.VerdictUnknown {
		return usagef("%swhat became of it? Give --sent REF, --not-sent or --dead", said(c))
	}
	key, ref := c.Args().First(), c.String("sent")
	return a.withJournal(ctx, c, toOperate, func(ctx context.Context, j *journal) error {
		if err := j.ResolveUnknown(ctx, key, verdict, ref); err != nil {
			return j.advise(ctx, "only an unknown message can be resolved", err)
		}
		return a.resolved(c, j, key, verdict)
	})
}

func (a *app) resolved(c *cli.Command, j *journal, key string, verdict outbox.Verdict) error {
	state, means := outbox.StateSent, "recorded as sent"
	switch verdict {
	case outbox.VerdictNotSent:
		state, means = outbox.StatePending, "to be sent now"
	case outbox.VerdictDead:
		state, means = outbox.StateDead, "not to be sent"
	}
	if c.Bool("json") {
		return writeJSON(a.stdout, struct {
			Channel string `json:"channel"`
			Key     string `json:"key"`
			State   string `json:"state"`
		}{j.channel, key, state.String()})
	}
	_, err := fmt.Fprintf(a.stdout, "message %q of channel %q is %s: %s\n", key, j.channel, state, means)
	return err
}
