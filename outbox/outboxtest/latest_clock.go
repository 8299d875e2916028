package outboxtest

import (
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// clockTests hold times to the microsecond, on a clock that the suite moves.
var clockTests = []latestTest{
	{"TimesAreTheClocks", timesAreTheClocks},
	{"LeaseHoldsUntilItsEnd", leaseHoldsUntilItsEnd},
	{"RetryIsDueExactlyAfterItsDelay", retryIsDueExactlyAfterItsDelay},
	{"BatchDelayRoundsUp", batchDelayRoundsUp},
	{"StageOnABoundaryIsDueAtOnce", stageOnABoundaryIsDueAtOnce},
	{"RestageInAWindowKeepsItsBoundary", restageInAWindowKeepsItsBoundary},
	{"RestageWhileLeasedWaitsForItsBoundary", restageWhileLeasedWaitsForItsBoundary},
	{"ClockSetBackKeepsVersionsIncreasing", clockSetBackKeepsVersionsIncreasing},
	{"ReportsInAPauseDoNotLengthenIt", reportsInAPauseDoNotLengthenIt},
	{"PausesGrowWithFailedProbes", pausesGrowWithFailedProbes},
	{"EmptyClaimTakesNoProbe", emptyClaimTakesNoProbe},
	{"LostProbeIsGivenOutAgain", lostProbeIsGivenOutAgain},
}

// boundary moves the clock to a whole multiple of d since the Unix epoch.
func (f *base) boundary(d time.Duration) time.Time {
	f.Helper()
	since := time.Duration(f.clock.Now().UnixMicro()) * time.Microsecond
	return f.clock.Advance(d - since%d)
}

func timesAreTheClocks(f *fixture) {
	at := f.clock.Advance(time.Microsecond)
	v := f.stage(0, value("k", "1"))[0]
	want := unclaimed(value("k", "1"), v)
	want.StagedAt, want.Due = at, at
	f.sameRow("a staged row", f.row("k"), want)

	now := f.clock.Advance(time.Second)
	r := f.claimOne(time.Minute)
	want.Attempt, want.Token, want.LeaseUntil = 1, r.Token, now.Add(time.Minute)
	f.sameRow("a claimed row", r, want)

	now = f.clock.Advance(time.Second)
	f.extend("in force", []outbox.Row{r}, 2*time.Minute, outbox.ResultDone)
	want.LeaseUntil = now.Add(2 * time.Minute)
	f.sameRow("an extended row", f.row("k"), want)
	stats, _ := f.stats()
	f.equal("oldest due age while the row is leased", stats.OldestDue, time.Duration(0))

	now = f.clock.Advance(time.Second)
	f.settle("retry", retry(r, time.Minute, "x"), outbox.ResultDone)
	want.Due, want.LastError, want.Token, want.LeaseUntil = now.Add(time.Minute), "x", 0, time.Time{}
	f.sameRow("a row in backoff", f.rowWithoutToken("k"), want)
	f.equal("Look at it", f.look(f.ch()), []outbox.Look{{Wait: time.Minute}})

	f.clock.Advance(3 * time.Minute)
	stats, _ = f.stats()
	f.equal("oldest due age", stats.OldestDue, 2*time.Minute)
}

func leaseHoldsUntilItsEnd(f *fixture) {
	f.put("k", "v")
	f.claimOne(time.Minute)
	f.clock.Advance(time.Minute - time.Microsecond)
	f.claimNone("the lease has a microsecond to go")
	f.clock.Advance(2 * time.Microsecond)
	f.equal("attempt", f.claimOne(time.Minute).Attempt, 2)
}

func retryIsDueExactlyAfterItsDelay(f *fixture) {
	f.put("k", "v")
	f.settle("retry", retry(f.claimOne(time.Minute), time.Minute, "x"), outbox.ResultDone)
	f.clock.Advance(time.Minute - time.Microsecond)
	f.claimNone("the delay has a microsecond to go")
	f.equal("Look", f.look(f.ch()), []outbox.Look{{Wait: time.Microsecond}})
	f.clock.Advance(time.Microsecond)
	f.waits("holds a row that came due this microsecond", 0)
	f.settle("release", release(f.claimOne(time.Minute), time.Minute), outbox.ResultDone)
	f.clock.Advance(time.Minute - time.Microsecond)
	f.claimNone("the delay has a microsecond to go")
	f.clock.Advance(time.Microsecond)
	f.claimOne(time.Minute)
}

func batchDelayRoundsUp(f *fixture) {
	for _, delay := range []time.Duration{time.Millisecond, 7 * time.Second, 24 * time.Hour} {
		f := f.on(newChannel())
		start := f.boundary(delay)
		f.clock.Advance(time.Microsecond)
		f.stage(delay, value("k", "v"))
		f.equal("due time", f.row("k").Due, start.Add(delay))
		f.equal("Look", f.look(f.ch()), []outbox.Look{{Wait: delay - time.Microsecond}})
		f.clock.Advance(delay - 2*time.Microsecond)
		f.claimNone("the window has a microsecond to go")
		f.clock.Advance(time.Microsecond)
		f.claimOne(time.Minute)
	}
}

func stageOnABoundaryIsDueAtOnce(f *fixture) {
	start := f.boundary(7 * time.Second)
	f.stage(7*time.Second, value("k", "v"))
	f.equal("due time", f.row("k").Due, start)
	f.claimOne(time.Minute)
}

func restageInAWindowKeepsItsBoundary(f *fixture) {
	const delay = 10 * time.Second
	start := f.boundary(delay)
	f.clock.Advance(time.Second)
	f.stage(delay, value("k", "1"))
	f.clock.Advance(8 * time.Second)
	f.stage(delay, value("k", "2"))
	f.equal("due time after a restage in the window", f.row("k").Due, start.Add(delay))
	f.equal("time of the restage", f.row("k").StagedAt, f.clock.Now())
	f.clock.Advance(2 * time.Second)
	v := f.stage(delay, value("k", "3"))[0]
	f.equal("due time after a restage beyond it", f.row("k").Due, start.Add(delay))
	f.equal("claimed version", f.claimOne(time.Minute).Version, v)
}

func restageWhileLeasedWaitsForItsBoundary(f *fixture) {
	const delay = 10 * time.Second
	start := f.boundary(delay)
	f.stage(delay, value("k", "1"))
	old := f.claimOne(time.Minute)
	f.clock.Advance(time.Second)
	f.stage(delay, value("k", "2"))
	f.equal("due time of the new value", f.row("k").Due, start.Add(delay))
	f.clock.Advance(10 * time.Second)
	v := f.stage(delay, value("k", "3"))[0]
	f.equal("due time of the newest value", f.row("k").Due, start.Add(delay))
	f.claimNone("the old value is leased")
	f.settle("the old value", done(old), outbox.ResultSuperseded)
	f.equal("claimed version", f.claimOne(time.Minute).Version, v)
}

func clockSetBackKeepsVersionsIncreasing(f *fixture) {
	v := f.put("k", "1")
	r := f.claimOne(time.Minute)
	f.settle("done", done(r), outbox.ResultDone)
	f.clock.Advance(-time.Hour)
	defer f.clock.Advance(time.Hour)
	f.increases("with the clock set back", v, f.put("k", "2"))
	next := f.claimOne(time.Minute)
	if next.Token <= r.Token {
		f.Fatalf("with the clock set back: token %d does not exceed its predecessor %d", next.Token, r.Token)
	}
}

func reportsInAPauseDoNotLengthenIt(f *fixture) {
	f.put("k", "v")
	f.outage(true, "503")
	pause := f.paused()
	f.clock.Advance(pause / 2)
	left := f.paused()
	for range 20 { // as many publications of the fleet fail at once
		f.outage(true, "503")
	}
	f.equal("rest of the pause", f.paused(), left)
	f.clock.Advance(left)
	f.settle("the probe", release(f.probe(time.Minute), 0), outbox.ResultDone)
	f.outage(true, "503")
	if next := f.paused(); next > 4*time.Second {
		f.Fatalf("the second pause is %v, want about two seconds: reports in the first counted", next)
	}
}

func pausesGrowWithFailedProbes(f *fixture) {
	f.put("k", "v")
	f.outage(true, "503")
	first := f.paused()
	last := first
	for probe := range 15 {
		f.passPause()
		f.settle("the probe", release(f.probe(time.Minute), 0), outbox.ResultDone)
		f.outage(true, "503")
		if last = f.paused(); last > 5*time.Minute {
			f.Fatalf("the pause after %d failed probes is %v, over 5 minutes", probe+1, last)
		}
		f.claimNone("the channel is paused again")
		if probe == 2 && last <= 2*first {
			f.Fatalf("the pauses do not grow: the first is %v, the fourth %v", first, last)
		}
	}
	if last < 2*time.Minute {
		f.Fatalf("the pause after 15 failed probes is %v, want about 5 minutes", last)
	}
	f.equal("attempts of the row that probed", f.row("k").Attempt, 0)

	f.outage(false, "")
	f.outage(true, "503")
	if again := f.paused(); again > 2*first {
		f.Fatalf("the first pause of the next outage is %v, want about a second as ever", again)
	}
}

func emptyClaimTakesNoProbe(f *fixture) {
	f.outage(true, "503")
	f.passPause()
	f.claimNone("there is no row to probe with")
	f.put("k", "v")
	f.settle("the probe", done(f.probe(time.Minute)), outbox.ResultDone)
}

func lostProbeIsGivenOutAgain(f *fixture) {
	f.put("a", "v")
	f.put("b", "v")
	f.outage(true, "503")
	f.passPause()
	f.probe(time.Minute)
	f.clock.Advance(30 * time.Second)
	f.claimNone("a probe is under way")
	f.clock.Advance(31 * time.Second)
	f.probe(time.Minute) // whoever had the first died with it
}
