package outboxtest_test

import (
	"database/sql"
	"os"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// defectVariable names the defect with which a subprocess runs the suite.
const defectVariable = "OUTBOXTEST_DEFECT"

// open returns what a suite opens.
func open(oneWriter bool, c *outboxtest.Clock) func(*testing.T) (outbox.LatestStore, *sql.DB) {
	return func(t *testing.T) (outbox.LatestStore, *sql.DB) {
		var now func() time.Time
		if c != nil {
			now = c.Now
		}
		mem := newMemoryDB(oneWriter)
		db := mem.open()
		t.Cleanup(func() { db.Close() })
		return newMemory(mem, now, os.Getenv(defectVariable)), db
	}
}

func TestMemoryHoldsTheContract(t *testing.T) {
	outboxtest.TestLatest(t, open(false, nil))
}

func TestMemoryHoldsTheContractOnAClock(t *testing.T) {
	c := outboxtest.NewClock(time.Time{})
	outboxtest.LatestSuite{Open: open(false, c), Clock: c}.Run(t)
}

func TestMemoryWithOneWriterHoldsTheContract(t *testing.T) {
	outboxtest.LatestSuite{Open: open(true, nil), OneWriter: true}.Run(t)
}
