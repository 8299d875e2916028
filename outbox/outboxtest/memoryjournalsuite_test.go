package outboxtest_test

import (
	"database/sql"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// openJournal returns what a JournalSuite opens, and how it corrupts a message.
func openJournal(oneWriter bool, c *outboxtest.Clock) (func(*testing.T) (outbox.JournalStore, *sql.DB), func(*testing.T, *sql.DB, string, string)) {
	var m *memory
	corrupt := func(_ *testing.T, _ *sql.DB, channel, key string) {
		_ = m.db.view(func() error {
			r := *m.db.messages[m.messageID(channel, key)]
			r.Header, r.Broken = nil, errCorrupt
			if m.is("unreadable headers are hidden") {
				r.Broken = nil
			}
			m.db.messages[m.messageID(channel, key)] = &r
			return nil
		})
	}
	return func(t *testing.T) (outbox.JournalStore, *sql.DB) {
		store, db := open(oneWriter, c)(t)
		m = store.(*memory)
		return m, db
	}, corrupt
}

func TestMemoryJournalHoldsTheContract(t *testing.T) {
	open, corrupt := openJournal(false, nil)
	outboxtest.JournalSuite{Open: open, Corrupt: corrupt}.Run(t)
}

func TestMemoryJournalHoldsTheContractOnAClock(t *testing.T) {
	c := outboxtest.NewClock(time.Time{})
	open, corrupt := openJournal(false, c)
	outboxtest.JournalSuite{Open: open, Clock: c, Corrupt: corrupt}.Run(t)
}

func TestMemoryJournalWithOneWriterHoldsTheContract(t *testing.T) {
	open, corrupt := openJournal(true, nil)
	outboxtest.JournalSuite{Open: open, OneWriter: true, Corrupt: corrupt}.Run(t)
}
