package main

import (
	"context"
	"fmt"
	"io"
	"maps"
	"slices"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func (a *app) showCommand() *cli.Command {
	return &cli.Command{
		Name:      "show",
		Usage:     "show a journal's message of a key, whole",
		ArgsUsage: "KEY",
		Flags: []cli.Flag{
			channelFlag(),
			&cli.BoolFlag{Name: "payload", Usage: "show the payload too: as text where it is, else in base64"},
			jsonFlag(),
		},
		Action: a.show,
	}
}

func (a *app) show(ctx context.Context, c *cli.Command) error {
	key, payload := c.Args().First(), c.Bool("payload")
	return a.withJournal(ctx, c, toOperate, func(ctx context.Context, j *journal) error {
		r, err := j.Get(ctx, key)
		if err != nil {
			return j.advise(ctx, "", err)
		}
		if c.Bool("json") {
			return writeJSON(a.stdout, asJSONMessage(r, payload))
		}
		return printMessage(a.stdout, r, payload)
	})
}

// meaning of the states, for those who meet them for the first time.
var meaning = map[outbox.State]string{
	outbox.StatePending: "waits to be sent",
	outbox.StateFailed:  "waits to be tried again",
	outbox.StateSending: "with a relay, or with one that has died, until its lease ends",
	outbox.StateSent:    "ended",
	outbox.StateDead:    "ended: refused for good, or out of attempts; outbox retry sends it again",
	outbox.StateUnknown: "ended: perhaps sent; find out, then outbox resolve",
}

func printMessage(w io.Writer, r outbox.Record, payload bool) error {
	fact := func(subject, text string) { fmt.Fprintf(w, "%-12s %s\n", subject, visible(text)) }
	fact("key", r.Key)
	fact("channel", r.Channel)
	if r.Group != "" {
		fact("group", r.Group)
	}
	fact("number", fmt.Sprint(r.Seq))
	fact("state", r.State.String()+" ("+meaning[r.State]+")")
	fact("attempts", fmt.Sprint(r.Attempt))
	if r.Ambiguous {
		fact("ambiguous", "perhaps sent: nobody knows how an earlier attempt ended")
	}
	fact("created", utc(r.CreatedAt))
	switch r.State {
	case outbox.StatePending, outbox.StateFailed:
		fact("due", utc(r.Due))
	case outbox.StateSending:
		fact("leased until", utc(r.Lease.Until))
	default:
		fact("ended", utc(r.CompletedAt))
	}
	for _, f := range [][2]string{{"reference", r.Ref}, {"code", r.Code}, {"last error", r.LastError}} {
		if f[1] != "" {
			fact(f[0], f[1])
		}
	}
	for _, name := range slices.Sorted(maps.Keys(r.Header)) {
		fact("header", name+": "+r.Header[name])
	}
	text, encoding := readable(r.Payload)
	switch {
	case !payload:
		fact("payload", fmt.Sprintf("%s bytes; --payload shows it", number(len(r.Payload))))
	case encoding != "":
		fact("payload", fmt.Sprintf("%s bytes, in base64:", number(len(r.Payload))))
	default:
		fact("payload", fmt.Sprintf("%s bytes:", number(len(r.Payload))))
	}
	var err error
	if payload {
		_, err = fmt.Fprintln(w, text)
	}
	return err
}
