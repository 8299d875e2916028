package outboxtest

import (
	"database/sql"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageLockTests hold that a relay waits for nobody, and who waits for whom.
var messageLockTests = []journalTest{
	{"HeldMessageIsBusy", heldMessageIsBusy},
	{"HeldMessageIsSkipped", heldMessageIsSkipped},
	{"HeldMessageCutsTheRun", heldMessageCutsTheRun},
	{"GroupHeldByAPutIsBusy", groupHeldByAPutIsBusy},
	{"GroupHeldByAPutIsNotClaimed", groupHeldByAPutIsNotClaimed},
	{"ExtendBesideAPutKeepsTheGroup", extendBesideAPutKeepsTheGroup},
	{"LateCommitOfAMessageIsFoundByAFullPass", lateCommitOfAMessageIsFoundByAFullPass},
	{"SecondPutOfAGroupWaitsForTheFirst", secondPutOfAGroupWaitsForTheFirst},
	{"KeyThatGoesWhileAPutWaitsIsNew", keyThatGoesWhileAPutWaitsIsNew},
	{"SecondPutOfAKeyWaitsForTheFirst", secondPutOfAKeyWaitsForTheFirst},
	{"VisibleKeyExistsAtEachIsolationLevel", visibleKeyExistsAtEachIsolationLevel},
	{"ReadersOfMessagesWaitForNobody", readersOfMessagesWaitForNobody},
}

// messageOneWriterTests hold the same where an open transaction keeps everyone out.
var messageOneWriterTests = []journalTest{
	{"SettlementOfAMessageWaitsForTheWriter", settlementOfAMessageWaitsForTheWriter},
}

// hold lets a transaction settle a message, which locks it.
func (f *journalFixture) hold(r outbox.Row) *sql.Tx {
	f.Helper()
	tx := f.begin()
	got, err := f.store.SettleMessages(f.ctx, outbox.SQL(tx), f.channel, []outbox.Settlement{kept(r, "ref")})
	f.ok("SettleMessages", wantResults(err, got, outbox.ResultDone))
	return tx
}

func heldMessageIsBusy(f *journalFixture) {
	for _, commit := range []bool{false, true} {
		f := f.on(newChannel())
		f.puts("", "a", "b", "c")
		rows := f.claim()
		tx := f.hold(rows[1])
		quick := f.hurry()
		for _, s := range everySettlement(rows[1]) {
			quick.settle("of a held message", s, outbox.ResultBusy)
			quick.settle("of a held message, again", again(s), outbox.ResultBusy)
		}
		quick.extend("a batch with a held message", rows, 2*long, outbox.ResultDone, outbox.ResultBusy, outbox.ResultDone)
		quick.settleAll("a batch with a held message", []outbox.Settlement{done(rows[0]), kept(rows[1], "ref"), retry(rows[2], long, "x")},
			outbox.ResultDone, outbox.ResultBusy, outbox.ResultDone)
		f.gone("a", "done")
		f.same("the held message", f.get("b"), rows[1])
		if !commit {
			f.rollback(tx)
			f.settle("after the rollback", done(rows[1]), outbox.ResultDone)
			continue
		}
		f.commit(tx)
		f.settle("after the commit", retry(rows[1], 0, "x"), outbox.ResultStale)
		f.settle("after the commit, the same", kept(rows[1], "ref"), outbox.ResultDone)
	}
}

func heldMessageIsSkipped(f *journalFixture) {
	f.puts("", "a", "b", "c")
	for _, r := range f.claim() {
		f.settle("unknown", unknown(r), outbox.ResultDone)
	}
	f.puts("", "d", "e")
	f.pass(short / 50)
	tx := f.begin()
	a, err := f.store.AmendMessages(f.ctx, outbox.SQL(tx), f.channel, outbox.Amendment{Action: outbox.ActionSent, MessageFilter: byKey("b"), Limit: 1})
	f.ok("AmendMessages", err)
	f.equal("messages amended", a.Count, 1)
	_, err = f.store.BeginMessage(f.ctx, outbox.SQL(tx), f.channel, "d", long)
	f.ok("BeginMessage", err)
	quick := f.hurry()
	quick.startFails("of a held message", "d", outbox.ErrBusy)
	quick.claimThese("beside a held message", "e")
	quick.amend("retry", outbox.ActionRetry, outbox.MessageFilter{}, 2)
	quick.amend("discard, of a held message", outbox.ActionDiscard, byKey("d"), 0)
	quick.purge("beside a held message", outbox.Purge{States: ended, Limit: 10}, 0)
	f.equal("messages claimed then", sorted(keys(quick.claim())), []string{"a", "c"})
	f.rollback(tx)
	f.equal("state of the message amended in vain", f.get("b").State, outbox.StateUnknown)
	f.claimThese("after the rollback", "d")
}

func heldMessageCutsTheRun(f *journalFixture) {
	f.puts("g", "1", "2", "3")
	tx := f.begin()
	a, err := f.store.AmendMessages(f.ctx, outbox.SQL(tx), f.channel, outbox.Amendment{Action: outbox.ActionDiscard, MessageFilter: byKey("2"), Limit: 1})
	f.ok("AmendMessages", err)
	f.equal("messages amended", a.Count, 1)
	for _, r := range f.hurry().claim() { // none where the amendment holds the group too
		f.equal("message claimed beside a held one of its group", r.Key, "1")
		f.hurry().settle("give back", release(r, 0), outbox.ResultDone)
	}
	f.rollback(tx)
	f.claimThese("after the rollback", "1", "2", "3")
}

// A message of a group that a Put holds is settled, and said to be busy until
// the group is let go too: else the message put would wait for the lease.
func groupHeldByAPutIsBusy(f *journalFixture) {
	for _, commit := range []bool{false, true} {
		for i := range everySettlement(outbox.Row{}) {
			f := f.on(newChannel())
			f.put("1", "g")
			f.put("single", "")
			rows := f.claim()
			r, single := rows[0], rows[1]
			if r.Key != "1" {
				r, single = single, r
			}
			s := everySettlement(r)[i]
			tx := f.begin()
			f.putIn(tx, 0, message("2", "g"))
			quick := f.hurry()
			quick.settleAll("a batch with a held group", []outbox.Settlement{done(single), s}, outbox.ResultDone, outbox.ResultBusy)
			quick.settle("of a held group, again", again(s), outbox.ResultBusy)
			if commit {
				f.commit(tx)
			} else {
				f.rollback(tx)
			}
			if got, there := f.find(nil, "1"); there {
				f.like("the message, settled though its group was held", got, after(r, s))
			} else {
				f.equal("settled so that it is gone", s.Outcome == outbox.OutcomeDone && !s.Keep, true)
			}
			f.settle("when the group is free", again(s), outbox.ResultDone)
			want := []string{}
			if commit && s.Outcome == outbox.OutcomeDone {
				want = append(want, "2")
			}
			f.claimThese("when the group is let go", want...)
		}
	}
}

func groupHeldByAPutIsNotClaimed(f *journalFixture) {
	f.puts("g", "1", "2")
	f.puts("h", "3")
	tx := f.begin()
	f.putIn(tx, 0, message("4", "g"), message("5", "new"))
	quick := f.hurry()
	quick.claimThese("beside a held group", "3")
	quick.startFails("of a held group", "1", outbox.ErrBusy)
	f.commit(tx)
	f.equal("messages claimed then", sorted(keys(f.claim())), []string{"1", "2", "4", "5"})
}

func extendBesideAPutKeepsTheGroup(f *journalFixture) {
	f.put("1", "g")
	r := f.claimOne(4 * short)
	tx := f.begin()
	f.putIn(tx, 0, message("2", "g"))
	got, err := f.store.Extend(f.hurry().ctx, f.ch(), []outbox.Row{r}, long)
	f.ok("Extend", err)
	if got[0] != outbox.ResultDone && got[0] != outbox.ResultBusy {
		f.Fatalf("Extend of a message whose group is held: %s, want done or busy", named(got))
	}
	f.commit(tx)
	f.extend("when the group is free", []outbox.Row{r}, long, outbox.ResultDone)
	f.pass(8 * short)
	f.claimNone("the group is leased with its first message")
	f.finish(r)
	f.claimThese("after the first", "2")
}

// The messages of a transaction that took its time are due before others that
// have long been sent, where claims no longer look but for full passes.
func lateCommitOfAMessageIsFoundByAFullPass(f *journalFixture) {
	tx := f.begin()
	f.putIn(tx, 0, message("late", ""), message("late 1", "g"), message("late 2", "g"))
	for i := range 3 {
		f.pass(short)
		f.put(fmt.Sprint("early", i), "")
		f.put(fmt.Sprint("early of a group", i), "h")
		rows := f.claim()
		f.equal("messages claimed meanwhile", len(rows), 2)
		f.finish(rows...)
	}
	f.commit(tx)
	f.equal("messages claimed then", sorted(keys(f.claim())), []string{"late", "late 1", "late 2"})
}

type putAnswer struct {
	as  []outbox.PutAnswer
	err error
}

// putBeside puts messages in tx and checks that it waits.
func (f *journalFixture) putBeside(tx *sql.Tx, rows ...outbox.PutRow) <-chan putAnswer {
	f.Helper()
	answers := make(chan putAnswer, 1)
	go func() {
		as, err := f.store.PutRows(f.ctx, outbox.SQL(tx), f.channel, rows, 0)
		answers <- putAnswer{as, err}
	}()
	select {
	case a := <-answers:
		f.Fatalf("PutRows did not wait for the transaction that was first: %+v", a)
	case <-time.After(2 * short):
	}
	return answers
}

func secondPutOfAGroupWaitsForTheFirst(f *journalFixture) {
	for _, commit := range []bool{true, false} {
		for _, exists := range []bool{false, true} {
			f := f.on(newChannel())
			if exists {
				f.put("0", "g")
			}
			first, second := f.begin(), f.begin()
			v := f.putIn(first, 0, message("z", "g"))[0].Row.Version
			answers := f.putBeside(second, message("a", "g"))
			want := []string{"a"}
			if commit {
				f.commit(first)
				want = []string{"z", "a"}
			} else {
				f.rollback(first)
			}
			a := <-answers
			f.ok("PutRows after the first", a.err)
			f.increases("of the second put", v, a.as[0].Row.Version)
			f.commit(second)
			if exists {
				want = append([]string{"0"}, want...)
			}
			f.claimThese("in the order of the commits", want...)
		}
	}
}

// A key that existed when the put came to it, and has gone before the put is
// done with the others.
func keyThatGoesWhileAPutWaitsIsNew(f *journalFixture) {
	f.put("a", "")
	first, second := f.begin(), f.begin()
	f.putIn(first, 0, message("b", ""))
	answers := f.putBeside(second, message("a", ""), message("b", ""))
	f.amend("discard", outbox.ActionDiscard, outbox.MessageFilter{Key: "a"}, 1)
	f.rollback(first)
	a := <-answers
	f.ok("PutRows after the first", a.err)
	f.equal("created", []bool{a.as[0].Created, a.as[1].Created}, []bool{true, true})
	f.commit(second)
	f.equal("messages claimed", sorted(keys(f.claim())), []string{"a", "b"})
}

// levels are the isolation levels of SQL, and which see what commits after
// their transaction began.
var levels = map[sql.IsolationLevel]bool{
	sql.LevelDefault: true, sql.LevelReadCommitted: true, sql.LevelRepeatableRead: false, sql.LevelSerializable: false,
}

// beginAt begins a transaction and lets it take its snapshot.
func (f *journalFixture) beginAt(level sql.IsolationLevel) *sql.Tx {
	f.Helper()
	tx, err := f.db.BeginTx(f.ctx, &sql.TxOptions{Isolation: level})
	f.ok("begin", err)
	f.Cleanup(func() { _ = tx.Rollback() })
	_, there := f.find(tx, "k")
	f.equal("there at the snapshot", there, false)
	return tx
}

func secondPutOfAKeyWaitsForTheFirst(f *journalFixture) {
	for level, fresh := range levels {
		for _, commit := range []bool{true, false} {
			for _, group := range []string{"", "g"} {
				f := f.on(newChannel())
				what := fmt.Sprintf("at level %s, group %q, first committed %t", level, group, commit)
				first, second := f.begin(), f.beginAt(level)
				v := f.putIn(first, 0, message("k", group))[0].Row.Version
				other := message("k", group)
				other.Payload = []byte("other")
				answers := f.putBeside(second, other)
				if commit {
					f.commit(first)
				} else {
					f.rollback(first)
				}
				a := <-answers
				if a.err != nil && commit && !fresh {
					f.rollback(second) // it cannot see the other, and so must be run again
					a.as, a.err = f.putAll(other), nil
				} else if a.err == nil {
					f.commit(second)
				}
				f.ok("PutRows "+what, a.err)
				f.equal("created and differs "+what, []bool{a.as[0].Created, a.as[0].Differs}, []bool{!commit, commit})
				f.equal("number of the first "+what, a.as[0].Row.Version == v, commit)
				f.claimThese(what, "k")
			}
		}
	}
}

func visibleKeyExistsAtEachIsolationLevel(f *journalFixture) {
	for level := range levels {
		for _, group := range []string{"", "g"} {
			f := f.on(newChannel())
			v := f.put("there", group)
			tx := f.beginAt(level)
			as := f.putIn(tx, 0, message("there", group), message("new", group))
			f.equal("created", []bool{as[0].Created, as[1].Created}, []bool{false, true})
			f.equal("number", as[0].Row.Version, v)
			again := f.putIn(tx, 0, message("new", group))
			f.equal("created, what the transaction itself put", again[0].Created, false)
			f.commit(tx)
			f.equal("messages claimed", sorted(keys(f.claim())), []string{"new", "there"})
		}
	}
}

func readersOfMessagesWaitForNobody(f *journalFixture) {
	f.put("1", "g")
	f.put("k", "")
	rows := f.claim()
	tx := f.hold(rows[0])
	f.putIn(tx, 0, message("2", "g"), message("new", ""))
	other := f.hold(rows[1])
	defer f.rollback(other)
	quick := f.hurry()
	quick.waits("holds leased messages", long)
	got, _ := quick.stats()
	f.equal("Stats", got, outbox.ChannelStats{Channel: f.ch(), InFlight: 2, Attempt: 1})
	f.equal("ListMessages", len(quick.list(outbox.MessageList{Limit: 10})), 2)
	quick.get("k")
}

func settlementOfAMessageWaitsForTheWriter(f *journalFixture) {
	f.put("1", "g")
	r := f.claimOne(long)
	tx := f.begin()
	f.putIn(tx, 0, message("2", "g"))
	type answer struct {
		results []outbox.Result
		err     error
	}
	answers := make(chan answer, 1)
	go func() {
		results, err := f.store.Settle(f.ctx, f.ch(), []outbox.Settlement{done(r)})
		answers <- answer{results, err}
	}()
	select {
	case got := <-answers:
		f.Fatalf("Settle did not wait for the writer: %+v", got)
	case <-time.After(2 * short):
	}
	f.commit(tx)
	got := <-answers
	f.ok("Settle after the writer's commit", wantResults(got.err, got.results, outbox.ResultDone))
	f.claimThese("after it", "2")
}
