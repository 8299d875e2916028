package outboxtest_test

import (
	"database/sql"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// A store runs the contract on its own clock, and on one that the suite moves.
func Example() {
	open := func(t *testing.T, now func() time.Time) (outbox.LatestStore, *sql.DB) {
		mem := newMemoryDB(false)
		db := mem.open()
		t.Cleanup(func() { db.Close() })
		return newMemory(mem, now, ""), db
	}
	_ = func(t *testing.T) { // TestContract
		outboxtest.TestLatest(t, func(t *testing.T) (outbox.LatestStore, *sql.DB) { return open(t, time.Now) })
	}
	_ = func(t *testing.T) { // TestContractOnAClock
		c := outboxtest.NewClock(time.Time{})
		outboxtest.LatestSuite{
			Open:  func(t *testing.T) (outbox.LatestStore, *sql.DB) { return open(t, c.Now) },
			Clock: c,
		}.Run(t)
	}
}

// A store that loses the answer to its first settlement, and then works.
func ExampleFaulty() {
	_ = func(t *testing.T) {
		store, _ := open(false, nil)(t)
		faulty := outboxtest.NewFaulty(store)
		faulty.Inject(outboxtest.Fault{Step: outboxtest.StepSettle, When: outboxtest.After})
		_, _ = outbox.NewLatest(faulty, outbox.LatestOptions[string]{})
	}
}
