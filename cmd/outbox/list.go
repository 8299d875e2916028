package main

import (
	"context"
	"fmt"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const (
	listLimit = 100
	listMost  = 10_000
	listPage  = 1000 // with --all
)

func (a *app) listCommand() *cli.Command {
	return &cli.Command{
		Name:  "list",
		Usage: "list a journal's messages, oldest first",
		Description: "A message is pending (waits for its first attempt), failed (waits to be tried again), sending (with a relay), sent, dead (refused for\n" +
			"good, or out of attempts) or unknown (perhaps sent; nobody knows). Times are in UTC, by the\n" +
			"clock of the database on Postgres, of the host on SQLite and of a file store.\n" +
			"What waits in channels of kind latest is not listed: outbox stats counts it.",
		Flags: append(filterFlags("list every page, not only the first"),
			&cli.IntFlag{Name: "limit", Value: listLimit, Usage: "at most this `number`, 1 to " + number(listMost)},
			&cli.StringFlag{Name: "after", HideDefault: true, Usage: "go on behind this `cursor`, which a list that was cut off has named"},
			&cli.BoolFlag{Name: "payload", Usage: "show the payloads too: as text where they are, else in base64"},
		),
		Action: a.list,
	}
}

func (a *app) list(ctx context.Context, c *cli.Command) error {
	m, err := readFilter(c)
	if err != nil {
		return err
	}
	f := outbox.Filter{
		Group: m.Group, States: m.States, Code: m.Code, All: !narrows(m),
		After: c.String("after"), Limit: c.Int("limit"), Payload: c.Bool("payload"),
	}
	all := c.Bool("all")
	switch {
	case all && c.IsSet("limit"):
		return usagef("%s--all and --limit exclude each other", said(c))
	case f.Limit < 1 || f.Limit > listMost:
		return usagef("%s--limit is %d, not 1 to %d", said(c), f.Limit, listMost)
	case all:
		f.Limit = listPage
	}
	p := toOperate
	if all {
		p = toAmend
	}
	return a.withJournal(ctx, c, p, func(ctx context.Context, j *journal) error {
		var to lister = &tableList{app: a, j: j, payload: f.Payload, selection: j.selection(m)}
		if c.Bool("json") {
			to = &jsonList{w: a.stdout, channel: j.channel, payload: f.Payload}
		}
		for {
			page, after, err := j.List(ctx, f)
			if err != nil {
				return err
			}
			if err := to.page(page); err != nil {
				return err
			}
			if after == "" || !all {
				return to.end(ctx, after)
			}
			f.After = after
		}
	})
}

// A lister prints messages page by page.
type lister interface {
	page(rs []outbox.Record) error
	end(ctx context.Context, after string) error
}

// tableList prints for people.
type tableList struct {
	*app
	j         *journal
	payload   bool
	selection string
	table     *table
}

func (l *tableList) page(rs []outbox.Record) error {
	if l.table == nil {
		if len(rs) == 0 {
			return nil
		}
		headings := []string{"KEY", "GROUP", "STATE", "ATTEMPTS", "CREATED", "WHEN", "CODE", "REFERENCE OR LAST ERROR"}
		if l.payload {
			headings = append(headings, "PAYLOAD")
		}
		l.table = newTable(l.stdout, headings)
	}
	rows := make([][]string, len(rs))
	for i, r := range rs {
		rows[i] = []string{
			r.Key, orDash(r.Group), r.State.String(), fmt.Sprint(r.Attempt), utc(r.CreatedAt),
			when(r), orDash(r.Code), orDash(detail(r)),
		}
		if l.payload {
			text, encoding := readable(r.Payload)
			rows[i] = append(rows[i], encoding+text)
		}
	}
	return l.table.print(rows)
}

func (l *tableList) end(ctx context.Context, after string) error {
	if l.table == nil {
		_, err := fmt.Fprintf(l.stdout, "no messages %s%s\n", l.selection, l.j.others(ctx))
		return err
	}
	if after != "" {
		fmt.Fprintf(l.stderr, "outbox: note: there may be more: --after %s goes on here, --all lists everything\n", after)
	}
	return nil
}

// detail is what is most worth knowing of a message.
func detail(r outbox.Record) string {
	if r.State == outbox.StateSent {
		return r.Ref
	}
	return r.LastError
}

// when tells the time that matters in a message's state.
func when(r outbox.Record) string {
	switch r.State {
	case outbox.StatePending, outbox.StateFailed:
		return "due " + utc(r.Due)
	case outbox.StateSending:
		return "leased until " + utc(r.Lease.Until)
	}
	return "ended " + utc(r.CompletedAt)
}

func orDash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
