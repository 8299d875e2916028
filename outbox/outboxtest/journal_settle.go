package outboxtest

import (
	"database/sql"
	"fmt"
	"math"
	"strings"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageSettleTests hold what a settlement makes of a message, and when it may.
var messageSettleTests = []journalTest{
	{"SettlementMakesOfAMessageWhatItSays", settlementMakesOfAMessageWhatItSays},
	{"EachSettlementOfAMessageHasItsResult", eachSettlementOfAMessageHasItsResult},
	{"SameSettlementOfAMessageAgainIsDone", sameSettlementOfAMessageAgainIsDone},
	{"OtherSettlementOfAMessageAfterwardsIsStale", otherSettlementOfAMessageAfterwardsIsStale},
	{"GoneMessageIsStaleUnlessSettledAgain", goneMessageIsStaleUnlessSettledAgain},
	{"LapsedLeaseOfAMessageNobodyTookIsSettled", lapsedLeaseOfAMessageNobodyTookIsSettled},
	{"StaleTokenOfAMessageChangesNothing", staleTokenOfAMessageChangesNothing},
	{"FailedMessageComesBackAfterItsDelay", failedMessageComesBackAfterItsDelay},
	{"ReleaseOfAMessageGivesTheAttemptBack", releaseOfAMessageGivesTheAttemptBack},
	{"LongestDelaysAndErrorsAreKept", longestDelaysAndErrorsAreKept},
	{"KeyAndTokenAreEnough", keyAndTokenAreEnough},
	{"TransactionIsNeededWhereOneIsNamed", transactionIsNeededWhereOneIsNamed},
}

// everySettlement returns one settlement of r for each outcome, kept and not.
func everySettlement(r outbox.Row) []outbox.Settlement {
	failed := retry(r, long, "503")
	failed.Code = "E503"
	return []outbox.Settlement{done(r), kept(r, "ref"), failed, {Row: r, Outcome: outbox.OutcomeRelease, Delay: long, Error: "later", Code: "429"}, dead(r), unknown(r)}
}

func settlementMakesOfAMessageWhatItSays(f *journalFixture) {
	for i := range everySettlement(outbox.Row{}) {
		for _, group := range []string{"", fmt.Sprint("g", i)} {
			f := f.on(newChannel())
			f.put("k", group)
			r := f.claimOne(long)
			s := everySettlement(r)[i]
			f.settle("settlement", s, outbox.ResultDone)
			if s.Outcome == outbox.OutcomeDone && !s.Keep {
				f.gone("k", "done")
			} else {
				f.like(fmt.Sprintf("message after settlement %d", i), f.get("k"), after(r, s))
			}
			f.claimNone("its only message has ended, or waits for an hour")
			if wait := f.look(f.ch())[0].Wait; s.Delay == 0 && wait >= 0 || s.Delay > 0 && (wait <= 0 || wait > long) {
				f.Fatalf("Look after settlement %d says to claim in %v", i, wait)
			}
		}
	}
}

func eachSettlementOfAMessageHasItsResult(f *journalFixture) {
	f.puts("", "a", "b", "c", "d", "e", "f", "g")
	f.puts("x", "x1", "x2")
	rows := map[string]outbox.Row{}
	for _, r := range f.claim() {
		rows[r.Key] = r
	}
	f.equal("number of claimed messages", len(rows), 9)
	f.finish(rows["d"])
	foreign := rows["f"]
	foreign.Token++ // a token that f never had
	f.settleAll("ten at once", []outbox.Settlement{
		done(foreign), kept(rows["e"], "ref"), done(rows["d"]), release(rows["c"], 0), done(rows["a"]),
		retry(rows["b"], long, "x"), again(done(rows["d"])), dead(rows["g"]), done(rows["x1"]), unknown(rows["x2"]),
	}, outbox.ResultStale, outbox.ResultDone, outbox.ResultStale, outbox.ResultDone, outbox.ResultDone,
		outbox.ResultDone, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
	f.gone("a", "done")
	f.gone("x1", "done")
	f.same("f, whose token was not its own", f.get("f"), rows["f"])
	for key, s := range map[string]outbox.Settlement{
		"b": retry(rows["b"], long, "x"), "c": release(rows["c"], 0), "e": kept(rows["e"], "ref"), "g": dead(rows["g"]), "x2": unknown(rows["x2"]),
	} {
		f.like(key, f.get(key), after(rows[key], s))
	}
}

// keeps are the settlements after which a message is still there.
func keeps(r outbox.Row) []outbox.Settlement { return everySettlement(r)[1:] }

func sameSettlementOfAMessageAgainIsDone(f *journalFixture) {
	for i := range keeps(outbox.Row{}) {
		f := f.on(newChannel())
		f.put("k", []string{"", "g"}[i%2])
		s := keeps(f.claimOne(long))[i]
		f.settle("first", s, outbox.ResultDone)
		once := f.get("k")
		for range 2 {
			f.settle("the same again", s, outbox.ResultDone)
			s.Again = true
		}
		got := f.get("k")
		once.Due, once.CompletedAt = got.Due, got.CompletedAt // may be counted from the second call
		f.same("the message settled three times", got, once)
	}
}

func otherSettlementOfAMessageAfterwardsIsStale(f *journalFixture) {
	for i := range keeps(outbox.Row{}) {
		f := f.on(newChannel())
		f.put("k", "")
		r := f.claimOne(long)
		first := keeps(r)[i]
		f.settle("first", first, outbox.ResultDone)
		before := f.get("k")
		for _, s := range everySettlement(r) {
			if s.Outcome != first.Outcome {
				f.settle(fmt.Sprintf("outcome %d after %d", s.Outcome, first.Outcome), s, outbox.ResultStale)
				f.settle(fmt.Sprintf("outcome %d after %d, said to be again", s.Outcome, first.Outcome), again(s), outbox.ResultStale)
			}
		}
		f.extend("settled", []outbox.Row{r}, long, outbox.ResultStale)
		f.same("the message", f.get("k"), before)
	}
}

func goneMessageIsStaleUnlessSettledAgain(f *journalFixture) {
	f.put("k", "")
	r := f.claimOne(long)
	f.finish(r)
	for _, s := range everySettlement(r) {
		f.settle("a message that is gone", s, outbox.ResultStale)
		f.settle("a message that is gone, again", again(s), outbox.ResultDone)
	}
	f.gone("k", "done")
	f.put("k", "")
	next := f.claimOne(long)
	for _, s := range everySettlement(r) {
		f.settle("a message that was put anew", s, outbox.ResultStale)
	}
	f.same("the new message", f.get("k"), next)
}

func lapsedLeaseOfAMessageNobodyTookIsSettled(f *journalFixture) {
	for i := range everySettlement(outbox.Row{}) {
		f := f.on(newChannel())
		f.put("1", "g")
		r := f.claimOne(short)
		f.put("2", "g")
		f.pass(2 * short)
		s := everySettlement(r)[i]
		f.settle("a lapsed lease", s, outbox.ResultDone)
		if s.Outcome == outbox.OutcomeDone {
			f.claimThese("after it was done", "2")
		} else {
			f.claimNone("its head waits, or has ended")
		}
	}
}

func staleTokenOfAMessageChangesNothing(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		f.put("k"+group, group)
		old := f.claimOne(short)
		r := f.claimAfter(2*short, long)[0]
		for _, s := range everySettlement(old) {
			f.settle("by a stale token", s, outbox.ResultStale)
			f.settle("by a stale token, again", again(s), outbox.ResultStale)
		}
		f.extend("by a stale token", []outbox.Row{old}, 2*long, outbox.ResultStale)
		f.same("the message", f.get("k"+group), r)
		f.claimNone("its message is leased")
	}
}

func failedMessageComesBackAfterItsDelay(f *journalFixture) {
	v := f.put("k", "g")
	for attempt := 1; attempt <= 3; attempt++ {
		rows := f.claimAfter(short, long)
		f.equal("messages claimed", keys(rows), []string{"k"})
		r := rows[0]
		f.equal("number and attempt", []any{r.Version, r.Attempt}, []any{v, attempt})
		if attempt > 1 {
			f.equal("last error", r.LastError, fmt.Sprintf("failure %d", attempt-1))
		}
		f.settle("retry", retry(r, short, fmt.Sprintf("failure %d", attempt)), outbox.ResultDone)
	}
}

func releaseOfAMessageGivesTheAttemptBack(f *journalFixture) {
	f.put("k", "")
	f.settle("release", release(f.claimOne(long), 0), outbox.ResultDone)
	r := f.get("k")
	f.equal("state and attempts after a release", []any{r.State, r.Attempt}, []any{outbox.StatePending, 0})
	f.settle("retry", retry(f.claimOne(long), 0, "first"), outbox.ResultDone)
	for range 3 {
		r := f.claimOne(long)
		f.equal("attempt", r.Attempt, 2)
		s := release(r, 0)
		s.Error = "not called"
		f.settle("release", s, outbox.ResultDone)
		f.like("the message after a release", f.get("k"), after(r, s))
	}
}

func longestDelaysAndErrorsAreKept(f *journalFixture) {
	f.puts("", "a", "b", "c", "d")
	rows := f.claim()
	text := strings.Repeat("é'\n\"", outbox.MaxErrorText)
	text = text[:outbox.MaxErrorText/5*5] + strings.Repeat(".", outbox.MaxErrorText%5)
	failed, poison := retry(rows[0], math.MaxInt64, text), dead(rows[2])
	poison.Error, failed.Code, poison.Code = text, "日本", "'$1\\"
	f.settleAll("292 years", []outbox.Settlement{failed, release(rows[1], math.MaxInt64), poison, kept(rows[3], "ref '日本' $1 \\")},
		outbox.ResultDone, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
	f.claimNone("two are due in 292 years, two have ended")
	for _, s := range []outbox.Settlement{failed, poison} {
		r := f.get(s.Row.Key)
		f.equal("last error and code of "+r.Key, []string{r.LastError, r.Code}, []string{s.Error, s.Code})
	}
	f.equal("ref", f.get("d").Ref, "ref '日本' $1 \\")
}

// What a caller keeps of a lease is its key and its token.
func keyAndTokenAreEnough(f *journalFixture) {
	f.puts("g", "1", "2")
	r := f.ask(1, long).Rows[0]
	bare := outbox.Row{Key: r.Key, Token: r.Token}
	if f.db == nil {
		f.extend("by key and token", []outbox.Row{bare}, 2*long, outbox.ResultDone)
		f.settle("by key and token", kept(bare, "ref"), outbox.ResultDone)
	} else {
		f.keyAndTokenIn(f.begin(), bare)
	}
	f.like("the message", f.get("1"), after(r, kept(r, "ref")))
	f.claimThese("after the group was let go", "2")
}

func (f *journalFixture) keyAndTokenIn(tx *sql.Tx, bare outbox.Row) {
	f.Helper()
	got, err := f.store.ExtendMessages(f.ctx, outbox.SQL(tx), f.channel, []outbox.Row{bare}, 2*long)
	f.ok("ExtendMessages", err)
	f.equal("ExtendMessages", named(got), []string{"done"})
	got, err = f.store.SettleMessages(f.ctx, outbox.SQL(tx), f.channel, []outbox.Settlement{kept(bare, "ref")})
	f.ok("SettleMessages", err)
	f.equal("SettleMessages", named(got), []string{"done"})
	f.commit(tx)
}

func transactionIsNeededWhereOneIsNamed(f *journalFixture) {
	f.put("k", "")
	r := f.claimOne(long)
	_, err := f.store.SettleMessages(f.ctx, nil, f.channel, []outbox.Settlement{done(r)})
	f.fails("SettleMessages without a transaction", err, outbox.ErrTx)
	_, err = f.store.ExtendMessages(f.ctx, nil, f.channel, []outbox.Row{r}, 2*long)
	f.fails("ExtendMessages without a transaction", err, outbox.ErrTx)
	f.same("the message", f.get("k"), r)
}
