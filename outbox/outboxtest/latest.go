// Package outboxtest tests stores and the programs that use them.
//
// Authors of a store run its contract with [TestLatest] or a [LatestSuite], and
// that of a journal with [TestJournal] or a [JournalSuite]. [Faulty] is a store
// whose every call can fail before or after it took effect, and [Clock] one
// that moves only when told. Users of the library assert what their
// transactions stage and put with [RequireStaged] and [RequirePut], and publish
// it with [Drain], without waiting for a backoff.
package outboxtest

import (
	"database/sql"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// LatestSuite is the contract of [outbox.LatestStore] as named subtests.
//
// They share the one store that Open returns, each in channels of its own, so
// rows of other subtests, and of earlier runs in the same database, lie
// beside theirs. They run one after another; what they wait for are leases of
// a fraction of a second and one pause of a channel.
type LatestSuite struct {
	// Open returns a store and the database in which it keeps its rows, whose
	// pool must allow three connections and more. It is called once per Run
	// and cleans up with t.Cleanup.
	Open func(t *testing.T) (outbox.LatestStore, *sql.DB)
	// Clock, where set, is the clock that the store reads. The suite then
	// checks times to the microsecond, and waits for nothing. Where nil, the
	// store's clock moves by itself, and those checks do not run: a store that
	// can have its clock set is to be tested both ways.
	Clock *Clock
	// OneWriter says that the database has one writer at a time, as SQLite
	// has: while a transaction is open nobody else writes, so what rows
	// locked by other transactions do cannot be tried. Transactions are then
	// taken to lock the database when they begin (_txlock=immediate).
	OneWriter bool
}

// TestLatest runs the contract on a store that reads its own clock, in a
// database with many writers. Other stores have a [LatestSuite].
func TestLatest(t *testing.T, open func(*testing.T) (outbox.LatestStore, *sql.DB)) {
	t.Helper()
	LatestSuite{Open: open}.Run(t)
}

// A latestTest is one sentence of the contract.
type latestTest struct {
	name string
	run  func(*fixture)
}

// Run runs the suite.
func (s LatestSuite) Run(t *testing.T) {
	t.Helper()
	store, db := s.Open(t)
	for _, test := range s.tests() {
		t.Run(test.name, func(t *testing.T) {
			test.run(newFixture(t, store, db, s.Clock))
		})
	}
}

// tests returns the subtests that apply.
func (s LatestSuite) tests() []latestTest {
	all := slices.Concat(stageTests, valueTests, claimTests, settleTests, extendTests,
		restageTests, recordTests, watchTests, outageTests, raceTests)
	if s.OneWriter {
		all = append(all, oneWriterTests...)
	} else {
		all = append(all, lockTests...)
	}
	if s.Clock != nil {
		all = append(all, clockTests...)
	}
	return append(all, bulkTests...)
}

// channels tells the suite's channels apart, also from those of an earlier run.
var channels atomic.Int64

func newChannel() string {
	return fmt.Sprintf("suite-%x-%d", time.Now().UnixNano(), channels.Add(1))
}
