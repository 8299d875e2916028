package outboxtest

import (
	"fmt"
	"slices"
	"testing"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// groupTests hold the order of a group: runs, of which one is out at most.
var groupTests = []journalTest{
	{"GroupIsClaimedAsARunInItsOrder", groupIsClaimedAsARunInItsOrder},
	{"RunsOfGroupsAreNotMixed", runsOfGroupsAreNotMixed},
	{"OneRunOfAGroupIsOutAtMost", oneRunOfAGroupIsOutAtMost},
	{"GroupIsLetGoAfterTheLastOfItsRun", groupIsLetGoAfterTheLastOfItsRun},
	{"RetryOfAHeadIsNeverOvertaken", retryOfAHeadIsNeverOvertaken},
	{"ReleasedRunComesBackWhole", releasedRunComesBackWhole},
	{"RunIsCutWhereOneIsNotDue", runIsCutWhereOneIsNotDue},
	{"RunIsCutByTheLimit", runIsCutByTheLimit},
	{"SentMessagesDoNotBlock", sentMessagesDoNotBlock},
	{"GroupOutlivesItsMessages", groupOutlivesItsMessages},
	{"GroupsAndSinglesShareClaims", groupsAndSinglesShareClaims},
	{"LostRunIsNotOvertaken", lostRunIsNotOvertaken},
}

func groupIsClaimedAsARunInItsOrder(f *journalFixture) {
	f.puts("g", "c", "a", "b")
	rows := f.claimThese("the run", "c", "a", "b")
	for _, r := range rows {
		f.equal("token of "+r.Key, r.Token, rows[0].Token)
		f.equal("state and attempt of "+r.Key, []any{r.State, r.Attempt}, []any{outbox.StateSending, 1})
	}
	f.finish(rows...)
	f.claimNone("all are done")
}

func runsOfGroupsAreNotMixed(f *journalFixture) {
	for _, key := range []string{"a1", "b1", "x", "c1", "b2", "a2", "y", "c2", "a3"} {
		f.put(key, map[byte]string{'a': "a", 'b': "b", 'c': "c"}[key[0]])
	}
	runs, last := map[string][]string{}, ""
	for _, r := range f.claim() {
		if r.Group != last && len(runs[r.Group]) > 0 && r.Group != "" {
			f.Fatalf("the run of group %s is interrupted by group %q", r.Group, last)
		}
		last = r.Group
		runs[r.Group] = append(runs[r.Group], r.Key)
	}
	f.equal("messages claimed", runs, map[string][]string{"": {"x", "y"}, "a": {"a1", "a2", "a3"}, "b": {"b1", "b2"}, "c": {"c1", "c2"}})
}

func oneRunOfAGroupIsOutAtMost(f *journalFixture) {
	f.puts("g", "1", "2", "3")
	first := f.ask(2, long).Rows
	f.equal("first run", keys(first), []string{"1", "2"})
	f.claimNone("a run of the group is out")
	f.put("4", "g")
	f.claimNone("a run of the group is out, whatever is put")
	f.finish(first...)
	f.claimThese("the rest", "3", "4")
}

func groupIsLetGoAfterTheLastOfItsRun(f *journalFixture) {
	for _, in := range [][]int{{0, 1, 2}, {2, 1, 0}, {1, 0, 2}} {
		f := f.on(newChannel())
		f.puts("g", "1", "2", "3")
		rows := f.claimThese("the run", "1", "2", "3")
		f.put("4", "g")
		for _, i := range in {
			f.claimNone("messages of the run are out")
			f.finish(rows[i])
		}
		f.finish(f.claimThese("after the last of the run", "4")...)
		f.claimNone("all are done")
	}
	f.puts("h", "1", "2", "3")
	rows := f.claim()
	f.put("4", "h")
	f.settleAll("the whole run at once", []outbox.Settlement{done(rows[0]), done(rows[1]), done(rows[2])},
		outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
	f.claimThese("after the run", "4")
}

func retryOfAHeadIsNeverOvertaken(f *journalFixture) {
	for _, outcome := range []outbox.Outcome{outbox.OutcomeRetry, outbox.OutcomeRelease} {
		f := f.on(newChannel())
		f.puts("g", "1", "2", "3")
		rows := f.claimThese("the run", "1", "2", "3")
		f.settleAll("the head waits", []outbox.Settlement{
			{Row: rows[0], Outcome: outcome, Delay: 4 * short, Error: "503"}, release(rows[1], 0), release(rows[2], 0),
		}, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
		f.put("4", "g")
		if f.clock != nil {
			f.claimNone("the head waits, and all behind it")
		}
		f.startFails("behind a head that waits", "2", outbox.ErrBlocked)
		f.equal("messages claimed then", keys(f.claimAfter(4*short, long)), []string{"1", "2", "3", "4"})
	}
}

func releasedRunComesBackWhole(f *journalFixture) {
	f.puts("g", "1", "2", "3")
	rows := f.claim()
	f.finish(rows[0])
	for i, r := range rows[1:] {
		f.settle("give back", release(r, 0), outbox.ResultDone)
		f.like("a message given back", f.get(r.Key), after(rows[i+1], release(r, 0)))
	}
	f.claimThese("the rest", "2", "3")
}

func runIsCutWhereOneIsNotDue(f *journalFixture) {
	delayed := message("2", "g")
	delayed.Delay = 4 * short
	f.put("1", "g")
	f.putAll(delayed, message("3", "g"))
	r := f.claimOne(long)
	f.equal("message claimed", r.Key, "1")
	f.finish(r)
	if f.clock != nil {
		f.claimNone("the second is not due, and the third is behind it")
	}
	f.equal("messages claimed then", keys(f.claimAfter(4*short, long)), []string{"2", "3"})
}

func runIsCutByTheLimit(f *journalFixture) {
	all := []string{}
	for i := range 20 {
		all = append(all, fmt.Sprintf("%02d", i))
	}
	f.puts("g", all...)
	got := []string{}
	for range 20 {
		rows := f.ask(3, long).Rows
		got = append(got, keys(rows)...)
		f.finish(rows...)
	}
	f.equal("messages claimed", got, all)
}

func sentMessagesDoNotBlock(f *journalFixture) {
	f.puts("g", "1", "2")
	for _, r := range f.ask(1, long).Rows {
		f.settle("sent", kept(r, "ref"), outbox.ResultDone)
	}
	f.put("3", "g")
	rows := f.claimThese("behind one that is sent and kept", "2", "3")
	f.settleAll("sent", []outbox.Settlement{kept(rows[0], ""), kept(rows[1], "")}, outbox.ResultDone, outbox.ResultDone)
	f.claimNone("all are sent")
	f.put("4", "g")
	f.start("4", long)
}

func groupOutlivesItsMessages(f *journalFixture) {
	for i := range 4 {
		key := fmt.Sprint(i)
		f.put(key, "g")
		f.finish(f.claimThese("of a group that had no message", key)...)
		f.claimNone("all are done")
	}
}

// However much comes in of both, groups and single messages get their turn.
func groupsAndSinglesShareClaims(f *journalFixture) {
	n, kinds := 0, map[bool]int{}
	for round := range 10 {
		rows := []outbox.PutRow{}
		for range []int{40, 10, 10, 10, 10, 10, 10, 10, 10, 10}[round] {
			n++
			rows = append(rows, message(fmt.Sprintf("g%03d", n), fmt.Sprintf("g%03d", n)), message(fmt.Sprintf("s%03d", n), ""))
		}
		f.putAll(rows...)
		f.pass(short / 50)
		for _, r := range f.ask(10, long).Rows {
			kinds[r.Group == ""]++
		}
	}
	if kinds[true]+kinds[false] != 100 || kinds[true] < 20 || kinds[false] < 20 {
		f.Fatalf("of 10 claims of 10, %d messages are single and %d of groups, want 100 in all and a fair share of both", kinds[true], kinds[false])
	}
}

// A holder that died with a run leaves the whole of it to the next one.
func lostRunIsNotOvertaken(f *journalFixture) {
	f.puts("g", "1", "2")
	first := f.ask(10, short).Rows
	f.put("3", "g")
	rows := f.claimAfter(2*short, long)
	f.equal("messages claimed", keys(rows), []string{"1", "2", "3"})
	f.equal("ambiguous", []bool{rows[0].Ambiguous, rows[1].Ambiguous, rows[2].Ambiguous}, []bool{true, true, false})
	for _, r := range first { // the dead holder was only slow
		f.settle("by the lapsed token", done(r), outbox.ResultStale)
	}
	f.claimNone("the run is out, whatever a stale holder settles")
	f.finish(rows...)
	f.claimNone("all are done")
}

// drain claims and settles until nothing is due, and returns the keys of each
// group in the order in which they came, and the number of claims.
func (f *journalFixture) drain(limit int) (byGroup map[string][]string, claims int) {
	f.Helper()
	byGroup = map[string][]string{}
	for {
		rows := f.ask(limit, long).Rows
		if claims++; len(rows) == 0 {
			return byGroup, claims
		}
		ss, want := []outbox.Settlement{}, []outbox.Result{}
		for _, r := range rows {
			byGroup[r.Group] = append(byGroup[r.Group], r.Key)
			ss, want = append(ss, done(r)), append(want, outbox.ResultDone)
		}
		f.settleAll("a batch", ss, want...)
	}
}

func thousandsOfGroupsDrainInOrder(f *journalFixture) {
	groups := 2000
	if testing.Short() {
		groups = 300
	}
	rows, want := []outbox.PutRow{}, map[string][]string{}
	for i := range 3 * groups {
		group := fmt.Sprint("g", i%groups)
		rows = append(rows, message(fmt.Sprintf("%05d", i), group))
		want[group] = append(want[group], rows[i].Key)
	}
	for part := range slices.Chunk(rows, 1000) {
		f.putAll(part...)
	}
	got, claims := f.drain(500)
	f.equal("messages of each group, in their order", got, want)
	if most := 10 + 3*len(rows)/500; claims > most {
		f.Fatalf("draining %d messages took %d claims of 500, want up to %d", len(rows), claims, most)
	}
}

func longGroupDrainsInOrder(f *journalFixture) {
	n := 3000
	if testing.Short() {
		n = 500
	}
	rows, want := []outbox.PutRow{}, []string{}
	for i := range n {
		rows = append(rows, message(fmt.Sprintf("%05d", i), "g"))
		want = append(want, rows[i].Key)
	}
	f.putAll(rows...)
	got, claims := f.drain(100)
	f.equal("messages of the group, in their order", got["g"], want)
	if most := 10 + 2*n/100; claims > most {
		f.Fatalf("draining %d messages of one group took %d claims of 100, want up to %d", n, claims, most)
	}
}

func blockedGroupsDoNotHideOthers(f *journalFixture) {
	n := 1500
	if testing.Short() {
		n = 200
	}
	rows := []outbox.PutRow{}
	for i := range n {
		group := fmt.Sprint("g", i)
		rows = append(rows, message("a"+group, group), message("b"+group, group))
	}
	for part := range slices.Chunk(rows, 1000) {
		f.putAll(part...)
	}
	blocked := 0
	for range 10 + 3*n/100 {
		claimed := f.ask(500, long).Rows
		ss, want := []outbox.Settlement{}, []outbox.Result{}
		for _, r := range claimed {
			if s := release(r, 0); r.Key[0] == 'b' {
				ss = append(ss, s)
			} else {
				ss = append(ss, dead(r))
				blocked++
			}
			want = append(want, outbox.ResultDone)
		}
		f.settleAll("dead heads", ss, want...)
	}
	f.equal("dead heads", blocked, n)
	f.put("single", "")
	f.put("grouped", "h")
	seen := []string{}
	for range 10 + 3*n/100 { // a few claims may find only blocked groups, which they put aside
		seen = append(seen, keys(f.ask(100, long).Rows)...)
	}
	f.equal("messages claimed beside blocked groups", sorted(seen), []string{"grouped", "single"})
	stats, _ := f.stats()
	f.equal("blocked groups and dead messages", []int{stats.Blocked, stats.Dead}, []int{n, n})
}
