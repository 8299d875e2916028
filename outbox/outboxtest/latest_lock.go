package outboxtest

import (
	"context"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// lockTests hold that a relay waits for nobody: not for a transaction that
// has staged a key and stays open, as one may for minutes.
var lockTests = []latestTest{
	{"LockedRowIsBusyToSettle", lockedRowIsBusyToSettle},
	{"LockedRowIsBusyToExtend", lockedRowIsBusyToExtend},
	{"LockedRowIsBusyToDiscard", lockedRowIsBusyToDiscard},
	{"LockedRowIsNotClaimed", lockedRowIsNotClaimed},
	{"LateCommitIsFoundByAFullPass", lateCommitIsFoundByAFullPass},
	{"SecondStagerWaitsForTheFirst", secondStagerWaitsForTheFirst},
}

// oneWriterTests hold the same where an open transaction keeps everyone out.
var oneWriterTests = []latestTest{
	{"SettlementWaitsForTheWriter", settlementWaitsForTheWriter},
}

// hurry returns the fixture with a context that ends soon: for calls that
// must return at once.
func (f *fixture) hurry() *fixture {
	ctx, cancel := context.WithTimeout(f.ctx, atOnce)
	f.Cleanup(cancel)
	quick := *f
	quick.ctx = ctx
	return &quick
}

// claimThree claims rows a, b and c, for an hour.
func (f *fixture) claimThree() (a, b, c outbox.Row) {
	f.Helper()
	for _, key := range []string{"a", "b", "c"} {
		f.put(key, "v")
	}
	rows := f.claim()
	f.equal("claimed keys", keys(rows), []string{"a", "b", "c"})
	return rows[0], rows[1], rows[2]
}

func lockedRowIsBusyToSettle(f *fixture) {
	for _, rolledBack := range []bool{false, true} {
		f := f.on(newChannel())
		a, b, c := f.claimThree()
		tx := f.begin()
		f.stageIn(tx, 0, value("b", "newer"))
		for _, s := range []outbox.Settlement{retry(b, long, "x"), release(b, long), again(done(b))} {
			f.hurry().settle("of a locked row", s, outbox.ResultBusy)
		}
		f.hurry().settleAll("a batch with a locked row", []outbox.Settlement{done(a), done(b), retry(c, long, "x")},
			outbox.ResultDone, outbox.ResultBusy, outbox.ResultDone)
		f.equal("the locked row", f.row("b"), b)
		f.gone("a", "acknowledged")
		if rolledBack {
			f.rollback(tx)
			f.settle("after the rollback", again(done(b)), outbox.ResultDone)
			f.gone("b", "acknowledged")
			continue
		}
		f.commit(tx)
		f.settle("after the commit", again(done(b)), outbox.ResultSuperseded)
		f.equal("payload claimed then", string(f.claimOne(long).Payload), "newer")
	}
}

func lockedRowIsBusyToExtend(f *fixture) {
	a, b, c := f.claimThree()
	tx := f.begin()
	f.stageIn(tx, 0, value("b", "newer"))
	f.hurry().extend("a batch with a locked row", []outbox.Row{a, b, c}, 2*long,
		outbox.ResultDone, outbox.ResultBusy, outbox.ResultDone)
	f.equal("the locked row", f.row("b"), b)
	f.commit(tx)
	f.extend("after the commit", []outbox.Row{b}, 2*long, outbox.ResultDone)
}

func lockedRowIsBusyToDiscard(f *fixture) {
	v := f.put("k", "1")
	tx := f.begin()
	f.stageIn(tx, 0, value("k", "2"))
	err := f.store.DiscardRow(f.hurry().ctx, f.channel, "k", v)
	f.fails("DiscardRow of a locked row", err, outbox.ErrBusy)
	f.rollback(tx)
	f.ok("DiscardRow after the rollback", f.store.DiscardRow(f.ctx, f.channel, "k", v))
	f.gone("k", "discarded")
}

func lockedRowIsNotClaimed(f *fixture) {
	for _, key := range []string{"a", "b", "c"} {
		f.put(key, "v")
	}
	tx := f.begin()
	f.stageIn(tx, 0, value("a", "newer"), value("new", "newer"))
	f.equal("claimed keys beside a locked row", keys(f.hurry().ask(2, long).Rows), []string{"b", "c"})
	f.hurry().claimNone("the rows left are not committed")
	f.commit(tx)
	rows := f.claim()
	f.equal("number of rows claimed after the commit", len(rows), 2)
	for _, r := range rows {
		f.equal("payload of "+r.Key, string(r.Payload), "newer")
	}
}

// The row of a transaction that took its time is due before rows that have
// long been published, where claims no longer look but for full passes.
func lateCommitIsFoundByAFullPass(f *fixture) {
	tx := f.begin()
	v := f.stageIn(tx, 0, value("late", "v"))[0]
	for range 3 {
		f.pass(short)
		f.put("early", "v")
		f.settle("the early row", done(f.claimOne(long)), outbox.ResultDone)
	}
	f.commit(tx)
	f.equal("claimed version", f.claimOne(long).Version, v)
}

func secondStagerWaitsForTheFirst(f *fixture) {
	first, second := f.begin(), f.begin()
	v1 := f.stageIn(first, 0, value("k", "1"))[0]
	type answer struct {
		vs  []outbox.Version
		err error
	}
	answers := make(chan answer, 1)
	go func() {
		vs, err := f.store.StageRows(f.ctx, outbox.SQL(second), f.channel, []outbox.StageRow{value("k", "2")}, 0)
		answers <- answer{vs, err}
	}()
	select {
	case a := <-answers:
		f.Fatalf("StageRows did not wait for the open transaction that staged the key: %+v", a)
	case <-time.After(2 * short):
	}
	f.commit(first)
	a := <-answers
	f.ok("StageRows after the first commit", a.err)
	f.equal("number of versions", len(a.vs), 1)
	f.increases("the second stager's version", v1, a.vs[0])
	f.commit(second)
	f.sameRow("PendingRow after both commits", f.row("k"), unclaimed(value("k", "2"), a.vs[0]))
}

func settlementWaitsForTheWriter(f *fixture) {
	a, b, _ := f.claimThree()
	tx := f.begin()
	v := f.stageIn(tx, 0, value("b", "newer"))[0]
	type answer struct {
		results []outbox.Result
		err     error
	}
	answers := make(chan answer, 1)
	go func() {
		results, err := f.store.Settle(f.ctx, f.ch(), []outbox.Settlement{done(a), done(b)})
		answers <- answer{results, err}
	}()
	select {
	case got := <-answers:
		f.Fatalf("Settle did not wait for the writer: %+v", got)
	case <-time.After(2 * short):
	}
	f.commit(tx)
	got := <-answers
	f.ok("Settle after the writer's commit", got.err)
	f.equal("Settle", named(got.results), []string{"done", "superseded"})
	f.gone("a", "acknowledged")
	f.equal("version claimed then", f.claimOne(long).Version, v)
}
