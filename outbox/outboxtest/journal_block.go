package outboxtest

import (
	"fmt"
	"slices"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// blockTests hold what a dead or unknown message does to its group.
var blockTests = []journalTest{
	{"EndedHeadBlocksItsGroup", endedHeadBlocksItsGroup},
	{"BlockedGroupGoesOnWhenItsHeadIsAmended", blockedGroupGoesOnWhenItsHeadIsAmended},
	{"BlockedGroupGoesOnWhenItsHeadIsPurged", blockedGroupGoesOnWhenItsHeadIsPurged},
	{"BlockedGroupDoesNotBlockOthers", blockedGroupDoesNotBlockOthers},
	{"EndedHeadIsSkippedWhereAsked", endedHeadIsSkippedWhereAsked},
	{"GroupsBlockedBeforeAreSkippedToo", groupsBlockedBeforeAreSkippedToo},
	{"EndedMessageInTheMiddleCutsTheRun", endedMessageInTheMiddleCutsTheRun},
	{"DiscardOfALeasedMessageFreesItsGroup", discardOfALeasedMessageFreesItsGroup},
}

// block puts 1, 2 and 3 in a group and ends 1.
func (f *journalFixture) block(group string, end func(outbox.Row) outbox.Settlement) {
	f.Helper()
	f.puts(group, group+"1", group+"2", group+"3")
	f.settle("the head", end(f.start(group+"1", long)), outbox.ResultDone)
}

// skip claims as a channel does that skips ended messages.
func (f *journalFixture) skip(limit int) []outbox.Row {
	f.Helper()
	return f.askFor(outbox.Claim{Limit: limit, Lease: long, Full: true, SkipEnded: true}).Rows
}

func endedHeadBlocksItsGroup(f *journalFixture) {
	for i, end := range []func(outbox.Row) outbox.Settlement{dead, unknown} {
		f.block(fmt.Sprint("g", i), end)
	}
	for range 3 {
		f.claimNone("both groups are blocked")
	}
	f.waits("only holds blocked groups", -1)
	f.put("g04", "g0")
	f.claimNone("the group is blocked, whatever is put")
	f.startFails("behind a dead one", "g02", outbox.ErrBlocked)
	f.startFails("behind one of unknown fate", "g12", outbox.ErrBlocked)
}

func blockedGroupGoesOnWhenItsHeadIsAmended(f *journalFixture) {
	for _, c := range []struct {
		end    func(outbox.Row) outbox.Settlement
		action outbox.Action
		want   []string
	}{
		{dead, outbox.ActionRetry, []string{"g1", "g2", "g3"}},
		{unknown, outbox.ActionRetry, []string{"g1", "g2", "g3"}},
		{dead, outbox.ActionDiscard, []string{"g2", "g3"}},
		{unknown, outbox.ActionDiscard, []string{"g2", "g3"}},
		{unknown, outbox.ActionSent, []string{"g2", "g3"}},
		{unknown, outbox.ActionPending, []string{"g1", "g2", "g3"}},
		{unknown, outbox.ActionDead, []string{}},
	} {
		for _, parked := range []bool{false, true} {
			f := f.on(newChannel())
			f.block("g", c.end)
			if parked {
				f.claimNone("the group is blocked")
			}
			f.amend("the head", c.action, byKey("g1"), 1)
			f.claimThese(fmt.Sprintf("after action %d (claimed before: %t)", c.action, parked), c.want...)
		}
	}
}

func blockedGroupGoesOnWhenItsHeadIsPurged(f *journalFixture) {
	f.block("g", dead)
	f.claimNone("the group is blocked")
	f.pass(short)
	n, err := f.store.PurgeMessages(f.ctx, f.channel, outbox.Purge{States: ended, Limit: 10})
	f.ok("PurgeMessages", err)
	f.equal("messages purged", n, 1)
	f.claimThese("after the head was purged", "g2", "g3")
}

func blockedGroupDoesNotBlockOthers(f *journalFixture) {
	f.block("g", dead)
	f.puts("h", "h1", "h2")
	f.put("single", "")
	f.equal("messages claimed", sorted(keys(f.claim())), []string{"h1", "h2", "single"})
}

func endedHeadIsSkippedWhereAsked(f *journalFixture) {
	f.block("g", dead)
	f.block("h", unknown)
	rows := f.skip(100)
	f.equal("messages claimed", sorted(keys(rows)), []string{"g2", "g3", "h2", "h3"})
	f.equal("more of groups that are out", len(f.skip(100)), 0)
	i := slices.IndexFunc(rows, func(r outbox.Row) bool { return r.Key == "g2" })
	f.settle("retry", retry(rows[i], long, "x"), outbox.ResultDone)
	f.settle("release", release(rows[i+1], 0), outbox.ResultDone)
	f.equal("messages behind one in backoff", len(f.skip(100)), 0)
}

func groupsBlockedBeforeAreSkippedToo(f *journalFixture) {
	want := []string{}
	for i := range 30 {
		group := fmt.Sprintf("g%02d", i)
		f.block(group, dead)
		want = append(want, group+"2", group+"3")
	}
	f.claimNone("all groups are blocked") // and so put aside
	seen := []string{}
	for range 40 { // a bounded number of them comes back with each full pass
		seen = append(seen, keys(f.skip(10))...)
	}
	got := map[string]bool{}
	for _, key := range seen {
		got[key] = true
	}
	for _, key := range want {
		if key[len(key)-1] == '2' && !got[key] { // a run may be cut by the limit
			f.Fatalf("message %s, behind a dead one, was never claimed where those are skipped", key)
		}
	}
}

func endedMessageInTheMiddleCutsTheRun(f *journalFixture) {
	f.puts("g", "1", "2", "3", "4")
	rows := f.claim()
	f.settleAll("a run with a dead one", []outbox.Settlement{release(rows[0], 0), dead(rows[1]), release(rows[2], 0), release(rows[3], 0)},
		outbox.ResultDone, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
	first := f.claimThese("before the dead one", "1")
	f.finish(first...)
	f.claimNone("the dead one has become the head")
	f.equal("messages claimed where it is skipped", keys(f.skip(10)), []string{"3", "4"})
}

func discardOfALeasedMessageFreesItsGroup(f *journalFixture) {
	f.puts("g", "1", "2")
	r := f.ask(1, 2*short).Rows[0]
	f.amend("the leased head", outbox.ActionDiscard, byKey("1"), 1)
	f.settle("by its holder", done(r), outbox.ResultStale)
	// At once, or when the lease lapses that its holder had on the group.
	f.equal("messages claimed", keys(f.claimAfter(2*short, long)), []string{"2"})
}
