package main

import (
	"context"
	"fmt"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func (a *app) statsCommand() *cli.Command {
	return &cli.Command{
		Name:  "stats",
		Usage: "show what waits in each channel, and which channels are paused",
		Description: "A channel is of kind latest (the newest state of each key) or journal (every message).\n" +
			"DUE entries could be published now, SCHEDULED ones later (a backoff, a delay), IN FLIGHT ones are with a relay.\n" +
			"BLOCKED counts a journal's ordered groups that wait behind a DEAD or UNKNOWN message: outbox list shows those.\n" +
			"ATTEMPTS and LAST ERROR are those of the entry that was tried most often, in a sample.\n" +
			"A channel that holds nothing, sent messages included, is not shown unless it is paused. Counts stop at " + number(outbox.StatsCap) + ".",
		Flags: []cli.Flag{
			jsonFlag(),
			&durationFlag{Name: "watch", HideDefault: true, Usage: "show it again every `interval`, until interrupted"},
		},
		Action: a.stats,
	}
}

func (a *app) stats(ctx context.Context, c *cli.Command) error {
	every := c.Duration("watch")
	if every < 0 || c.IsSet("watch") && every < 100*time.Millisecond {
		return usagef("%s--watch is %s, less than 100ms", said(c), every)
	}
	if every == 0 {
		return a.with(ctx, c, toOperate, func(ctx context.Context, s *session) error { return a.showStats(ctx, c, s) })
	}
	t, err := a.target(c)
	if err != nil {
		return err
	}
	s, err := t.connect(ctx, toOperate)
	if err != nil {
		return err
	}
	defer func() { s.close() }()
	for {
		if err := a.showAgain(ctx, c, s); err != nil {
			return err
		}
		if s.file != nil { // its program may want to start meanwhile
			s.close() // the next call opens it again
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(every):
		}
	}
}

// showAgain is one showing of --watch. It keeps to the --timeout each time.
func (a *app) showAgain(ctx context.Context, c *cli.Command, s *session) error {
	ctx, cancel := limited(ctx, c, false)
	defer cancel()
	if !c.Bool("json") {
		if a.terminal {
			fmt.Fprint(a.stdout, "\x1b[H\x1b[2J") // home, clear
		}
		fmt.Fprintf(a.stdout, "%s  %s\n", time.Now().Format(time.TimeOnly), s.name())
	}
	return timedOut(ctx, a.showStats(ctx, c, s))
}

func (a *app) showStats(ctx context.Context, c *cli.Command, s *session) error {
	stats, err := s.messages.Stats(ctx)
	if err != nil {
		return err
	}
	if c.Bool("json") {
		return writeJSON(a.stdout, asJSONStats(stats))
	}
	if len(stats) == 0 {
		_, err := fmt.Fprintln(a.stdout, "nothing waits, no message is dead or unknown, and no channel is paused")
		return err
	}
	rows := make([][]string, len(stats))
	for i, st := range stats {
		oldest := "-"
		if st.OldestDue > 0 {
			oldest = age(st.OldestDue)
		}
		rows[i] = []string{
			st.Channel.Name, st.Channel.System.String(), count(st.Due), count(st.Scheduled), count(st.InFlight), oldest,
			"-", "-", "-", fmt.Sprint(st.Attempt), state(st), st.LastError,
		}
		if st.Channel.System == outbox.SystemJournal {
			copy(rows[i][6:], []string{count(st.Blocked), count(st.Dead), count(st.Unknown)})
		}
	}
	headings := []string{"CHANNEL", "KIND", "DUE", "SCHEDULED", "IN FLIGHT", "OLDEST DUE", "BLOCKED", "DEAD", "UNKNOWN", "ATTEMPTS", "STATE", "LAST ERROR"}
	return writeTable(a.stdout, headings, rows)
}

func count(n int) string {
	if n >= outbox.StatsCap {
		return number(n) + "+"
	}
	return number(n)
}

// state tells whether entries of a channel are being published, as far as the
// database knows.
func state(st outbox.ChannelStats) string {
	text := "open"
	switch {
	case st.Outage && st.Paused > 0:
		text = "destination down, next try in " + age(st.Paused)
	case st.Outage:
		text = "destination down, to be tried"
	case st.Paused > 0:
		text = "paused for another " + age(st.Paused)
	}
	if st.Reason != "" && text != "open" {
		text += ": " + st.Reason
	}
	return text
}

// jsonStats are a channel's in JSON.
type jsonStats struct {
	System           string  `json:"system"`
	Channel          string  `json:"channel"`
	Due              int     `json:"due"`
	Scheduled        int     `json:"scheduled"`
	InFlight         int     `json:"in_flight"`
	Blocked          int     `json:"blocked"` // groups of messages behind a dead or unknown one
	Dead             int     `json:"dead"`
	Unknown          int     `json:"unknown"`
	OldestDueSeconds float64 `json:"oldest_due_seconds"` // 0: none is due
	Attempts         int     `json:"attempts"`
	LastError        string  `json:"last_error"`
	PausedSeconds    float64 `json:"paused_seconds"` // how much longer; 0: it is not
	DestinationDown  bool    `json:"destination_down"`
	Reason           string  `json:"reason"`
}

func asJSONStats(stats []outbox.ChannelStats) any {
	list := make([]jsonStats, len(stats))
	for i, st := range stats {
		list[i] = jsonStats{
			System: st.Channel.System.String(), Channel: st.Channel.Name,
			Due: st.Due, Scheduled: st.Scheduled, InFlight: st.InFlight,
			Blocked: st.Blocked, Dead: st.Dead, Unknown: st.Unknown,
			OldestDueSeconds: st.OldestDue.Seconds(), Attempts: st.Attempt, LastError: st.LastError,
			PausedSeconds: st.Paused.Seconds(), DestinationDown: st.Outage, Reason: st.Reason,
		}
	}
	return struct {
		CountsStopAt int         `json:"counts_stop_at"`
		Channels     []jsonStats `json:"channels"`
	}{outbox.StatsCap, list}
}
