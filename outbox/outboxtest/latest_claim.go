package outboxtest

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// claimTests hold what ClaimRows gives out, and to whom.
var claimTests = []latestTest{
	{"ClaimReturnsTheWholeRow", claimReturnsTheWholeRow},
	{"EmptyChannelGivesNothing", emptyChannelGivesNothing},
	{"ClaimsComeInTheOrderOfDueTimes", claimsComeInTheOrderOfDueTimes},
	{"RetriesComeInTheOrderOfDueTimes", retriesComeInTheOrderOfDueTimes},
	{"ClaimTakesNoMoreThanItsLimit", claimTakesNoMoreThanItsLimit},
	{"LeasedRowIsNotClaimedAgain", leasedRowIsNotClaimedAgain},
	{"LapsedLeaseIsClaimedAgain", lapsedLeaseIsClaimedAgain},
	{"TokensOfAKeyIncrease", tokensOfAKeyIncrease},
	{"FreshRowIsClaimedWithoutAFullPass", freshRowIsClaimedWithoutAFullPass},
	{"ClaimsAtOnceShareNoRow", claimsAtOnceShareNoRow},
	{"CancelledClaimTakesNothing", cancelledClaimTakesNothing},
}

func claimReturnsTheWholeRow(f *fixture) {
	row := outbox.StageRow{Key: "k", Payload: []byte("v"), Header: outbox.Header{"tenant": "t"}}
	v := f.stage(0, row)[0]
	staged := f.row("k")
	got := f.claimOne(long)
	if got.Token <= 0 {
		f.Fatalf("the claim's token is %d, want one above 0", got.Token)
	}
	want := unclaimed(row, v)
	want.Attempt, want.Token, want.LeaseUntil = 1, got.Token, leased
	want.StagedAt, want.Due = staged.StagedAt, staged.Due
	f.sameRow("ClaimRows", got, want)
	f.equal("PendingRow of the claimed row", f.row("k"), got)
}

func emptyChannelGivesNothing(f *fixture) {
	f.claimNone("nothing was ever staged")
	f.stage(century, value("k", "v"))
	f.claimNone("the row is due in decades")
}

func claimsComeInTheOrderOfDueTimes(f *fixture) {
	for _, key := range []string{"c", "a", "d", "b"} {
		f.put(key, "v")
		f.pass(short / 50)
	}
	f.equal("first claim", keys(f.ask(3, long).Rows), []string{"c", "a", "d"})
	f.equal("second claim", keys(f.ask(3, long).Rows), []string{"b"})
}

func retriesComeInTheOrderOfDueTimes(f *fixture) {
	f.stage(0, value("a", "v"), value("b", "v"), value("c", "v"))
	claimed := f.claim()
	slices.SortFunc(claimed, func(x, y outbox.Row) int { return strings.Compare(x.Key, y.Key) })
	f.settleAll("retries", []outbox.Settlement{
		retry(claimed[0], 2*short/5, "x"), release(claimed[1], 3*short/5), retry(claimed[2], short/5, "x"),
	}, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
	f.pass(short)
	f.put("d", "v") // fresh rows take their turn behind those that came due before
	f.equal("claimed keys", keys(f.claim()), []string{"c", "a", "b", "d"})
}

func claimTakesNoMoreThanItsLimit(f *fixture) {
	rows := []outbox.StageRow{}
	for i := range 25 {
		rows = append(rows, value(fmt.Sprintf("%02d", i), "v"))
	}
	f.stage(0, rows...)
	seen := map[string]bool{}
	for _, step := range []struct{ limit, want int }{{1, 1}, {10, 10}, {10, 10}, {10, 4}, {10, 0}} {
		got := f.ask(step.limit, long).Rows
		f.equal(fmt.Sprintf("rows of a claim of up to %d", step.limit), len(got), step.want)
		for _, r := range got {
			seen[r.Key] = true
		}
	}
	f.equal("distinct keys", len(seen), len(rows))
}

func leasedRowIsNotClaimedAgain(f *fixture) {
	f.put("k", "v")
	r := f.claimOne(long)
	f.claimNone("its only row is leased")
	f.pass(short)
	f.claimNone("its only row is still leased")
	f.equal("the leased row", f.row("k"), r)
}

func lapsedLeaseIsClaimedAgain(f *fixture) {
	f.put("k", "v")
	first := f.claimOne(short)
	last := first
	for attempt := 2; attempt <= 3; attempt++ {
		rows := f.claimAfter(short, short)
		f.equal("claimed keys", keys(rows), []string{"k"})
		want := last
		want.Attempt, want.Token, want.LeaseUntil = attempt, rows[0].Token, leased
		f.sameRow("the row claimed again", rows[0], want)
		if rows[0].Token <= last.Token {
			f.Fatalf("token %d of claim %d does not exceed its predecessor %d", rows[0].Token, attempt, last.Token)
		}
		last = rows[0]
	}
	f.extend("the first token", []outbox.Row{first}, long, outbox.ResultStale)
	f.settle("the first token", done(first), outbox.ResultStale)
	f.equal("the row after the first token's calls", f.row("k"), last)
	f.settle("the last token", done(last), outbox.ResultDone)
}

func tokensOfAKeyIncrease(f *fixture) {
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
	f.put("k", "v")
	f.settle("retry", retry(next("the first stage"), 0, ""), outbox.ResultDone)
	f.settle("release", release(next("a retry"), 0), outbox.ResultDone)
	r := next("a release")
	f.put("k", "v")
	f.settle("restaged", done(r), outbox.ResultSuperseded)
	f.settle("done", done(next("a restage")), outbox.ResultDone)
	v := f.put("k", "v")
	next("an acknowledgement")
	f.ok("DiscardRow", f.store.DiscardRow(f.ctx, f.channel, "k", v))
	f.put("k", "v")
	next("a discard")
}

// A pass that is not full may leave out rows that came due long ago, yet not
// the ones that are staged and claimed in step with it.
func freshRowIsClaimedWithoutAFullPass(f *fixture) {
	for i := range 5 {
		v := f.put("k", fmt.Sprint(i))
		c, err := f.store.ClaimRows(f.ctx, outbox.Claim{Channel: f.channel, Limit: 10, Lease: long})
		f.ok("ClaimRows", err)
		f.equal("claimed keys", keys(c.Rows), []string{"k"})
		f.equal("claimed version", c.Rows[0].Version, v)
		f.settle("acknowledge", done(c.Rows[0]), outbox.ResultDone)
	}
}

func claimsAtOnceShareNoRow(f *fixture) {
	rows := []outbox.StageRow{}
	for i := range 60 {
		rows = append(rows, value(fmt.Sprintf("%02d", i), "v"))
	}
	f.stage(0, rows...)
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex
		taken = map[string]int{}
	)
	for range 4 {
		wg.Go(func() {
			// A relay that finds all free rows locked by another claim gets none.
			for empty := 0; empty < 5; {
				c, err := f.store.ClaimRows(f.ctx, outbox.Claim{Channel: f.channel, Limit: 3, Lease: long, Full: true})
				if err != nil {
					f.Errorf("ClaimRows beside others: %v", err)
					return
				}
				if empty++; len(c.Rows) > 0 {
					empty = 0
				}
				mu.Lock()
				for _, r := range c.Rows {
					if taken[r.Key]++; taken[r.Key] > 1 {
						f.Errorf("row %s was given out twice", r.Key)
						empty = 5
					}
				}
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	for _, r := range f.claim() {
		taken[r.Key]++
	}
	for _, row := range rows {
		f.equal("claims of "+row.Key, taken[row.Key], 1)
	}
}

func cancelledClaimTakesNothing(f *fixture) {
	f.put("k", "v")
	cancelled, cancel := context.WithCancel(f.ctx)
	cancel()
	_, err := f.store.ClaimRows(cancelled, outbox.Claim{Channel: f.channel, Limit: 1, Lease: long, Full: true})
	f.fails("ClaimRows under a cancelled context", err, context.Canceled)
	r := f.claimOne(long)
	f.equal("attempts after the cancelled claim", r.Attempt, 1)
	for _, s := range []outbox.Settlement{done(r), retry(r, 0, "x"), release(r, 0)} {
		_, err = f.store.Settle(cancelled, f.ch(), []outbox.Settlement{s})
		f.fails("Settle under a cancelled context", err, context.Canceled)
	}
	_, err = f.store.Extend(cancelled, f.ch(), []outbox.Row{r}, 2*long)
	f.fails("Extend under a cancelled context", err, context.Canceled)
	f.equal("the row after the cancelled calls", f.row("k"), r)
}
