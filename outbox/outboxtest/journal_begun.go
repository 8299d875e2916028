package outboxtest

import (
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// begunTests hold how a message is begun by its key: with its Put, or later.
var begunTests = []journalTest{
	{"BegunPutIsLeased", begunPutIsLeased},
	{"BegunPutRollsBackWithItsLease", begunPutRollsBackWithItsLease},
	{"BegunPutOfAnExistingKeyBeginsNothing", begunPutOfAnExistingKeyBeginsNothing},
	{"BegunPutHoldsItsGroup", begunPutHoldsItsGroup},
	{"BegunPutBehindAnotherIsBlocked", begunPutBehindAnotherIsBlocked},
	{"BeginLeasesAMessageDueOrNot", beginLeasesAMessageDueOrNot},
	{"BeginOfNoMessageIsNotFound", func(f *journalFixture) { f.startFails("of no message", "none", outbox.ErrNotFound) }},
	{"BeginOfAFollowerIsBlocked", beginOfAFollowerIsBlocked},
	{"BeginHoldsTheGroup", beginHoldsTheGroup},
	{"LapsedBegunMessageComesBackAmbiguous", lapsedBegunMessageComesBackAmbiguous},
}

func begunPutIsLeased(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		p := message("k"+group, group)
		tx := f.begin()
		a := f.putIn(tx, long, p)[0]
		f.commit(tx)
		f.equal("created", a.Created, true)
		r := f.get(p.Key)
		if a.Row.Token <= 0 {
			f.Fatalf("the token of a begun message is %d, want one above 0", a.Row.Token)
		}
		want := sending(pending(p, a.Row.Version), a.Row.Token)
		f.like("the stored message", r, want)
		want.Payload, want.Header, want.LeaseUntil, want.StagedAt, want.Due = nil, nil, r.LeaseUntil, r.StagedAt, r.Due
		f.same("the answer", a.Row, want)
		f.claimNone("its message is leased to who put it")
		f.settle("by the token of the answer", kept(a.Row, "ref"), outbox.ResultDone)
		f.like("the message then", f.get(p.Key), after(r, kept(r, "ref")))
	}
}

func begunPutRollsBackWithItsLease(f *journalFixture) {
	tx := f.begin()
	f.putIn(tx, long, message("k", "g"), message("single", ""))
	f.rollback(tx)
	f.gone("k", "rolled back")
	f.put("next", "g")
	f.claimThese("after the rollback", "next")
}

func begunPutOfAnExistingKeyBeginsNothing(f *journalFixture) {
	f.put("waiting", "")
	before := f.get("waiting")
	first := f.putIn(nil, long, message("k", "g"))[0]
	for range 2 { // the answer was lost, so the caller asks again
		tx := f.begin()
		as := f.putIn(tx, long, message("k", "g"), message("waiting", ""))
		f.commit(tx)
		f.equal("created", []bool{as[0].Created, as[1].Created}, []bool{false, false})
		f.equal("token of the first Put", as[0].Row.Token, first.Row.Token)
	}
	f.same("the message that waits", f.get("waiting"), before)
}

func begunPutHoldsItsGroup(f *journalFixture) {
	a := f.putIn(nil, long, message("1", "g"))[0]
	f.puts("g", "2", "3")
	f.claimNone("the group is leased with its first message")
	f.finish(a.Row)
	f.claimThese("once the first is settled", "2", "3")
}

func begunPutBehindAnotherIsBlocked(f *journalFixture) {
	refused := func(why string) {
		f.Helper()
		tx := f.begin()
		_, err := f.store.PutRows(f.ctx, outbox.SQL(tx), f.channel, []outbox.PutRow{message("single", ""), message("next", "g")}, long)
		f.fails("PutRows, begun, of a group that "+why, err, outbox.ErrBlocked)
		f.putIn(tx, 0, message("beside "+why, "")) // the transaction lives
		f.commit(tx)
		f.get("beside " + why)
		f.gone("single", "refused with the other")
		f.gone("next", "refused")
	}
	f.put("1", "g")
	refused("has a message")
	r := f.start("1", long)
	refused("is leased")
	f.settle("retry", retry(r, long, "x"), outbox.ResultDone)
	refused("has a message in backoff")
	f.settle("dead", dead(f.start("1", long)), outbox.ResultDone)
	refused("is blocked")
	f.amend("discard", outbox.ActionDiscard, byKey("1"), 1)
	_, err := f.store.PutRows(f.ctx, nil, f.channel, []outbox.PutRow{message("a", "g"), message("b", "g")}, long)
	f.fails("PutRows, begun, of two of a group", err, outbox.ErrBlocked)
	f.gone("a", "refused with the other")
	f.equal("created, of two groups", f.putIn(nil, long, message("a", "g"), message("b", "h"))[1].Created, true)
}

func beginLeasesAMessageDueOrNot(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		p := message("k"+group, group)
		p.Delay = long
		f.putAll(p)
		stored := f.get(p.Key)
		r := f.start(p.Key, 2*long)
		if r.Due.Before(stored.Due) { // it may be due from then on, so that it is not lost for longer than its lease
			stored.Due = r.Due
		}
		f.like("BeginMessage", r, sending(stored, r.Token))
		f.same("the stored message", f.get(p.Key), r)
		f.settle("retry", retry(r, long, "503"), outbox.ResultDone)
		again := f.start(p.Key, long)
		f.equal("attempt", again.Attempt, 2)
		if again.Token <= r.Token {
			f.Fatalf("token %d does not exceed its predecessor %d", again.Token, r.Token)
		}
		f.settle("by the former token", done(r), outbox.ResultStale)
		f.finish(again)
		f.gone(p.Key, "done")
	}
}

func beginOfAFollowerIsBlocked(f *journalFixture) {
	f.puts("g", "1", "2")
	f.startFails("of a follower", "2", outbox.ErrBlocked)
	r := f.start("1", long)
	f.startFails("of a follower of a leased one", "2", outbox.ErrBlocked)
	f.settle("retry", retry(r, long, "x"), outbox.ResultDone)
	f.startFails("of a follower of one in backoff", "2", outbox.ErrBlocked)
	f.settle("unknown", unknown(f.start("1", long)), outbox.ResultDone)
	f.startFails("of a follower of one of unknown fate", "2", outbox.ErrBlocked)
	f.amend("sent", outbox.ActionSent, byKey("1"), 1)
	f.equal("attempt of the follower", f.start("2", long).Attempt, 1)
}

func beginHoldsTheGroup(f *journalFixture) {
	f.puts("g", "1", "2")
	r := f.start("1", short)
	f.claimNone("the group is leased with its first message")
	f.extend("the first", []outbox.Row{r}, long, outbox.ResultDone)
	f.pass(2 * short)
	f.claimNone("the group is leased as long as its first message")
	f.finish(r)
	f.claimThese("once the first is settled", "2")
}

func lapsedBegunMessageComesBackAmbiguous(f *journalFixture) {
	p := message("k", "") // begun before it was due, and yet back when its lease has lapsed
	p.Delay = 2 * long
	f.putAll(p)
	f.start("k", short)
	f.putIn(nil, short, message("g1", "g"))
	f.put("g2", "g")
	f.pass(2 * short)
	f.startFails("of a message whose lease has lapsed", "k", outbox.ErrState)
	rows := f.claim()
	f.equal("messages claimed", sorted(keys(rows)), []string{"g1", "g2", "k"})
	for _, r := range rows {
		f.equal("ambiguous "+r.Key, r.Ambiguous, r.Key != "g2")
	}
}
