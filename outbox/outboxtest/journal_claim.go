package outboxtest

import (
	"context"
	"fmt"
	"slices"
	"sync"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageClaimTests hold which messages ClaimMessages gives out, and to whom.
var messageClaimTests = []journalTest{
	{"ClaimReturnsTheWholeMessage", claimReturnsTheWholeMessage},
	{"EmptyJournalGivesNothing", emptyJournalGivesNothing},
	{"MessagesComeInTheOrderOfDueTimes", messagesComeInTheOrderOfDueTimes},
	{"ClaimOfMessagesTakesNoMoreThanItsLimit", claimOfMessagesTakesNoMoreThanItsLimit},
	{"LeasedMessageIsNotClaimedAgain", leasedMessageIsNotClaimedAgain},
	{"EndedMessagesAreNotClaimed", endedMessagesAreNotClaimed},
	{"FreshMessageIsClaimedWithoutAFullPass", freshMessageIsClaimedWithoutAFullPass},
	{"TokensOfAMessageIncrease", tokensOfAMessageIncrease},
	{"ClaimsAtOnceShareNoMessage", claimsAtOnceShareNoMessage},
	{"CancelledCallsOfTheJournalChangeNothing", cancelledCallsOfTheJournalChangeNothing},
}

func sorted(s []string) []string {
	slices.Sort(s)
	return s
}

func claimReturnsTheWholeMessage(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		p := message("k"+group, group)
		p.Header = outbox.Header{"tenant": "t"}
		f.putAll(p)
		stored := f.get(p.Key)
		r := f.claimOne(long)
		if r.Token <= 0 {
			f.Fatalf("the claim's token is %d, want one above 0", r.Token)
		}
		f.like("ClaimMessages", r, sending(stored, r.Token))
		f.equal("ambiguous", r.Ambiguous, false)
		f.same("the stored message", f.get(p.Key), r)
		f.settle("retry", outbox.Settlement{Row: r, Outcome: outbox.OutcomeRetry, Error: "503 again", Code: "503"}, outbox.ResultDone)
		again := f.claimOne(long)
		f.equal("last error and code", []string{again.LastError, again.Code}, []string{"503 again", "503"})
	}
}

func emptyJournalGivesNothing(f *journalFixture) {
	f.claimNone("nothing was ever put")
	p := message("k", "g")
	p.Delay = long
	f.putAll(p)
	f.claimNone("its message is due in an hour")
}

func messagesComeInTheOrderOfDueTimes(f *journalFixture) {
	for _, key := range []string{"c", "a", "d", "b"} {
		f.put(key, "")
		f.pass(short / 50)
	}
	first := f.ask(3, long).Rows
	f.equal("first claim", keys(first), []string{"c", "a", "d"})
	f.settleAll("retries", []outbox.Settlement{retry(first[0], 2*short/5, "x"), release(first[1], 3*short/5), retry(first[2], short/5, "x")},
		outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
	f.pass(short)
	f.put("e", "")
	f.equal("second claim", keys(f.claim()), []string{"b", "d", "c", "a", "e"})
}

func claimOfMessagesTakesNoMoreThanItsLimit(f *journalFixture) {
	rows := []outbox.PutRow{}
	for i := range 25 {
		rows = append(rows, message(fmt.Sprintf("%02d", i), ""))
	}
	f.putAll(rows...)
	seen := map[string]bool{}
	for _, step := range []struct{ limit, want int }{{1, 1}, {10, 10}, {10, 10}, {10, 4}, {10, 0}} {
		got := f.ask(step.limit, long).Rows
		f.equal(fmt.Sprintf("messages of a claim of up to %d", step.limit), len(got), step.want)
		for _, r := range got {
			seen[r.Key] = true
		}
	}
	f.equal("distinct keys", len(seen), len(rows))
}

func leasedMessageIsNotClaimedAgain(f *journalFixture) {
	f.put("k", "")
	r := f.claimOne(long)
	f.claimNone("its only message is leased")
	f.pass(short)
	f.claimNone("its only message is still leased")
	f.same("the leased message", f.get("k"), r)
}

func endedMessagesAreNotClaimed(f *journalFixture) {
	f.putAll(message("sent", ""), message("dead", ""), message("unknown", ""))
	for _, r := range f.claim() {
		f.settle(r.Key, map[string]outbox.Settlement{"sent": kept(r, ""), "dead": dead(r), "unknown": unknown(r)}[r.Key], outbox.ResultDone)
	}
	f.pass(short)
	f.claimNone("its messages have ended")
	f.equal("claimed with SkipEnded", len(f.askFor(outbox.Claim{Limit: 10, Lease: long, Full: true, SkipEnded: true}).Rows), 0)
}

// A claim that is not full may leave out messages that came due long ago, yet
// not the ones that are put and claimed in step with it.
func freshMessageIsClaimedWithoutAFullPass(f *journalFixture) {
	for i := range 6 {
		key := fmt.Sprint(i)
		f.put(key, []string{"", "g"}[i%2])
		c := f.askFor(outbox.Claim{Limit: 10, Lease: long})
		f.equal("messages claimed", keys(c.Rows), []string{key})
		f.finish(c.Rows[0])
	}
}

func tokensOfAMessageIncrease(f *journalFixture) {
	last := outbox.Token(0)
	next := func(after string) outbox.Row {
		f.Helper()
		r := f.claimOne(long)
		if r.Token <= last {
			f.Fatalf("after %s: token %d does not exceed its predecessor %d", after, r.Token, last)
		}
		last = r.Token
		return r
	}
	f.put("k", "")
	f.settle("retry", retry(next("the first put"), 0, ""), outbox.ResultDone)
	f.settle("release", release(next("a retry"), 0), outbox.ResultDone)
	f.settle("dead", dead(next("a release")), outbox.ResultDone)
	f.amend("retry by hand", outbox.ActionRetry, byKey("k"), 1)
	f.finish(next("a retry by hand"))
	f.put("k", "")
	next("the message was done and put anew")
	f.amend("discard", outbox.ActionDiscard, byKey("k"), 1)
	f.put("k", "")
	next("a discard")
}

func claimsAtOnceShareNoMessage(f *journalFixture) {
	rows := []outbox.PutRow{}
	for i := range 60 {
		rows = append(rows, message(fmt.Sprintf("%02d", i), []string{"", "", fmt.Sprint("g", i%12)}[i%3]))
	}
	f.putAll(rows...)
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		taken = map[string]int{}
	)
	take := func(rs []outbox.Row) {
		mu.Lock()
		defer mu.Unlock()
		for _, r := range rs {
			if taken[r.Key]++; taken[r.Key] > 1 {
				f.Errorf("message %s was given out twice", r.Key)
			}
		}
	}
	for range 4 {
		wg.Go(func() {
			for empty := 0; empty < 5 && !f.Failed(); empty++ {
				c, err := f.store.ClaimMessages(f.ctx, nil, outbox.Claim{Channel: f.channel, Limit: 3, Lease: long, Full: true})
				if err != nil {
					f.Errorf("ClaimMessages beside others: %v", err)
					return
				}
				if take(c.Rows); len(c.Rows) > 0 {
					empty = 0
				}
			}
		})
	}
	wg.Wait()
	take(f.claim())
	byGroup := map[string]int{} // a run may be cut by the limit: the rest of its group waits
	for _, row := range rows {
		if row.Group == "" {
			f.equal("claims of "+row.Key, taken[row.Key], 1)
		} else {
			byGroup[row.Group] += taken[row.Key]
		}
	}
	for group, n := range byGroup {
		f.equal("claims of group "+group+": some", n > 0, true)
	}
}

func cancelledCallsOfTheJournalChangeNothing(f *journalFixture) {
	f.put("k", "")
	cancelled, cancel := context.WithCancel(f.ctx)
	cancel()
	_, err := f.store.ClaimMessages(cancelled, nil, outbox.Claim{Channel: f.channel, Limit: 1, Lease: long, Full: true})
	f.fails("ClaimMessages under a cancelled context", err, context.Canceled)
	_, err = f.store.BeginMessage(cancelled, nil, f.channel, "k", long)
	f.fails("BeginMessage under a cancelled context", err, context.Canceled)
	_, err = f.store.AmendMessages(cancelled, nil, f.channel, outbox.Amendment{Action: outbox.ActionDiscard, Limit: 1})
	f.fails("AmendMessages under a cancelled context", err, context.Canceled)
	r := f.claimOne(long)
	f.equal("attempts after the cancelled claim", r.Attempt, 1)
	for _, s := range []outbox.Settlement{done(r), kept(r, ""), retry(r, 0, "x"), release(r, 0), dead(r), unknown(r)} {
		_, err = f.store.Settle(cancelled, f.ch(), []outbox.Settlement{s})
		f.fails("Settle under a cancelled context", err, context.Canceled)
	}
	_, err = f.store.Extend(cancelled, f.ch(), []outbox.Row{r}, 2*long)
	f.fails("Extend under a cancelled context", err, context.Canceled)
	_, err = f.store.PurgeMessages(cancelled, f.channel, outbox.Purge{States: ended, Limit: 1})
	f.fails("PurgeMessages under a cancelled context", err, context.Canceled)
	f.same("the message after the cancelled calls", f.get("k"), r)
}
