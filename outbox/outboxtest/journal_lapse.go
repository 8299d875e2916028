package outboxtest

import (
	"fmt"
	"slices"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// lapseTests hold what becomes of messages whose holder died: perhaps sent,
// perhaps the ones that killed it.
var lapseTests = []journalTest{
	{"LapsedMessageComesBackAmbiguous", lapsedMessageComesBackAmbiguous},
	{"LapsesInCompanyCostNoAttempt", lapsesInCompanyCostNoAttempt},
	{"TwiceLapsedIsClaimedAlone", twiceLapsedIsClaimedAlone},
	{"TwiceLapsedOfAGroupIsClaimedAlone", twiceLapsedOfAGroupIsClaimedAlone},
	{"SettlementForgetsLapses", settlementForgetsLapses},
	{"DoubtOutlivesSettlements", doubtOutlivesSettlements},
	{"BystandersOfAPoisonMessageSurvive", bystandersOfAPoisonMessageSurvive},
}

func lapsedMessageComesBackAmbiguous(f *journalFixture) {
	f.putAll(message("k", ""), message("g1", "g"), message("g2", "g"))
	first := f.ask(10, short).Rows
	f.equal("messages claimed", len(first), 3)
	rows := f.claimAfter(2*short, long)
	for len(rows) < 3 && f.clock == nil { // they lapse together, not at once
		rows = append(rows, f.claim()...)
	}
	f.equal("messages claimed again", sorted(keys(rows)), []string{"g1", "g2", "k"})
	for _, r := range rows {
		f.equal("ambiguous "+r.Key, r.Ambiguous, true)
		old := first[slices.IndexFunc(first, func(o outbox.Row) bool { return o.Key == r.Key })]
		if r.Token <= old.Token {
			f.Fatalf("token %d of %s does not exceed its predecessor %d", r.Token, r.Key, old.Token)
		}
		f.settle("by the lapsed token", done(old), outbox.ResultStale)
		f.extend("by the lapsed token", []outbox.Row{old}, long, outbox.ResultStale)
		f.same("the message", f.get(r.Key), r)
	}
}

// lapsesTo claims until the message of a key comes out of its nth claim, and
// lets the leases of those before lapse.
func (f *journalFixture) lapsesTo(n int) (claims [][]outbox.Row) {
	f.Helper()
	claims = append(claims, f.ask(1000, short).Rows)
	for range n - 1 {
		claims = append(claims, f.claimAfter(2*short, short))
	}
	return claims
}

func lapsesInCompanyCostNoAttempt(f *journalFixture) {
	f.put("k", "")
	for i, rows := range f.lapsesTo(5) {
		f.equal(fmt.Sprintf("messages of claim %d", i+1), keys(rows), []string{"k"})
		// The first two leases were such as others could have shared.
		want := []int{1, 1, 1, 2, 3}[i]
		f.equal(fmt.Sprintf("attempt of claim %d", i+1), rows[0].Attempt, want)
		f.equal(fmt.Sprintf("ambiguous in claim %d", i+1), rows[0].Ambiguous, i > 0)
	}
}

func twiceLapsedIsClaimedAlone(f *journalFixture) {
	f.put("poison", "")
	f.lapsesTo(2)
	f.pass(2 * short)
	f.puts("", "a", "b", "c")
	f.puts("g", "d", "e")
	seen := []string{}
	for range 6 {
		rows := f.claim()
		if slices.Contains(keys(rows), "poison") {
			f.equal("the claim that has the poison", keys(rows), []string{"poison"})
		}
		seen = append(seen, keys(rows)...)
	}
	f.equal("messages claimed", sorted(seen), []string{"a", "b", "c", "d", "e", "poison"})
}

func twiceLapsedOfAGroupIsClaimedAlone(f *journalFixture) {
	f.puts("g", "1", "2", "3")
	f.lapsesTo(2)
	f.pass(2 * short)
	f.put("single", "")
	seen := []string{}
	for range 20 {
		rows := f.claim()
		if slices.Contains(keys(rows), "1") || slices.Contains(keys(rows), "2") {
			f.equal("the number of messages claimed with one of a run that lapsed twice", len(rows), 1)
		}
		for _, r := range rows {
			if seen = append(seen, r.Key); r.Group != "" {
				f.finish(r)
			}
		}
	}
	seen = slices.DeleteFunc(seen, func(key string) bool { return key == "single" })
	f.equal("messages claimed", seen, []string{"1", "2", "3"})
}

func settlementForgetsLapses(f *journalFixture) {
	f.put("k", "")
	alone := f.lapsesTo(3)[2]
	f.equal("alone and ambiguous", []bool{alone[0].Alone, alone[0].Ambiguous}, []bool{true, true})
	f.settle("retry", with(retry(alone[0], 0, "x"), outbox.DoubtCleared), outbox.ResultDone)
	f.put("company", "")
	rows := f.ask(10, short).Rows
	f.equal("messages claimed after a settlement", keys(rows), []string{"k", "company"})
	f.equal("attempt, ambiguous, alone", []any{rows[0].Attempt, rows[0].Ambiguous, rows[0].Alone}, []any{2, false, false})
	f.pass(2 * short)
	rows = f.claimThese("after the first lapse since", "k", "company")
	f.equal("attempt, ambiguous, alone", []any{rows[0].Attempt, rows[0].Ambiguous, rows[0].Alone}, []any{2, true, false})
}

func with(s outbox.Settlement, d outbox.Doubt) outbox.Settlement {
	s.Doubt = d
	return s
}

// Nobody knows what became of an attempt until somebody has found out: that
// another one failed, or was given back, does not tell.
func doubtOutlivesSettlements(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		f := f.on(newChannel())
		f.put("k", group)
		r := f.lapsesTo(3)[2][0] // as if it had killed two holders
		expect := func(what string, alone, ambiguous bool) {
			f.Helper()
			f.equal(what+": alone, ambiguous", []bool{r.Alone, r.Ambiguous}, []bool{alone, ambiguous})
		}
		expect("the third claim", true, true)
		settle := func(s outbox.Settlement, d outbox.Doubt) {
			f.Helper()
			f.settle("the message", with(s, d), outbox.ResultDone)
		}
		settle(retry(r, 0, "503"), outbox.DoubtKept)
		r = f.claimOne(long)
		expect("after a retry", false, true)
		settle(release(r, 0), outbox.DoubtKept)
		r = f.start("k", long)
		expect("begun after a release", false, true)
		settle(retry(r, long, "503"), outbox.DoubtKept)
		f.amend("retry by hand", outbox.ActionRetry, byKey("k"), 1)
		r = f.claimOne(long)
		expect("after a retry by hand", false, true)
		settle(release(r, 0), outbox.DoubtCleared)
		r = f.claimOne(long)
		expect("after it was cleared", false, false)
		settle(retry(r, 0, "503"), outbox.DoubtKept)
		r = f.claimOne(long)
		expect("after a retry that tells nothing", false, false)
		settle(retry(r, 0, "timeout"), outbox.DoubtRaised)
		r = f.claimOne(short)
		expect("after it was raised", false, true)
		rows := f.claimAfter(2*short, long)
		f.equal("attempts after a lapse in company", rows[0].Attempt, r.Attempt)
		r = rows[0]
		expect("after a lapse", true, true)
		settle(unknown(r), outbox.DoubtRaised)
		f.amend("decide", outbox.ActionPending, byKey("k"), 1)
		r = f.claimOne(long)
		expect("after a person said that it was not sent", false, false)
		settle(retry(r, 0, "timeout"), outbox.DoubtRaised)
		settle(dead(f.claimOne(long)), outbox.DoubtKept)
		f.amend("retry", outbox.ActionRetry, byKey("k"), 1)
		r = f.claimOne(long)
		expect("dead and retried", false, false)
		f.finish(r)
	}
}

// Whoever claims the poison dies, until it has used up its attempts; everybody
// else settles.
func bystandersOfAPoisonMessageSurvive(f *journalFixture) {
	f.puts("", "a", "b", "poison", "c", "d")
	f.puts("g", "e", "f")
	sent, attempts := map[string]int{}, 0
	for range 40 {
		rows := f.ask(1000, short).Rows
		if i := slices.IndexFunc(rows, func(r outbox.Row) bool { return r.Key == "poison" }); i >= 0 {
			if attempts = rows[i].Attempt; attempts >= 3 {
				f.equal("the claim that has the poison", len(rows), 1)
				f.settle("the poison", unknown(rows[i]), outbox.ResultDone)
			}
			f.pass(2 * short)
			continue
		}
		for _, r := range rows {
			f.finish(r)
			sent[r.Key] = r.Attempt
		}
		if len(sent) == 6 && attempts >= 3 {
			break
		}
	}
	f.equal("messages sent, and in which attempt", sent, map[string]int{"a": 1, "b": 1, "c": 1, "d": 1, "e": 1, "f": 1})
	f.equal("attempts of the poison", attempts, 3)
}
