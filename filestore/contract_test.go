package filestore

import (
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// unsynced leaves the fsyncs out: tests that do not cut the power need none.
func unsynced(name string, call func() error) error {
	if name == "fsync" || name == "fsync directory" {
		return nil
	}
	return call()
}

// newPath returns the path of a file to be, in a private directory.
func newPath(t testing.TB) string { return filepath.Join(t.TempDir(), "state", "outbox.json") }

// openTest opens a store that is closed at the test's end.
func openTest(t testing.TB, path string, o Options, sys system) *Store {
	t.Helper()
	s, err := open(path, o, sys)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func TestJournalContract(t *testing.T) {
	for name, clock := range map[string]*outboxtest.Clock{"own clock": nil, "set clock": outboxtest.NewClock(time.Now())} {
		t.Run(name, func(t *testing.T) {
			o := Options{MaxEntries: 1 << 20, MaxBytes: 1 << 40}
			if clock != nil {
				o.Clock = clock.Now
			}
			outboxtest.JournalSuite{OwnTx: true, Clock: clock, Open: func(t *testing.T) (outbox.JournalStore, *sql.DB) {
				return openTest(t, newPath(t), o, unsynced), nil
			}}.Run(t)
		})
	}
}
