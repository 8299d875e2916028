package outboxtest

import (
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// settleTests hold what Settle makes of a row, and when it may.
var settleTests = []latestTest{
	{"DoneDeletesTheRow", doneDeletesTheRow},
	{"RetryKeepsTheRowForItsDelay", retryKeepsTheRowForItsDelay},
	{"RetryComesBackAfterItsDelay", retryComesBackAfterItsDelay},
	{"ReleaseGivesTheAttemptBack", releaseGivesTheAttemptBack},
	{"LongestDelayDoesNotOverflow", longestDelayDoesNotOverflow},
	{"LongestErrorIsKept", longestErrorIsKept},
	{"EachSettlementHasItsResult", eachSettlementHasItsResult},
	{"SameSettlementAgainIsDone", sameSettlementAgainIsDone},
	{"OtherSettlementAfterwardsIsStale", otherSettlementAfterwardsIsStale},
	{"GoneRowIsStaleUnlessSettledAgain", goneRowIsStaleUnlessSettledAgain},
	{"LapsedLeaseNobodyTookIsSettled", lapsedLeaseNobodyTookIsSettled},
	{"StaleTokenChangesNothing", staleTokenChangesNothing},
}

func doneDeletesTheRow(f *fixture) {
	f.stage(0, value("a", "1"), value("b", "2"))
	claimed := f.claim()
	f.equal("number of claimed rows", len(claimed), 2)
	f.settle("the first", done(claimed[0]), outbox.ResultDone)
	f.gone(claimed[0].Key, "acknowledged")
	f.equal("the row beside it", f.row(claimed[1].Key), claimed[1])
	f.claimNone("one row is gone, the other leased")
}

// settled is what a retry or release makes of the claimed row r.
func settled(r outbox.Row, s outbox.Settlement) outbox.Row {
	r.Token, r.LeaseUntil, r.Due, r.LastError = 0, time.Time{}, time.Time{}, s.Error
	if s.Outcome == outbox.OutcomeRelease {
		r.Attempt--
	}
	return r
}

func retryKeepsTheRowForItsDelay(f *fixture) {
	f.put("k", "v")
	s := retry(f.claimOne(long), long, "sink says: 503")
	f.settle("retry", s, outbox.ResultDone)
	got := f.rowWithoutToken("k")
	f.sameRow("the row after a retry", got, settled(s.Row, s))
	if wait := got.Due.Sub(s.Row.Due); wait < long {
		f.Fatalf("the row is due again %v after its last due time, want %v or more", wait, long)
	}
	f.claimNone("its only row is due in an hour")
}

func retryComesBackAfterItsDelay(f *fixture) {
	v := f.put("k", "v")
	for attempt := 1; attempt <= 3; attempt++ {
		rows := f.claimAfter(short, long)
		f.equal("claimed keys", keys(rows), []string{"k"})
		r := rows[0]
		f.equal("version", r.Version, v)
		f.equal("attempt", r.Attempt, attempt)
		if attempt > 1 {
			f.equal("last error", r.LastError, fmt.Sprintf("failure %d", attempt-1))
		}
		f.settle("retry", retry(r, short, fmt.Sprintf("failure %d", attempt)), outbox.ResultDone)
	}
	f.settle("retry at once", retry(f.claimAfter(short, long)[0], 0, ""), outbox.ResultDone)
	f.equal("attempt after a retry without delay", f.claimOne(long).Attempt, 5)
}

func releaseGivesTheAttemptBack(f *fixture) {
	f.put("k", "v")
	f.settle("retry", retry(f.claimOne(long), 0, "first"), outbox.ResultDone)
	for range 3 {
		r := f.claimOne(long)
		f.equal("attempt", r.Attempt, 2)
		s := release(r, 0)
		s.Error = "not called"
		f.settle("release", s, outbox.ResultDone)
		f.sameRow("the row after a release", f.rowWithoutToken("k"), settled(r, s))
	}
	f.settle("release", release(f.claimOne(long), long), outbox.ResultDone)
	f.claimNone("its only row was released for an hour")
	f.equal("attempts of the released row", f.row("k").Attempt, 1)
}

func longestDelayDoesNotOverflow(f *fixture) {
	f.stage(0, value("a", "v"), value("b", "v"))
	claimed := f.claim()
	f.equal("number of claimed rows", len(claimed), 2)
	f.settleAll("292 years", []outbox.Settlement{
		retry(claimed[0], math.MaxInt64, ""), release(claimed[1], math.MaxInt64),
	}, outbox.ResultDone, outbox.ResultDone)
	f.claimNone("both rows are due in 292 years")
}

func longestErrorIsKept(f *fixture) {
	f.put("k", "v")
	text := strings.Repeat("é'\n\"", outbox.MaxErrorText)
	text = text[:outbox.MaxErrorText/5*5] + strings.Repeat(".", outbox.MaxErrorText%5)
	f.settle("retry", retry(f.claimOne(long), 0, text), outbox.ResultDone)
	f.equal("last error", f.claimOne(long).LastError, text)
}

func eachSettlementHasItsResult(f *fixture) {
	keys := []string{"a", "b", "c", "d", "e", "f"}
	rows := map[string]outbox.Row{}
	for _, key := range keys {
		f.put(key, "v")
	}
	for _, r := range f.claim() {
		rows[r.Key] = r
	}
	f.equal("number of claimed rows", len(rows), len(keys))
	f.settle("d, which is then gone", done(rows["d"]), outbox.ResultDone)
	f.put("e", "newer")
	foreign := rows["f"]
	foreign.Token++ // a token that f never had

	f.settleAll("six at once", []outbox.Settlement{
		done(foreign), done(rows["e"]), done(rows["d"]), release(rows["c"], 0), done(rows["a"]), retry(rows["b"], long, "x"),
	}, outbox.ResultStale, outbox.ResultSuperseded, outbox.ResultStale, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)

	f.gone("a", "acknowledged")
	f.sameRow("b, to be tried again", f.rowWithoutToken("b"), settled(rows["b"], retry(rows["b"], long, "x")))
	f.sameRow("c, released", f.rowWithoutToken("c"), settled(rows["c"], release(rows["c"], 0)))
	f.equal("payload of e, staged again", string(f.row("e").Payload), "newer")
	f.equal("f, whose token was not its own", f.row("f"), rows["f"])
}

func sameSettlementAgainIsDone(f *fixture) {
	for _, outcome := range []outbox.Outcome{outbox.OutcomeRetry, outbox.OutcomeRelease} {
		f := f.on(fmt.Sprintf("%s-%d", f.channel, outcome))
		f.put("k", "v")
		s := outbox.Settlement{Row: f.claimOne(long), Outcome: outcome, Delay: long, Error: "x"}
		f.settle("first", s, outbox.ResultDone)
		once := f.row("k")
		once.Due = time.Time{} // may be counted from the second call
		f.settle("the same again", s, outbox.ResultDone)
		f.sameRow("the row settled twice", f.row("k"), once)
		f.settle("the same again, and said so", again(s), outbox.ResultDone)
		f.sameRow("the row settled three times", f.row("k"), once)
		f.claimNone("the row is due in an hour")
	}
}

func otherSettlementAfterwardsIsStale(f *fixture) {
	of := func(o outbox.Outcome, r outbox.Row) outbox.Settlement {
		return outbox.Settlement{Row: r, Outcome: o, Delay: long, Error: "x"}
	}
	for _, first := range []outbox.Outcome{outbox.OutcomeRetry, outbox.OutcomeRelease} {
		for _, second := range []outbox.Outcome{outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeRelease} {
			if first == second {
				continue
			}
			f := f.on(fmt.Sprintf("%s-%d%d", f.channel, first, second))
			f.put("k", "v")
			r := f.claimOne(long)
			f.settle("first", of(first, r), outbox.ResultDone)
			before := f.row("k")
			f.settle(fmt.Sprintf("outcome %d after %d", second, first), of(second, r), outbox.ResultStale)
			f.equal("the row", f.row("k"), before)
			f.settle(fmt.Sprintf("outcome %d after %d, again", second, first), again(of(second, r)), outbox.ResultStale)
			f.equal("the row", f.row("k"), before)
		}
	}
}

func goneRowIsStaleUnlessSettledAgain(f *fixture) {
	v := f.stage(0, value("a", "v"), value("b", "v"))[1]
	claimed := map[string]outbox.Row{}
	for _, r := range f.claim() {
		claimed[r.Key] = r
	}
	a, b := claimed["a"], claimed["b"]
	f.settle("a", done(a), outbox.ResultDone)
	f.settle("a, gone", done(a), outbox.ResultStale)
	f.settle("a, gone, and said so", again(done(a)), outbox.ResultDone)

	f.ok("DiscardRow", f.store.DiscardRow(f.ctx, f.channel, "b", v))
	f.settle("b, discarded", retry(b, 0, "x"), outbox.ResultStale)
	f.settle("b, discarded, again", again(retry(b, 0, "x")), outbox.ResultDone)
	f.settleAll("both, of which b says so", []outbox.Settlement{done(a), again(retry(b, 0, "x"))},
		outbox.ResultStale, outbox.ResultDone)
	f.gone("a", "acknowledged")
	f.gone("b", "discarded")

	f.put("a", "newer") // a row of its own, which the old settlement must leave alone
	before := f.row("a")
	f.settleAll("a's former row", []outbox.Settlement{done(a)}, outbox.ResultStale)
	f.settleAll("a's former row, and said so", []outbox.Settlement{again(done(a))}, outbox.ResultDone)
	f.equal("a's new row", f.row("a"), before)
}

func lapsedLeaseNobodyTookIsSettled(f *fixture) {
	for _, key := range []string{"a", "b"} {
		f.put(key, "v")
	}
	rows := f.ask(2, short).Rows
	f.equal("claimed keys", keys(rows), []string{"a", "b"})
	f.pass(2 * short)
	s := retry(rows[1], long, "late")
	f.settleAll("after the lapse", []outbox.Settlement{done(rows[0]), s}, outbox.ResultDone, outbox.ResultDone)
	f.gone("a", "acknowledged")
	f.sameRow("b", f.rowWithoutToken("b"), settled(rows[1], s))
}

func staleTokenChangesNothing(f *fixture) {
	f.put("k", "v")
	old := f.claimOne(short)
	rows := f.claimAfter(short, long)
	f.equal("claimed keys", keys(rows), []string{"k"})
	for _, s := range []outbox.Settlement{done(old), retry(old, 0, "x"), release(old, 0)} {
		f.settle(fmt.Sprintf("outcome %d of a lost lease", s.Outcome), s, outbox.ResultStale)
		f.settle(fmt.Sprintf("outcome %d of a lost lease, again", s.Outcome), again(s), outbox.ResultStale)
		f.equal("the row", f.row("k"), rows[0])
	}
	f.put("k", "newer")
	newer := f.row("k")
	f.settle("a lost lease of a row staged again", done(old), outbox.ResultStale)
	f.equal("the row", f.row("k"), newer)
	f.settle("the lease in force", done(rows[0]), outbox.ResultSuperseded)
}
