package outboxtest

import (
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// amendTests hold what operators do to messages.
var amendTests = []journalTest{
	{"RetryByHandStartsAnew", retryByHandStartsAnew},
	{"ResolvedMessageIsWhatWasFoundOut", resolvedMessageIsWhatWasFoundOut},
	{"DiscardTakesTheMessageFromItsHolder", discardTakesTheMessageFromItsHolder},
	{"AmendmentNarrowsByEachFilter", amendmentNarrowsByEachFilter},
	{"AmendmentGoesInPages", amendmentGoesInPages},
	{"DryRunOfAnAmendmentCounts", dryRunOfAnAmendmentCounts},
}

func retryByHandStartsAnew(f *journalFixture) {
	for i, end := range []func(outbox.Row) outbox.Settlement{
		func(r outbox.Row) outbox.Settlement { return retry(r, long, "503") }, dead, unknown,
	} {
		f := f.on(newChannel())
		f.put("k", []string{"", "g"}[i%2])
		f.settle("retry", retry(f.claimOne(long), 0, "first"), outbox.ResultDone)
		r := f.claimOne(long)
		s := end(r)
		f.settle("end", s, outbox.ResultDone)
		f.amend("retry", outbox.ActionRetry, outbox.MessageFilter{}, 1)
		want := after(r, s)
		want.State, want.Attempt, want.CompletedAt, want.Due = outbox.StatePending, 0, time.Time{}, time.Time{}
		f.like("the message", f.get("k"), want)
		f.waits("holds a message to be tried again", 0)
		f.settle("by its last holder", done(r), outbox.ResultStale)
		again := f.claimOne(long)
		f.equal("attempt and last error", []any{again.Attempt, again.LastError}, []any{1, s.Error})
		f.finish(again)
	}
}

func resolvedMessageIsWhatWasFoundOut(f *journalFixture) {
	for action, change := range map[outbox.Action]func(*outbox.Row){
		outbox.ActionSent:    func(r *outbox.Row) { r.State, r.Ref = outbox.StateSent, "by hand" },
		outbox.ActionDead:    func(r *outbox.Row) { r.State = outbox.StateDead },
		outbox.ActionPending: func(r *outbox.Row) { r.State, r.CompletedAt, r.Due = outbox.StateFailed, time.Time{}, time.Time{} },
	} {
		f := f.on(newChannel())
		f.put("k", "")
		f.settle("retry", retry(f.claimOne(long), 0, "first"), outbox.ResultDone)
		r := f.claimOne(long)
		f.settle("unknown", unknown(r), outbox.ResultDone)
		want := after(r, unknown(r))
		f.amend("resolve", action, byKey("k"), 1)
		change(&want)
		got := f.get("k")
		f.like(fmt.Sprintf("the message after action %d", action), got, want)
		if action == outbox.ActionPending {
			f.equal("attempt", f.claimOne(long).Attempt, 3)
		} else {
			f.claimNone("it has ended")
		}
	}
}

func discardTakesTheMessageFromItsHolder(f *journalFixture) {
	f.put("k", "")
	r := f.claimOne(long)
	f.amend("discard", outbox.ActionDiscard, byKey("k"), 1)
	f.gone("k", "discarded")
	f.extend("a discarded message", []outbox.Row{r}, long, outbox.ResultStale)
	f.settle("a discarded message", retry(r, 0, "x"), outbox.ResultStale)
	f.amend("discard again", outbox.ActionDiscard, byKey("k"), 0)
	f.put("k", "")
	f.settle("a discarded message that has a successor", done(r), outbox.ResultStale)
	next := f.claimOne(long)
	if next.Token <= r.Token {
		f.Fatalf("token %d does not exceed its predecessor %d", next.Token, r.Token)
	}
}

func amendmentNarrowsByEachFilter(f *journalFixture) {
	for _, c := range []struct {
		filter outbox.MessageFilter
		left   []string
	}{
		{byKey("dead"), []string{"single", "failed", "unknown", "g1", "g2", "pending"}},
		{outbox.MessageFilter{Group: "g"}, []string{"single", "failed", "dead", "unknown", "pending"}},
		{outbox.MessageFilter{Code: "408"}, []string{"single", "failed", "dead", "g1", "g2", "pending"}},
		{outbox.MessageFilter{States: []outbox.State{outbox.StateDead, outbox.StatePending}}, []string{"single", "failed", "unknown", "g1"}},
		{outbox.MessageFilter{Key: "dead", Group: "g"}, []string{"single", "failed", "dead", "unknown", "g1", "g2", "pending"}},
		{outbox.MessageFilter{}, []string{}},
	} {
		f := f.on(newChannel())
		f.scene()
		f.amend("discard", outbox.ActionDiscard, c.filter, 7-len(c.left))
		f.equal(fmt.Sprintf("messages left by the filter %+v", c.filter), keys(f.list(outbox.MessageList{Limit: 10})), c.left)
	}
}

func amendmentGoesInPages(f *journalFixture) {
	for i := range 25 {
		f.put(fmt.Sprintf("%02d", i), "")
	}
	for _, r := range f.claim() {
		if s := dead(r); r.Key[1] != '7' {
			f.settle("dead", s, outbox.ResultDone)
		}
	}
	a := outbox.Amendment{Action: outbox.ActionRetry, Limit: 10}
	total, calls := 0, 0
	for more := true; more; more = a.After != 0 {
		got, err := f.store.AmendMessages(f.ctx, nil, f.channel, a)
		f.ok("AmendMessages", err)
		if got.Count > a.Limit || got.Last != 0 && got.Last <= a.After {
			f.Fatalf("AmendMessages of at most %d messages after %d answered %+v", a.Limit, a.After, got)
		}
		if calls++; calls == 1 {
			pages := f.list(outbox.MessageList{MessageFilter: outbox.MessageFilter{States: []outbox.State{outbox.StatePending}}, Limit: 100})
			f.equal("messages amended first: the oldest", pages[0].Key, "00")
		}
		total, a.After = total+got.Count, got.Last
		f.equal("calls until the end: few", calls < 30, true)
	}
	f.equal("messages amended in all", total, 23)
	f.equal("messages to claim", len(f.claim()), 23)
}

func dryRunOfAnAmendmentCounts(f *journalFixture) {
	f.scene()
	before := f.list(outbox.MessageList{Limit: 10})
	for action, want := range map[outbox.Action]int{
		outbox.ActionRetry: 3, outbox.ActionDiscard: 7, outbox.ActionSent: 1, outbox.ActionDead: 1, outbox.ActionPending: 1,
	} {
		a, err := f.store.AmendMessages(f.ctx, nil, f.channel, outbox.Amendment{Action: action, Limit: 10, DryRun: true})
		f.ok("AmendMessages", err)
		f.equal(fmt.Sprintf("messages counted for action %d", action), a.Count, want)
	}
	for i, r := range f.list(outbox.MessageList{Limit: 10}) {
		f.same("the message "+r.Key, r, before[i])
	}
	f.claimThese("after dry runs", "failed", "pending")
}
