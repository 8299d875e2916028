package outboxtest

import (
	"fmt"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// restageTests hold what staging a key does to the row it already has.
var restageTests = []latestTest{
	{"RestageReplacesTheWholeValue", restageReplacesTheWholeValue},
	{"RestageKeepsTheEarlierDueTime", restageKeepsTheEarlierDueTime},
	{"RestageMakesAScheduledRowDueSooner", restageMakesAScheduledRowDueSooner},
	{"RestageInBackoffStartsAnew", restageInBackoffStartsAnew},
	{"RestageOfATriedRowObeysBatchDelay", restageOfATriedRowObeysBatchDelay},
	{"RestageWaitsForTheLease", restageWaitsForTheLease},
	{"RestageWaitsForTheLeaseToLapse", restageWaitsForTheLeaseToLapse},
	{"SupersededAgainIsNotStale", supersededAgainIsNotStale},
	{"RolledBackRestageLeavesTheSettlementIntact", rolledBackRestageLeavesTheSettlementIntact},
	{"RestageWhileLeasedIsRolledBackWhole", restageWhileLeasedIsRolledBackWhole},
}

func restageReplacesTheWholeValue(f *fixture) {
	f.stage(0, outbox.StageRow{Key: "k", Payload: []byte("1"), Header: outbox.Header{"a": "1", "b": "1"}})
	for _, row := range []outbox.StageRow{
		{Key: "k", Payload: []byte("2"), Header: outbox.Header{"b": "2"}},
		{Key: "k", Payload: []byte("3")},
		{Key: "k", Deleted: true, Header: outbox.Header{"c": "4"}},
		{Key: "k", Payload: []byte("5")},
	} {
		v := f.stage(0, row)[0]
		f.sameRow("PendingRow", f.row("k"), unclaimed(row, v))
	}
	f.equal("payload of the only row", string(f.claimOne(long).Payload), "5")
}

func restageKeepsTheEarlierDueTime(f *fixture) {
	f.put("k", "1")
	due := f.row("k").Due
	f.pass(short / 10)
	v := f.stage(century, value("k", "2"))[0]
	f.equal("due time after a restage with BatchDelay", f.row("k").Due, due)
	f.pass(short / 10)
	v2 := f.put("k", "3")
	f.increases("restaged twice", v, v2)
	f.equal("due time after another restage", f.row("k").Due, due)
	f.equal("claimed version", f.claimOne(long).Version, v2)
}

func restageMakesAScheduledRowDueSooner(f *fixture) {
	f.stage(century, value("k", "1"))
	f.claimNone("the row is due in decades")
	v := f.put("k", "2")
	f.equal("claimed version", f.claimOne(long).Version, v)
}

func restageInBackoffStartsAnew(f *fixture) {
	f.put("k", "1")
	f.settle("retry", retry(f.claimOne(long), 0, "first"), outbox.ResultDone)
	f.settle("retry", retry(f.claimOne(long), long, "second"), outbox.ResultDone)
	v := f.put("k", "2")
	want := unclaimed(value("k", "2"), v)
	f.sameRow("PendingRow after the restage", f.rowWithoutToken("k"), want)
	r := f.claimOne(long)
	want.Attempt, want.Token, want.LeaseUntil = 1, r.Token, leased
	f.sameRow("ClaimRows after the restage", r, want)
}

// The row has had its first publication, so none is pending that a restage
// could postpone: the new value waits for its window like any other.
func restageOfATriedRowObeysBatchDelay(f *fixture) {
	f.put("k", "1")
	f.settle("retry", retry(f.claimOne(long), 0, "x"), outbox.ResultDone)
	f.stage(century, value("k", "2"))
	f.claimNone("the new value is due in decades")
}

func restageWaitsForTheLease(f *fixture) {
	for _, outcome := range []outbox.Outcome{outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeRelease} {
		f := f.on(fmt.Sprintf("%s-%d", f.channel, outcome))
		f.put("k", "1")
		old := f.claimOne(long)
		f.put("k", "2")
		v := f.put("k", "3")
		want := unclaimed(value("k", "3"), v)
		want.Token, want.LeaseUntil = old.Token, old.LeaseUntil
		f.sameRow("PendingRow of a row staged again while leased", f.row("k"), want)
		f.claimNone("its only row is leased, though staged again")

		// The delay and the error are the old value's and go with it.
		s := outbox.Settlement{Row: old, Outcome: outcome, Delay: long, Error: "x"}
		f.settle(fmt.Sprintf("outcome %d of the old value", outcome), s, outbox.ResultSuperseded)
		want = unclaimed(value("k", "3"), v)
		f.sameRow("PendingRow after the settlement", f.rowWithoutToken("k"), want)
		r := f.claimOne(long)
		want.Attempt, want.Token, want.LeaseUntil = 1, r.Token, leased
		f.sameRow("ClaimRows after the settlement", r, want)
		if r.Token <= old.Token {
			f.Fatalf("token %d does not exceed its predecessor %d", r.Token, old.Token)
		}
	}
}

func restageWaitsForTheLeaseToLapse(f *fixture) {
	f.put("k", "1")
	old := f.claimOne(2 * short)
	v := f.put("k", "2")
	rows := f.claimAfter(2*short, long)
	f.equal("claimed keys", keys(rows), []string{"k"})
	want := unclaimed(value("k", "2"), v)
	want.Attempt, want.Token, want.LeaseUntil = 1, rows[0].Token, leased
	f.sameRow("ClaimRows after the lapse", rows[0], want)
	f.settle("the lapsed lease", done(old), outbox.ResultStale)
	f.equal("the row after the lapsed lease's settlement", f.row("k"), rows[0])
}

func supersededAgainIsNotStale(f *fixture) {
	f.put("k", "1")
	old := f.claimOne(long)
	v := f.put("k", "2")
	f.settle("first", done(old), outbox.ResultSuperseded)
	got, err := f.store.Settle(f.ctx, f.ch(), []outbox.Settlement{again(done(old))})
	f.ok("Settle", err)
	if len(got) != 1 || got[0] != outbox.ResultSuperseded && got[0] != outbox.ResultDone {
		f.Fatalf("the same settlement again: Settle is %v, want superseded or done", named(got))
	}
	f.equal("version claimed then", f.claimOne(long).Version, v)
}

func rolledBackRestageLeavesTheSettlementIntact(f *fixture) {
	f.put("k", "1")
	r := f.claimOne(long)
	tx := f.begin()
	f.stageIn(tx, 0, value("k", "2"))
	f.rollback(tx)
	f.equal("the row after the rollback", f.row("k"), r)
	f.settle("after the rollback", done(r), outbox.ResultDone)
	f.gone("k", "acknowledged")
}

func restageWhileLeasedIsRolledBackWhole(f *fixture) {
	f.put("k", "1")
	f.settle("retry", retry(f.claimOne(long), 0, "x"), outbox.ResultDone)
	r := f.claimOne(long)
	tx := f.begin()
	f.exec(tx, "SAVEPOINT a")
	f.stageIn(tx, 0, outbox.StageRow{Key: "k", Deleted: true, Header: outbox.Header{"a": "b"}})
	f.exec(tx, "ROLLBACK TO SAVEPOINT a")
	v := f.stageIn(tx, 0, value("other", "1"))[0]
	f.commit(tx)
	f.equal("the row after the rollback to the savepoint", f.row("k"), r)
	f.sameRow("the row staged after it", f.row("other"), unclaimed(value("other", "1"), v))
	f.settle("after the rollback", retry(r, long, "y"), outbox.ResultDone)
	f.sameRow("the row after its settlement", f.rowWithoutToken("k"), settled(r, retry(r, long, "y")))
}
