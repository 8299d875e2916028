package outboxtest

import (
	"database/sql"
	"slices"
	"testing"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// JournalSuite is the contract of [outbox.JournalStore] as named subtests.
// They share one store and run as those of a [LatestSuite] do.
type JournalSuite struct {
	// Open returns a store and the database in which it keeps its messages,
	// whose pool must allow four connections and more. It is called once per
	// Run and cleans up with t.Cleanup.
	Open func(t *testing.T) (outbox.JournalStore, *sql.DB)
	// Clock, where set, is the clock that the store reads: see [LatestSuite].
	Clock *Clock
	// OneWriter says that the database has one writer at a time: see [LatestSuite].
	OneWriter bool
	// OwnTx says that the store has no transactions but its own: it refuses
	// those of callers by outbox.ErrTx. What only such a transaction can show
	// is then left out. Open returns a nil database.
	OwnTx bool
	// Corrupt, where set, makes the stored headers of a message unreadable, as
	// a foreign program might. Where nil, that is not tried.
	Corrupt func(t *testing.T, db *sql.DB, channel, key string)
}

// TestJournal runs the contract on a store that reads its own clock, in a
// database with many writers. Other stores have a [JournalSuite].
func TestJournal(t *testing.T, open func(*testing.T) (outbox.JournalStore, *sql.DB)) {
	t.Helper()
	JournalSuite{Open: open}.Run(t)
}

// A journalTest is one sentence of the contract.
type journalTest struct {
	name string
	run  func(*journalFixture)
}

// Run runs the suite.
func (s JournalSuite) Run(t *testing.T) {
	t.Helper()
	store, db := s.Open(t)
	for _, test := range s.tests() {
		t.Run(test.name, func(t *testing.T) {
			test.run(&journalFixture{
				base: newBase(t, store, outbox.SystemJournal, db, s.Clock), store: store, corrupt: s.Corrupt,
			})
		})
	}
}

// tests returns the subtests that apply.
func (s JournalSuite) tests() []journalTest {
	// Those that watch come first: what they cost grows with the channels there are.
	all := slices.Concat(messageWatchTests, putTests, begunTests, messageValueTests, messageClaimTests, lapseTests, groupTests, blockTests,
		messageSettleTests, messageExtendTests, stateTests, verbTests, messageListTests, amendTests, purgeTests,
		messageRaceTests)
	switch {
	case s.OwnTx:
		all = append(slices.DeleteFunc(all, needsCallersTx), ownTxTests...)
	case s.OneWriter:
		all = append(all, messageOneWriterTests...)
	default:
		all = append(all, messageLockTests...)
	}
	if s.Clock != nil {
		all = append(all, messageClockTests...)
	}
	if s.Corrupt != nil {
		all = append(all, brokenTests...)
	}
	return append(all, manyTests...)
}
