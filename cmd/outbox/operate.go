package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/urfave/cli/v3"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func (a *app) pauseCommand() *cli.Command {
	return &cli.Command{
		Name:      "pause",
		Usage:     "stop publishing a channel for a while, in all relays",
		ArgsUsage: "CHANNEL",
		Description: "Publications in flight end, and none begins; staging goes on. The pause ends by itself, or by outbox resume.\n" +
			"Pausing a paused channel sets the duration and the reason anew.",
		Flags: []cli.Flag{
			&durationFlag{Name: "for", HideDefault: true, Usage: "how long: a `duration` such as 90s, 15m or 2d; required"},
			&cli.StringFlag{Name: "reason", Usage: "why, for those who look at the stats"},
		},
		Action: a.pause,
	}
}

func (a *app) pause(ctx context.Context, c *cli.Command) error {
	name, d, reason := c.Args().First(), c.Duration("for"), c.String("reason")
	switch err := outbox.ValidChannel(name); {
	case err != nil:
		return usagef("%s%w", said(c), err)
	case !c.IsSet("for"):
		return usagef("%s--for is missing: how long, for example --for 1h", said(c))
	case d <= 0:
		return usagef("%s--for is %s: outbox resume ends a pause", said(c), d)
	}
	return a.with(ctx, c, toOperate, func(ctx context.Context, s *session) error {
		stats, err := s.messages.Stats(ctx)
		if err != nil {
			return err
		}
		if err := s.messages.Pause(ctx, name, d, reason); err != nil {
			return err
		}
		fmt.Fprintf(a.stdout, "channel %q is paused for %s, until %s\n", name, d, time.Now().Add(d).UTC().Format(time.RFC3339))
		a.waiting(stats, name)
		return nil
	})
}

func (a *app) resumeCommand() *cli.Command {
	return &cli.Command{
		Name:      "resume",
		Usage:     "publish a channel again at once, after a pause or an outage of its destination",
		ArgsUsage: "CHANNEL",
		Action:    a.resume,
	}
}

func (a *app) resume(ctx context.Context, c *cli.Command) error {
	name := c.Args().First()
	if err := outbox.ValidChannel(name); err != nil {
		return usagef("%s%w", said(c), err)
	}
	return a.with(ctx, c, toOperate, func(ctx context.Context, s *session) error {
		stats, err := s.messages.Stats(ctx)
		if err != nil {
			return err
		}
		if err := s.messages.Pause(ctx, name, 0, ""); err != nil {
			return err
		}
		was := find(stats, name)
		stopped := slices.IndexFunc(was, func(st outbox.ChannelStats) bool { return st.Paused > 0 || st.Outage })
		if stopped >= 0 {
			fmt.Fprintf(a.stdout, "channel %q is resumed; it was: %s\n", name, state(was[stopped]))
		} else {
			fmt.Fprintf(a.stdout, "channel %q was not paused\n", name)
		}
		a.waiting(stats, name)
		return nil
	})
}

// find returns the channels of a name: perhaps one of each kind.
func find(stats []outbox.ChannelStats, name string) (found []outbox.ChannelStats) {
	for _, st := range stats {
		if st.Channel.Name == name {
			found = append(found, st)
		}
	}
	return found
}

// waiting tells what waits in a channel, and where nothing does, that its name
// may be misspelt: a database does not know the names of idle channels.
func (a *app) waiting(stats []outbox.ChannelStats, name string) {
	found := find(stats, name)
	for _, st := range found {
		fmt.Fprintf(a.stdout, "%s waiting in it: %s due, %s scheduled, %s in flight\n", rowsOf(st.Channel.System), count(st.Due), count(st.Scheduled), count(st.InFlight))
	}
	if len(found) > 0 {
		return
	}
	var others []string
	for _, st := range stats {
		others = append(others, fmt.Sprintf("%q", st.Channel.Name))
	}
	others = slices.Compact(slices.Sorted(slices.Values(others)))
	fmt.Fprintf(a.stderr, "outbox: note: nothing waits in channel %q at the moment; if that is not its name, nothing is changed by this", name)
	if len(others) > 0 {
		fmt.Fprintf(a.stderr, "; known at the moment: %s", strings.Join(others, ", "))
	}
	fmt.Fprintln(a.stderr)
}

// rowsOf is what the rows of a kind of channel are called.
func rowsOf(s outbox.System) string {
	if s == outbox.SystemJournal {
		return "messages"
	}
	return "entries"
}

func (a *app) fenceCommand() *cli.Command {
	return &cli.Command{
		Name:  "fence",
		Usage: "after a restore or a lossy failover: make all new versions greater than those given out before",
		Description: "Sinks keep the greatest version of a key that they have seen. A database that lost its last moments would give these\n" +
			"versions out again, and sinks would ignore them. Run it before anything is staged. It does no harm at other times.",
		Flags:  []cli.Flag{jsonFlag()},
		Action: a.fence,
	}
}

func (a *app) fence(ctx context.Context, c *cli.Command) error {
	return a.withTables(ctx, c, toOperate, func(ctx context.Context, s *session) error {
		version, token, err := s.store.Fence(ctx)
		if err != nil {
			return err
		}
		if c.Bool("json") {
			return writeJSON(a.stdout, struct {
				Version outbox.Version `json:"version"`
				Token   outbox.Token   `json:"token"`
			}{version, token})
		}
		fmt.Fprintf(a.stdout, "versions go on above %d (%s), leases' tokens above %d\n",
			version, time.UnixMicro(int64(version)).UTC().Format(time.RFC3339), token)
		return nil
	})
}
