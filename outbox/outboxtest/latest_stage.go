package outboxtest

import (
	"context"
	"database/sql"
	"fmt"
	"strconv"
	"testing"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// stageTests hold what StageRows does to, and inside, the caller's transaction.
var stageTests = []latestTest{
	{"CheckFindsNothingWrong", checkFindsNothingWrong},
	{"CommittedStageIsPending", committedStageIsPending},
	{"RolledBackStageLeavesNothing", rolledBackStageLeavesNothing},
	{"RolledBackSavepointTakesItsStagesBack", rolledBackSavepointTakesItsStagesBack},
	{"OnlyTheStagerSeesItsStageBeforeCommit", onlyTheStagerSeesItsStageBeforeCommit},
	{"NilTransactionIsRefused", nilTransactionIsRefused},
	{"FinishedTransactionIsRefused", finishedTransactionIsRefused},
	{"CancelledStageLeavesTheTransactionUsable", cancelledStageLeavesTheTransactionUsable},
	{"VersionsOfAKeyIncrease", versionsOfAKeyIncrease},
	{"VersionsAreUniqueAndSurviveJavaScript", versionsAreUniqueAndSurviveJavaScript},
	{"VersionsComeInTheOrderOfRows", versionsComeInTheOrderOfRows},
	{"ChannelsAreIndependent", channelsAreIndependent},
}

func checkFindsNothingWrong(f *fixture) {
	f.ok("Check", f.store.Check(f.ctx))
}

func committedStageIsPending(f *fixture) {
	row := outbox.StageRow{Key: "k", Payload: []byte("v"), Header: outbox.Header{"tenant": "t"}}
	tx := f.begin()
	v := f.stageIn(tx, 0, row)[0]
	f.commit(tx)
	f.sameRow("PendingRow after the commit", f.row("k"), unclaimed(row, v))
}

func rolledBackStageLeavesNothing(f *fixture) {
	f.put("old", "1")
	before := f.row("old")
	tx := f.begin()
	f.stageIn(tx, 0, value("new", "2"), value("old", "2"))
	f.rollback(tx)
	f.gone("new", "rolled back")
	f.equal("the older row after the rollback", f.row("old"), before)
	f.equal("claimed keys", keys(f.claim()), []string{"old"})
}

func rolledBackSavepointTakesItsStagesBack(f *fixture) {
	tx := f.begin()
	f.stageIn(tx, 0, value("before", "1"), value("twice", "1"))
	f.exec(tx, "SAVEPOINT a")
	f.stageIn(tx, 0, value("inside", "2"), value("twice", "2"))
	f.exec(tx, "ROLLBACK TO SAVEPOINT a")
	f.stageIn(tx, 0, value("later", "3"))
	f.commit(tx)
	f.gone("inside", "rolled back to the savepoint")
	for key, want := range map[string]string{"before": "1", "twice": "1", "later": "3"} {
		f.equal("payload of "+key, string(f.row(key).Payload), want)
	}
}

func onlyTheStagerSeesItsStageBeforeCommit(f *fixture) {
	v1 := f.put("old", "1")
	tx := f.begin()
	vs := f.stageIn(tx, 0, value("new", "2"), value("old", "2"))
	for i, key := range []string{"new", "old"} {
		r, err := f.store.PendingRow(f.ctx, outbox.SQL(tx), f.channel, key)
		f.ok("PendingRow in the transaction", err)
		f.sameRow("PendingRow in the transaction", r, unclaimed(value(key, "2"), vs[i]))
	}
	f.gone("new", "not committed")
	f.sameRow("PendingRow outside the transaction", f.row("old"), unclaimed(value("old", "1"), v1))
	_, err := f.store.PendingRow(f.ctx, outbox.SQL(tx), f.channel, "none")
	f.fails("PendingRow of no row in the transaction", err, outbox.ErrNotFound)
	f.commit(tx)
	f.sameRow("PendingRow after the commit", f.row("new"), unclaimed(value("new", "2"), vs[0]))
}

func nilTransactionIsRefused(f *fixture) {
	for _, tx := range []outbox.Tx{nil, outbox.SQL(nil)} {
		_, err := f.store.StageRows(f.ctx, tx, f.channel, []outbox.StageRow{value("k", "v")}, 0)
		f.fails("StageRows without a transaction", err, outbox.ErrTx)
	}
	f.gone("k", "refused")
}

func finishedTransactionIsRefused(f *fixture) {
	committed := f.begin()
	f.commit(committed)
	rolledBack := f.begin()
	f.rollback(rolledBack)
	for _, tx := range []*sql.Tx{committed, rolledBack} {
		_, err := f.store.StageRows(f.ctx, outbox.SQL(tx), f.channel, []outbox.StageRow{value("k", "v")}, 0)
		f.fails("StageRows in a finished transaction", err, outbox.ErrTx)
		_, err = f.store.PendingRow(f.ctx, outbox.SQL(tx), f.channel, "k")
		f.fails("PendingRow in a finished transaction", err, outbox.ErrTx)
	}
	f.gone("k", "refused")
}

func cancelledStageLeavesTheTransactionUsable(f *fixture) {
	cancelled, cancel := context.WithCancel(f.ctx)
	cancel()
	tx := f.begin()
	_, err := f.store.StageRows(cancelled, outbox.SQL(tx), f.channel, []outbox.StageRow{value("a", "1")}, 0)
	f.fails("StageRows under a cancelled context", err, context.Canceled)
	f.stageIn(tx, 0, value("b", "2"))
	f.commit(tx)
	f.gone("a", "its context was cancelled")
	f.equal("payload of b", string(f.row("b").Payload), "2")
}

func versionsOfAKeyIncrease(f *fixture) {
	last := f.put("k", "1")
	next := func(after string) {
		f.Helper()
		v := f.put("k", "1") // the same value, too, is a new version
		f.increases("after "+after, last, v)
		f.equal("version of the row after "+after, f.row("k").Version, v)
		last = v
	}
	next("a restage")

	f.settle("acknowledge", done(f.claimOne(long)), outbox.ResultDone)
	next("an acknowledgement")

	f.ok("DiscardRow", f.store.DiscardRow(f.ctx, f.channel, "k", last))
	next("a discard")

	last = f.stage(0, outbox.StageRow{Key: "k", Deleted: true})[0]
	f.settle("acknowledge the tombstone", done(f.claimOne(long)), outbox.ResultDone)
	next("an acknowledged tombstone")

	tx := f.begin()
	f.stageIn(tx, 0, value("k", "2"))
	f.rollback(tx)
	next("a rollback")

	tx = f.begin()
	first := f.stageIn(tx, 0, value("k", "3"))[0]
	last = f.stageIn(tx, 0, value("k", "4"))[0]
	f.increases("in one transaction", first, last)
	f.commit(tx)
	f.equal("version after the commit", f.row("k").Version, last)
	next("two stages in one transaction")
}

func versionsAreUniqueAndSurviveJavaScript(f *fixture) {
	seen := map[outbox.Version]string{}
	for i := range 20 {
		at := f.on(fmt.Sprintf("%s-%d", f.channel, i%3))
		for j, v := range at.stage(0, value("a", "1"), value("b", "1"), value("c", "1")) {
			where := fmt.Sprintf("round %d row %d", i, j)
			if other, ok := seen[v]; ok {
				f.Fatalf("version %d was given out twice: %s, %s", v, other, where)
			}
			if seen[v] = where; v <= 0 || v >= 1<<53 {
				f.Fatalf("version %d is not between 1 and 2^53 - 1", v)
			}
		}
	}
}

func versionsComeInTheOrderOfRows(f *fixture) {
	f.put("c", "1") // leased below, and staged again
	f.equal("claimed", keys(f.claim()), []string{"c"})
	f.put("f", "1") // pending, and staged again
	rows := []outbox.StageRow{}
	for _, key := range []string{"a", "b", "c", "d", "e", "f", "g"} {
		rows = append(rows, value(key, "2"+key))
	}
	for i, v := range f.stage(0, rows...) {
		r := f.row(rows[i].Key)
		f.equal("version of row "+r.Key, r.Version, v)
		f.equal("payload of row "+r.Key, string(r.Payload), "2"+r.Key)
	}
}

// bulkTests come last, since they leave thousands of rows.
var bulkTests = []latestTest{
	{"AnyNumberOfRowsIsStagedAtOnce", anyNumberOfRowsIsStagedAtOnce},
}

func anyNumberOfRowsIsStagedAtOnce(f *fixture) {
	sizes := []int{1, 2, 1000, 10_000}
	if testing.Short() {
		sizes = sizes[:3]
	}
	for _, n := range sizes {
		f := f.on(fmt.Sprintf("%s-%d", f.channel, n))
		rows, odd := []outbox.StageRow{}, []outbox.StageRow{}
		for i := range n {
			rows = append(rows, value(fmt.Sprintf("%05d", i), fmt.Sprint(i)))
			if i%2 == 1 && n <= 1000 {
				odd = append(odd, rows[i])
			}
		}
		if len(odd) > 0 {
			f.stage(0, odd...)
		}
		vs := f.stage(0, rows...)
		got := f.list("", n+1)
		f.equal("number of rows", len(got), n)
		for i, r := range got {
			if r.Key != rows[i].Key || r.Version != vs[i] {
				f.Fatalf("row %d is %s version %d, want %s version %d", i, r.Key, r.Version, rows[i].Key, vs[i])
			}
		}
		f.acknowledge(min(n, 1000))
	}
}

// acknowledge claims n rows in one call, checks them and settles them in one.
func (f *fixture) acknowledge(n int) {
	f.Helper()
	rows := f.ask(n, long).Rows
	f.equal("number of claimed rows", len(rows), n)
	ss, want := []outbox.Settlement{}, []outbox.Result{}
	for _, r := range rows {
		i, err := strconv.Atoi(r.Key)
		f.ok("read the number in a key", err)
		f.equal("payload of "+r.Key, string(r.Payload), strconv.Itoa(i))
		ss, want = append(ss, done(r)), append(want, outbox.ResultDone)
	}
	f.settleAll("acknowledge", ss, want...)
}

func channelsAreIndependent(f *fixture) {
	a, b := f.on(f.channel+"-a"), f.on(f.channel+"-b")
	va, vb := a.put("k", "in a"), b.put("k", "in b")
	f.sameRow("row in b", b.row("k"), unclaimed(value("k", "in b"), vb))

	claimed := a.claimOne(long)
	f.equal("payload claimed from a", string(claimed.Payload), "in a")
	a.settle("in a", done(claimed), outbox.ResultDone)
	a.gone("k", "acknowledged in a")
	f.sameRow("row in b after the settlement in a", b.row("k"), unclaimed(value("k", "in b"), vb))

	a.put("k", "in a again")
	f.fails("DiscardRow of a's version in b", f.store.DiscardRow(f.ctx, b.channel, "k", va), outbox.ErrLeaseLost)
	f.ok("DiscardRow in b", f.store.DiscardRow(f.ctx, b.channel, "k", vb))
	b.gone("k", "discarded in b")
	f.equal("payload in a", string(a.row("k").Payload), "in a again")
	b.claimNone("only a has a row")
}
