package sqlstore_test

import (
	"database/sql"
	"fmt"
	"net/url"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// opener opens a store on a database of the test's own; clock may be nil.
func opener(d dialect.Dialect, driver string, dsn func(t *testing.T) string, clock *outboxtest.Clock) func(*testing.T) (*sqlstore.Store, *sql.DB) {
	return func(t *testing.T) (*sqlstore.Store, *sql.DB) {
		db, err := sql.Open(driver, dsn(t))
		require.NoError(t, err)
		t.Cleanup(func() { db.Close() })
		require.NoError(t, migrations.Up(t.Context(), db, d))
		var o sqlstore.Options
		if clock != nil {
			o.Clock = clock.Now
		}
		s, err := sqlstore.New(db, d, o)
		require.NoError(t, err)
		require.NoError(t, s.Check(t.Context()))
		return s, db
	}
}

// latest and journal are what the suites open.
func latest(open func(*testing.T) (*sqlstore.Store, *sql.DB)) func(*testing.T) (outbox.LatestStore, *sql.DB) {
	return func(t *testing.T) (outbox.LatestStore, *sql.DB) { return open(t) }
}

func journal(open func(*testing.T) (*sqlstore.Store, *sql.DB)) func(*testing.T) (outbox.JournalStore, *sql.DB) {
	return func(t *testing.T) (outbox.JournalStore, *sql.DB) { return open(t) }
}

// corrupt makes the headers of a message unreadable.
func corrupt(d dialect.Dialect) func(t *testing.T, db *sql.DB, channel, key string) {
	return func(t *testing.T, db *sql.DB, channel, key string) {
		_, err := db.Exec(d.Render(`UPDATE {t:messages} SET headers = '{"a":' WHERE channel = $1 AND key = $2`), channel, key)
		require.NoError(t, err)
	}
}

func pgDSN(t *testing.T) string { return pgtest.DSN(t) }

func sqlite(db *sql.DB) bool { return fmt.Sprintf("%T", db.Driver()) == "*sqlite.Driver" }

func sqliteFile(t *testing.T) string {
	return dialect.SQLiteDSN(filepath.Join(t.TempDir(), "contract.db"))
}

func TestContractOnSQLite(t *testing.T) {
	for name, clock := range clocks() {
		t.Run(name, func(t *testing.T) {
			open := opener(dialect.SQLite(), "sqlite", sqliteFile, clock)
			outboxtest.LatestSuite{Open: latest(open), Clock: clock, OneWriter: true}.Run(t)
		})
	}
}

func TestContractOnPostgres(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves Postgres out")
	}
	for name, clock := range clocks() {
		t.Run(name, func(t *testing.T) {
			open := opener(dialect.Postgres(), "pgx", pgDSN, clock)
			outboxtest.LatestSuite{Open: latest(open), Clock: clock}.Run(t)
		})
	}
}

func TestJournalContractOnSQLite(t *testing.T) {
	for name, clock := range clocks() {
		if underRace && clock == nil {
			continue
		}
		t.Run(name, func(t *testing.T) {
			open := opener(dialect.SQLite(), "sqlite", sqliteFile, clock)
			outboxtest.JournalSuite{Open: journal(open), Clock: clock, OneWriter: true, Corrupt: corrupt(dialect.SQLite())}.Run(t)
		})
	}
}

func TestJournalContractOnPostgres(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves Postgres out")
	}
	for name, clock := range clocks() {
		t.Run(name, func(t *testing.T) {
			open := opener(dialect.Postgres(), "pgx", pgDSN, clock)
			outboxtest.JournalSuite{Open: journal(open), Clock: clock, Corrupt: corrupt(dialect.Postgres())}.Run(t)
		})
	}
}

// TestContractInEveryQueryMode: how pgx sends parameters must not matter.
func TestContractInEveryQueryMode(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves Postgres out")
	}
	for _, mode := range []string{"cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			dsn := func(t *testing.T) string {
				u, err := url.Parse(pgtest.DSN(t))
				require.NoError(t, err)
				q := u.Query()
				q.Set("default_query_exec_mode", mode)
				u.RawQuery = q.Encode()
				return u.String()
			}
			open := opener(dialect.Postgres(), "pgx", dsn, nil)
			t.Run("latest", func(t *testing.T) { outboxtest.TestLatest(t, latest(open)) })
			t.Run("journal", func(t *testing.T) { outboxtest.TestJournal(t, journal(open)) })
		})
	}
}

// clocks are the store's own, and one that the suite sets.
func clocks() map[string]*outboxtest.Clock {
	return map[string]*outboxtest.Clock{"own clock": nil, "set clock": outboxtest.NewClock(time.Now())}
}
