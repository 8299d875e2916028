package outboxtest

import (
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// outageTests hold how a channel goes through an outage of its destination.
var outageTests = []latestTest{
	{"OutagePausesTheChannelAlone", outagePausesTheChannelAlone},
	{"OutageIsProbedWithOneRow", outageIsProbedWithOneRow},
}

// outage reports that the channel's destination is down, or up again.
func (f *base) outage(down bool, reason string) {
	f.Helper()
	f.ok("Outage", f.relay.Outage(f.ctx, f.ch(), down, reason))
}

// paused returns how much longer Look says the channel is paused.
func (f *base) paused() time.Duration {
	f.Helper()
	l := f.look(f.ch())[0]
	if !l.Outage || l.Paused <= 0 {
		f.Fatalf("Look at a channel whose destination is down is %+v, want an outage and a pause", l)
	}
	return l.Paused
}

// passPause lets the channel's pause go by.
func (f *base) passPause() {
	f.Helper()
	if f.clock != nil {
		f.clock.Advance(f.look(f.ch())[0].Paused)
	}
	for {
		l := f.look(f.ch())[0]
		if !l.Outage {
			f.Fatalf("Look at a channel after its pause is %+v, want an outage still", l)
		}
		if l.Paused <= 0 {
			return
		}
		if f.clock != nil {
			f.Fatalf("the pause goes on %v longer than it said", l.Paused)
		}
		f.pass(min(l.Paused, short))
	}
}

// probe claims the row that is to find out whether the destination is up.
func (f *fixture) probe(lease time.Duration) outbox.Row {
	f.Helper()
	c := f.ask(100, lease)
	if len(c.Rows) != 1 || !c.Probe {
		f.Fatalf("ClaimRows after a pause returned %s (probe %t), want one row as a probe", keys(c.Rows), c.Probe)
	}
	return c.Rows[0]
}

func outagePausesTheChannelAlone(f *fixture) {
	f.outage(false, "") // nothing was down
	f.waits("never had an outage", -1)

	f, pause, claimed, stats := f.inPause(20)
	if pause > 2*time.Second {
		f.Fatalf("the first pause is %v, want about a second", pause)
	}
	f.equal("rows claimed in the pause", keys(claimed.Rows), []string{})
	f.equal("probe in the pause", claimed.Probe, false)
	f.equal("attempts of the row that waits", f.row("k").Attempt, 0)
	f.equal("Stats of a paused channel", stats, outbox.ChannelStats{
		Channel: f.ch(), Due: 1, OldestDue: stats.OldestDue, Paused: stats.Paused, Outage: true, Reason: "503",
	})
	if stats.Paused <= 0 || stats.Paused > pause {
		f.Fatalf("Stats says the channel is paused for %v, want over 0 and up to %v", stats.Paused, pause)
	}

	other := f.on(f.channel + "-other")
	other.put("k", "v")
	other.waits("had no outage beside one that has", 0)
	other.claimOne(long)

	f.outage(false, "")
	f.waits("had an outage", 0)
	f.claimOne(long)
}

// inPause looks at a channel during its first pause: in a channel of its own,
// and once more in another where the machine was too slow for that second.
func (f *fixture) inPause(tries int) (at *fixture, pause time.Duration, claimed outbox.Claimed, stats outbox.ChannelStats) {
	f.Helper()
	for range tries {
		at := f.on(newChannel())
		at.put("k", "v")
		start := time.Now()
		at.outage(true, "503")
		l := at.look(at.ch())[0]
		claimed := at.ask(10, long)
		stats, _ := at.stats()
		// All of it was before the pause ended, or before any pause may end.
		if f.clock != nil || time.Since(start) < max(l.Paused, time.Second/2) {
			f.equal("Look at a paused channel: it has an outage and a pause", l.Outage && l.Paused > 0, true)
			return at, l.Paused, claimed, stats
		}
	}
	f.Fatalf("calls take too long to see what a pause of a second does")
	panic("unreachable")
}

func outageIsProbedWithOneRow(f *fixture) {
	for _, key := range []string{"a", "b", "c"} {
		f.put(key, "v")
	}
	f.outage(true, "503")
	f.passPause()
	var (
		wg     sync.WaitGroup
		claims [4]outbox.Claimed
		errs   [4]error
	)
	for i := range claims {
		wg.Go(func() {
			c := outbox.Claim{Channel: f.channel, Limit: 10, Lease: long, Full: true}
			claims[i], errs[i] = f.store.ClaimRows(f.ctx, c)
		})
	}
	wg.Wait()
	probes := []outbox.Row{}
	for i, c := range claims {
		f.ok("ClaimRows beside others", errs[i])
		if probes = append(probes, c.Rows...); c.Probe != (len(c.Rows) == 1) {
			f.Fatalf("ClaimRows after a pause returned %s (probe %t)", keys(c.Rows), c.Probe)
		}
	}
	f.equal("number of probes given out", len(probes), 1)
	f.claimNone("a probe is under way")

	f.settle("the probe", done(probes[0]), outbox.ResultDone)
	f.outage(false, "")
	f.waits("had an outage", 0)
	c := f.ask(10, long)
	f.equal("rows after the outage", len(c.Rows), 2)
	f.equal("probe after the outage", c.Probe, false)
	got, _ := f.stats()
	f.equal("paused, outage and reason after the outage", []any{got.Paused, got.Outage, got.Reason}, []any{time.Duration(0), false, ""})
}
