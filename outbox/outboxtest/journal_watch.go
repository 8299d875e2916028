package outboxtest

import (
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageWatchTests hold what a store tells about a journal's channels, asked
// and unasked, and how one goes through an outage of its destination.
var messageWatchTests = []journalTest{
	{"CheckOfTheJournalFindsNothingWrong", func(f *journalFixture) { f.ok("Check", f.store.Check(f.ctx)) }},
	{"LookTellsWhenToClaimMessages", lookTellsWhenToClaimMessages},
	{"LookTellsWhenToClaimAGroup", lookTellsWhenToClaimAGroup},
	{"LookAnswersForBothSystems", lookAnswersForBothSystems},
	{"StatsCountMessagesByState", statsCountMessagesByState},
	{"StatsShowEveryChannelOfTheJournal", statsShowEveryChannelOfTheJournal},
	{"HintsFollowPuts", hintsFollowPuts},
	{"OutagePausesTheJournalAlone", outagePausesTheJournalAlone},
	{"OutageIsProbedWithOneMessage", outageIsProbedWithOneMessage},
}

func lookTellsWhenToClaimMessages(f *journalFixture) {
	f.waits("was never used", -1)
	p := message("later", "")
	p.Delay = 10 * long
	f.putAll(p)
	f.waits("holds a delayed message", 10*long)
	f.put("k", "")
	f.waits("holds a due message", 0)
	r := f.claimOne(long)
	f.waits("holds a leased message", long)
	f.settle("retry", retry(r, long/2, "x"), outbox.ResultDone)
	f.waits("holds a message in backoff", long/2)
	f.settle("sent", kept(f.start("k", long), ""), outbox.ResultDone)
	f.settle("dead", dead(f.start("later", long)), outbox.ResultDone)
	f.waits("holds messages that have ended", -1)
	f.put("k2", "")
	f.claimOne(short)
	f.pass(2 * short)
	f.waits("holds a message whose lease has lapsed", 0)
}

func lookTellsWhenToClaimAGroup(f *journalFixture) {
	p := message("0", "g")
	p.Delay = long
	f.putAll(p, message("1", "g"))
	f.waits("holds a group whose first message is delayed", long)
	f.amend("discard", outbox.ActionDiscard, byKey("0"), 1)
	f.waits("holds a group whose first message is due", 0)
	f.put("2", "g")
	rows := f.claimThese("the run", "1", "2")
	f.waits("holds a group whose run is out", long)
	f.put("3", "g")
	f.waits("holds a group whose run is out, and a new message", long)
	f.settleAll("the run", []outbox.Settlement{retry(rows[0], long/2, "x"), release(rows[1], 0)}, outbox.ResultDone, outbox.ResultDone)
	f.waits("holds a group whose head is in backoff", long/2)
	f.settle("dead", dead(f.start("1", long)), outbox.ResultDone)
	f.claimNone("the group is blocked")
	f.waits("holds a blocked group", -1)
	f.amend("discard", outbox.ActionDiscard, byKey("1"), 1)
	f.waits("holds a group whose dead head was discarded", 0)
	f.finish(f.claimThese("the rest", "2", "3")...)
	f.claimNone("all are done")
	f.waits("holds no message", -1)
}

func lookAnswersForBothSystems(f *journalFixture) {
	f.put("k", "")
	latest := outbox.Channel{System: outbox.SystemLatest, Name: f.channel}
	none := outbox.Channel{System: outbox.SystemJournal, Name: f.channel + "-none"}
	got := f.look(latest, f.ch(), none)
	f.equal("waits: nothing, due, nothing", []bool{got[0].Wait < 0, got[1].Wait == 0, got[2].Wait < 0}, []bool{true, true, true})
}

func statsCountMessagesByState(f *journalFixture) {
	f.put("failing", "")
	f.settle("retry", retry(f.claimOne(long), 0, "404"), outbox.ResultDone)
	f.settle("retry", retry(f.claimOne(long), long, "503"), outbox.ResultDone)
	f.puts("", "dead 1", "dead 2", "unknown", "sent", "leased 1", "leased 2", "leased 3")
	for _, r := range f.claim() {
		switch r.Key {
		case "dead 1", "dead 2":
			f.settle(r.Key, dead(r), outbox.ResultDone)
		case "unknown":
			f.settle(r.Key, unknown(r), outbox.ResultDone)
		case "sent":
			f.settle(r.Key, kept(r, ""), outbox.ResultDone)
		}
	}
	p := message("delayed", "")
	p.Delay = long
	f.putAll(p)
	f.puts("", "due 1", "due 2")
	f.pass(short)
	got, _ := f.stats()
	if got.OldestDue < short || got.OldestDue > patience {
		f.Fatalf("the oldest due message has been due for %v, want %v and a little", got.OldestDue, short)
	}
	f.equal("Stats", got, outbox.ChannelStats{
		Channel: f.ch(), Due: 2, Scheduled: 2, InFlight: 3, Dead: 2, Unknown: 1, OldestDue: got.OldestDue, Attempt: 2, LastError: "503",
	})
}

func statsShowEveryChannelOfTheJournal(f *journalFixture) {
	due, delayed, out, over, blocked := f.on(newChannel()), f.on(newChannel()), f.on(newChannel()), f.on(newChannel()), f.on(newChannel())
	due.put("k", "")
	p := message("k", "")
	p.Delay = long
	delayed.putAll(p)
	out.put("k", "")
	out.claimOne(long)
	over.put("k", "")
	over.settle("dead", dead(over.claimOne(long)), outbox.ResultDone)
	blocked.puts("g", "1", "2", "3")
	blocked.settle("unknown", unknown(blocked.start("1", long)), outbox.ResultDone)
	blocked.puts("h", "4")
	blocked.settle("dead", dead(blocked.start("4", long)), outbox.ResultDone) // a group without open messages is not blocked
	blocked.claimNone("blocked, or ended")
	for i, at := range []*journalFixture{due, delayed, out, over, blocked} {
		got, _ := at.stats()
		counts := []int{got.Due, got.Scheduled, got.InFlight, got.Dead, got.Unknown, got.Blocked}
		f.equal(fmt.Sprintf("due, scheduled, in flight, dead, unknown, blocked of channel %d", i), counts,
			[][]int{{1, 0, 0, 0, 0, 0}, {0, 1, 0, 0, 0, 0}, {0, 0, 1, 0, 0, 0}, {0, 0, 0, 1, 0, 0}, {0, 0, 0, 1, 1, 1}}[i])
	}
}

func hintsFollowPuts(f *journalFixture) {
	hints, stop := f.hear()
	defer stop()
	for _, group := range []string{"", "g"} {
		tx := f.begin()
		v := f.putIn(tx, 0, message("k"+group, group))[0].Row.Version
		f.equal("hint before the commit", f.hint(hints), outbox.Hint{Channel: f.ch(), Version: v})
		f.commit(tx)
	}
	as := f.putAll(message("a", ""), message("b", ""), message("c", "g"))
	if h := f.hint(hints); !slices.ContainsFunc(as, func(a outbox.PutAnswer) bool { return a.Row.Version == h.Version }) {
		f.Fatalf("the hint's number is %d, want one of those put", h.Version)
	}
}

func outagePausesTheJournalAlone(f *journalFixture) {
	for range 20 { // in case the machine is too slow to see what a pause of a second does
		f := f.on(newChannel())
		f.put("k", "g")
		start := time.Now()
		f.outage(true, "503")
		latest := f.look(outbox.Channel{System: outbox.SystemLatest, Name: f.channel})[0]
		pause := f.look(f.ch())[0]
		claimed := f.ask(10, long)
		if f.clock == nil && time.Since(start) > time.Second/2 {
			continue
		}
		stats, _ := f.stats()
		f.equal("Look: outage and pause", pause.Outage && pause.Paused > 0 && pause.Paused <= 2*time.Second, true)
		f.equal("Look at the channel of that name of the other system", latest, outbox.Look{Wait: latest.Wait})
		f.equal("messages claimed in the pause", len(claimed.Rows), 0)
		f.equal("attempts of the message that waits", f.get("k").Attempt, 0)
		f.equal("Stats: outage, reason", []any{stats.Outage, stats.Reason}, []any{true, "503"})
		f.outage(false, "")
		f.waits("had an outage", 0)
		f.claimOne(long)
		return
	}
	f.Fatalf("calls take too long to see what a pause of a second does")
}

func outageIsProbedWithOneMessage(f *journalFixture) {
	f.puts("", "a", "b")
	f.puts("g", "c", "d")
	f.outage(true, "503")
	f.passPause()
	var (
		wg     sync.WaitGroup
		claims [4]outbox.Claimed
		errs   [4]error
	)
	for i := range claims {
		wg.Go(func() {
			claims[i], errs[i] = f.store.ClaimMessages(f.ctx, nil, outbox.Claim{Channel: f.channel, Limit: 10, Lease: long, Full: true})
		})
	}
	wg.Wait()
	probes := []outbox.Row{}
	for i, c := range claims {
		f.ok("ClaimMessages beside others", errs[i])
		if probes = append(probes, c.Rows...); c.Probe != (len(c.Rows) == 1) {
			f.Fatalf("ClaimMessages after a pause returned %s (probe %t)", keys(c.Rows), c.Probe)
		}
	}
	f.equal("number of probes given out", len(probes), 1)
	f.claimNone("a probe is under way")
	f.finish(probes[0])
	f.outage(false, "")
	c := f.ask(10, long)
	f.equal("messages after the outage", len(c.Rows), 3)
	f.equal("probe after the outage", c.Probe, false)
}

// messageClockTests hold times to the microsecond, on a clock that the suite moves.
var messageClockTests = []journalTest{
	{"TimesOfMessagesAreTheClocks", timesOfMessagesAreTheClocks},
	{"LeaseOfAMessageHoldsUntilItsEnd", leaseOfAMessageHoldsUntilItsEnd},
	{"FailedMessageIsDueExactlyAfterItsDelay", failedMessageIsDueExactlyAfterItsDelay},
	{"MessagesArePurgedByTheClock", messagesArePurgedByTheClock},
	{"ClockSetBackKeepsNumbersIncreasing", clockSetBackKeepsNumbersIncreasing},
	{"LostProbeOfAMessageIsGivenOutAgain", lostProbeOfAMessageIsGivenOutAgain},
}

func timesOfMessagesAreTheClocks(f *journalFixture) {
	at := f.clock.Advance(time.Microsecond)
	p := message("k", "g")
	p.Delay = time.Minute
	want := pending(p, f.putAll(p)[0].Row.Version)
	want.StagedAt, want.Due = at, at.Add(time.Minute)
	f.like("a message", f.get("k"), want)

	now := f.clock.Advance(time.Minute)
	r := f.claimOne(time.Minute)
	want.State, want.Attempt, want.Token, want.LeaseUntil = outbox.StateSending, 1, r.Token, now.Add(time.Minute)
	f.like("a claimed message", r, want)

	now = f.clock.Advance(time.Second)
	f.extend("in force", []outbox.Row{r}, 2*time.Minute, outbox.ResultDone)
	want.LeaseUntil = now.Add(2 * time.Minute)
	f.like("an extended message", f.get("k"), want)

	now = f.clock.Advance(time.Second)
	f.settle("retry", retry(r, time.Minute, "x"), outbox.ResultDone)
	want.State, want.Due, want.LastError, want.LeaseUntil = outbox.StateFailed, now.Add(time.Minute), "x", time.Time{}
	f.like("a message in backoff", f.get("k"), want)
	f.equal("Look at it", f.look(f.ch()), []outbox.Look{{Wait: time.Minute}})

	now = f.clock.Advance(time.Hour)
	f.settle("sent", kept(f.claimOne(time.Minute), "ref"), outbox.ResultDone)
	want.State, want.Attempt, want.CompletedAt, want.Ref = outbox.StateSent, 2, now, "ref"
	got := f.get("k")
	want.LastError = got.LastError // of a message that was sent after all, as the store likes
	f.like("a sent message", got, want)
}

func leaseOfAMessageHoldsUntilItsEnd(f *journalFixture) {
	f.puts("g", "1", "2")
	f.put("single", "")
	f.equal("messages claimed", len(f.ask(10, time.Minute).Rows), 3)
	f.clock.Advance(time.Minute - time.Microsecond)
	f.claimNone("the leases have a microsecond to go")
	f.clock.Advance(2 * time.Microsecond)
	rows := f.ask(10, time.Minute).Rows
	f.equal("messages claimed then", sorted(keys(rows)), []string{"1", "2", "single"})
}

func failedMessageIsDueExactlyAfterItsDelay(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		f.put("k"+group, group)
		f.settle("retry", retry(f.claimOne(time.Minute), time.Minute, "x"), outbox.ResultDone)
		f.clock.Advance(time.Minute - time.Microsecond)
		f.claimNone("the delay has a microsecond to go")
		f.equal("Look", f.look(f.ch()), []outbox.Look{{Wait: time.Microsecond}})
		f.clock.Advance(time.Microsecond)
		f.waits("holds a message that came due this microsecond", 0)
		f.finish(f.claimOne(time.Minute))
	}
}

func messagesArePurgedByTheClock(f *journalFixture) {
	f.put("k", "")
	f.settle("sent", kept(f.claimOne(time.Minute), ""), outbox.ResultDone)
	p := outbox.Purge{States: ended, Age: time.Hour, Limit: 10}
	f.clock.Advance(time.Hour)
	f.purge("that was sent an hour ago, not longer", p, 0)
	f.clock.Advance(time.Microsecond)
	f.purge("that was sent longer than an hour ago", p, 1)
}

func clockSetBackKeepsNumbersIncreasing(f *journalFixture) {
	v := f.put("1", "g")
	r := f.claimOne(time.Minute)
	f.finish(r)
	f.clock.Advance(-time.Hour)
	defer f.clock.Advance(time.Hour)
	f.increases("with the clock set back", v, f.put("2", "g"))
	next := f.claimOne(time.Minute)
	if next.Token <= r.Token {
		f.Fatalf("with the clock set back: token %d does not exceed its predecessor %d", next.Token, r.Token)
	}
}

func lostProbeOfAMessageIsGivenOutAgain(f *journalFixture) {
	f.outage(true, "503")
	f.passPause()
	f.claimNone("there is no message to probe with") // and none was taken for it
	f.put("a", "")
	f.put("b", "g")
	for i := range 2 {
		c := f.ask(10, time.Minute)
		f.equal(fmt.Sprintf("probe %d, and its messages", i), []any{c.Probe, len(c.Rows)}, []any{true, 1})
		f.clock.Advance(30 * time.Second)
		f.claimNone("a probe is under way")
		f.clock.Advance(31 * time.Second) // whoever had it died with it
	}
}
