package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/filestore"
)

func (a *app) importCommand() *cli.Command {
	return &cli.Command{
		Name:  "import",
		Usage: "move the messages of a file store into a database, for its program to go on with that",
		Description: "Stop the program that uses the file, run outbox migrate up on the database, then this, then start the program's new release.\n" +
			"It may be interrupted at any moment and run again: nothing is lost and nothing sent twice, since the channels are paused on both\n" +
			"sides until their messages have moved. Messages keep their state; failed ones become pending, due when they were. Those of which\n" +
			"the database holds others under the same keys stay, with their whole channel, and so do groups of which a message is dead or\n" +
			"unknown behind another one: it says which, and what to do.",
		Flags: []cli.Flag{
			&cli.StringFlag{Name: "from", Usage: "the `file` of the file store: a path, or file:///..., that ends in .json; required"},
			&cli.StringFlag{Name: "interrupted", Value: "unknown", Usage: "what becomes of messages whose program died while it was sending them: `unknown` or resend"},
			dryRunFlag(), jsonFlag(),
		},
		Action: a.importFile,
	}
}

// importOf is an import as the command line asks for it.
type importOf struct {
	from, to target
	o        filestore.MoveOptions
	json     bool
}

func (a *app) readImport(c *cli.Command) (i importOf, err error) {
	i.json, i.o.DryRun, i.o.NoRelay = c.Bool("json"), c.Bool("dry-run"), true
	if !c.IsSet("from") {
		return i, usagef("%s--from is missing: the path of the file store", said(c))
	}
	if i.from, err = parseDSN(c.String("from")); err != nil {
		return i, usagef("%s--from: %w", said(c), err)
	}
	if i.from.fileStore == "" {
		return i, usagef("%s--from names no file store: its path ends in .json", said(c))
	}
	switch how := c.String("interrupted"); how {
	case "unknown":
	case "resend":
		i.o.Resend = true
	default:
		return i, usagef("%s--interrupted is %q, not unknown or resend", said(c), how)
	}
	if i.to, err = a.target(c); err == nil && i.to.fileStore != "" {
		err = usagef("%s--dsn names a file store too: a file is moved into Postgres or SQLite", said(c))
	}
	return i, err
}

func (a *app) importFile(ctx context.Context, c *cli.Command) error {
	i, err := a.readImport(c)
	if err != nil {
		return err
	}
	return a.with(ctx, c, toAmend, func(ctx context.Context, to *session) error {
		from, err := i.from.connect(ctx, toAmend)
		if err != nil {
			return err
		}
		defer from.close()
		moved, err := a.move(ctx, i, from.file, to)
		if err != nil && !errors.Is(err, filestore.ErrLeft) {
			return err
		}
		if i.json {
			return errors.Join(writeJSON(a.stdout, i.asJSON(moved)), err)
		}
		return errors.Join(i.print(a.stdout, moved), err)
	})
}

func (a *app) move(ctx context.Context, i importOf, from *filestore.Store, to *session) (filestore.Moved, error) {
	if i.o.DryRun {
		return from.MoveTo(ctx, to.store, i.o)
	}
	total := -1
	if a.terminal { // a person wants to know how many
		foretold, err := from.MoveTo(ctx, to.store, filestore.MoveOptions{DryRun: true})
		if err != nil && !errors.Is(err, filestore.ErrLeft) {
			return foretold, err
		}
		total = foretold.Messages()
	}
	bar := a.newProgress("moved", total, i.json)
	i.o.Progress = bar.set
	moved, err := from.MoveTo(ctx, to.store, i.o)
	if errors.Is(err, filestore.ErrLeft) {
		bar.end(moved.Messages(), nil)
	} else {
		bar.end(moved.Messages(), err)
	}
	return moved, err
}

// print tells people what was moved and, of what was not, what to do.
func (i importOf) print(w io.Writer, moved filestore.Moved) error {
	would := ""
	if i.o.DryRun {
		would = "would be "
	}
	fmt.Fprintf(w, "%smoved: %s from %s to %s\n", would, messages(moved.Messages()), i.from.label, i.to.label)
	var rows [][]string
	for _, c := range moved.Channels {
		row := []string{c.Channel}
		for _, n := range []int{c.Pending, c.Sent, c.Dead, c.Unknown, c.Interrupted} {
			row = append(row, number(n))
		}
		rows = append(rows, row)
	}
	if len(rows) == 0 {
		return nil
	}
	err := writeTable(w, []string{"CHANNEL", "PENDING", "SENT", "DEAD", "UNKNOWN", "INTERRUPTED"}, rows)
	for _, c := range moved.Channels {
		for _, key := range c.Conflicts {
			fmt.Fprintf(w, "stays: all of channel %q: key %q is another message in the database; outbox show it in both, and outbox discard the wrong one\n", c.Channel, key)
		}
		for _, g := range c.Left {
			fmt.Fprintf(w, "stays: group %q of channel %q, %s: %s\n", g.Group, c.Channel, messages(g.Messages), i.remedy(c.Channel, g))
		}
	}
	return err
}

// remedy says how a group can be moved.
func (i importOf) remedy(channel string, g filestore.LeftGroup) string {
	const most = 5
	if len(g.Ended) == 0 {
		return fmt.Sprintf("its first is dead or unknown, and the database holds earlier ones of the group: have those sent, or settle them: outbox list --channel %q --group %q", channel, g.Group)
	}
	keys := make([]string, 0, most)
	for _, key := range g.Ended[:min(len(g.Ended), most)] {
		keys = append(keys, fmt.Sprintf("%q", key))
	}
	if n := len(g.Ended) - most; n > 0 {
		keys = append(keys, fmt.Sprintf("and %s more", number(n)))
	}
	return fmt.Sprintf("dead or unknown are %s; only the first of a group may be: outbox retry, resolve or discard the others, with --dsn %q --channel %q",
		strings.Join(keys, ", "), i.from.fileStore, channel)
}

// jsonImport is an import in JSON.
type jsonImport struct {
	From     string              `json:"from"`
	To       string              `json:"to"`
	Messages int                 `json:"messages"`
	DryRun   bool                `json:"dry_run"`
	Channels []jsonImportChannel `json:"channels"`
}

type jsonImportChannel struct {
	Channel     string          `json:"channel"`
	Pending     int             `json:"pending"`
	Sent        int             `json:"sent"`
	Dead        int             `json:"dead"`
	Unknown     int             `json:"unknown"`
	Interrupted int             `json:"interrupted"`
	Conflicts   []string        `json:"conflicts"` // keys; if any, nothing of the channel was moved
	Left        []jsonLeftGroup `json:"left"`
}

type jsonLeftGroup struct {
	Group    string   `json:"group"`
	Messages int      `json:"messages"`
	Ended    []string `json:"ended"` // keys of dead and unknown ones; empty: the database holds earlier ones
}

func (i importOf) asJSON(moved filestore.Moved) jsonImport {
	j := jsonImport{
		From: i.from.fileStore, To: i.to.label, Messages: moved.Messages(), DryRun: i.o.DryRun,
		Channels: make([]jsonImportChannel, len(moved.Channels)),
	}
	for n, c := range moved.Channels {
		j.Channels[n] = jsonImportChannel{
			c.Channel, c.Pending, c.Sent, c.Dead, c.Unknown, c.Interrupted, append([]string{}, c.Conflicts...), make([]jsonLeftGroup, len(c.Left)),
		}
		for k, g := range c.Left {
			j.Channels[n].Left[k] = jsonLeftGroup{g.Group, g.Messages, append([]string{}, g.Ended...)}
		}
	}
	return j
}
