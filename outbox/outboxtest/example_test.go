package outboxtest_test

import (
	"context"
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

// A program's test stages through its own code, reads what it staged, and
// publishes it, over a failure of the sink.
func ExampleDrain() {
	_ = func(t *testing.T) { // TestRenaming
		c := outboxtest.NewClock(time.Time{})
		store, db := open(false, c)(t)
		latest, err := outbox.NewLatest(store, outbox.LatestOptions[string]{Channel: "names"})
		if err != nil {
			t.Fatal(err)
		}
		sink := map[string]string{}
		publish := func(_ context.Context, batch []*outbox.Entry[string]) error {
			for _, e := range batch {
				if e.Attempt == 1 {
					e.Retry(time.Minute)
					continue
				}
				sink[e.Key] = e.Value
			}
			return nil
		}
		relay, err := outbox.NewRelay(outbox.RelayOptions{}, latest.Publisher(publish, outbox.PublishOptions{}))
		if err != nil {
			t.Fatal(err)
		}

		tx, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer tx.Rollback()
		if _, err := latest.Stage(t.Context(), tx, "42", "new name"); err != nil { // the code under test
			t.Fatal(err)
		}
		if e := outboxtest.RequireStaged(t, latest, tx, "42"); e.Value != "new name" {
			t.Errorf("staged is %q", e.Value)
		}
		if err := tx.Commit(); err != nil {
			t.Fatal(err)
		}
		outboxtest.Drain(t, relay, c)
		if sink["42"] != "new name" {
			t.Errorf("the sink has %q", sink["42"])
		}
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
