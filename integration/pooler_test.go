package integration

import (
	"database/sql"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// pooled are the query modes that work behind a pooler in transaction mode
// that knows nothing of prepared statements.
var pooled = []string{"exec", "simple_protocol"}

// behindPooler is a site whose connections go through a pooler that lends
// another session for each transaction.
func behindPooler(t *testing.T, mode string, sessions int) (s *site, direct *sql.DB) {
	dsn := pgtest.DSN(t)
	through := withParameter(t, pgtest.Pooler(t, dsn, sessions), "default_query_exec_mode", mode)
	return newSite(t, dialect.Postgres(), "pgx", through), pgtest.OpenDSN(t, dsn)
}

// requireUnchanged requires that nothing was left in the pooler's sessions.
func requireUnchanged(t *testing.T, s *site, direct *sql.DB) {
	t.Helper()
	var n int
	require.NoError(t, direct.QueryRow(`SELECT count(*) FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
		WHERE d.datname = current_database() AND l.locktype = 'advisory'`).Scan(&n))
	require.Zero(t, n, "session locks")
	for range 8 { // each session in turn
		require.NoError(t, s.db.QueryRow(`SELECT (SELECT count(*) FROM pg_settings WHERE source = 'session' AND name <> 'application_name')
			+ (SELECT count(*) FROM pg_prepared_statements) + (SELECT count(*) FROM pg_class WHERE relpersistence = 't')`).Scan(&n))
		require.Zero(t, n, "settings, prepared statements, temporary tables")
	}
}

func TestRoundBehindAPooler(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, mode := range pooled {
		t.Run(mode, func(t *testing.T) {
			s, direct := behindPooler(t, mode, 4)
			s.round(t)
			requireUnchanged(t, s, direct)
		})
	}
}

// The query modes themselves have the contract in package sqlstore.
func TestContractBehindAPooler(t *testing.T) {
	if testing.Short() {
		return
	}
	outboxtest.TestLatest(t, func(t *testing.T) (outbox.LatestStore, *sql.DB) {
		s, _ := behindPooler(t, "exec", 30)
		return s.store, s.db
	})
}

// Migrations leave no lock on a pooled session, which would stop every later
// start for ever.
func TestMigrationsBehindAPooler(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, mode := range pooled {
		t.Run(mode, func(t *testing.T) {
			s, direct := behindPooler(t, mode, 4)
			require.NoError(t, migrations.Down(t.Context(), s.db, s.dialect, false))
			for range 3 {
				var wg sync.WaitGroup
				for range 5 {
					db := s.open()
					wg.Go(func() {
						if err := migrations.Up(t.Context(), db, s.dialect); err != nil {
							t.Error(err)
						}
					})
				}
				wg.Wait()
				requireUnchanged(t, s, direct)
				require.NoError(t, migrations.Down(t.Context(), s.db, s.dialect, false))
			}
		})
	}
}

// A fleet behind a pooler with fewer sessions than it has relays.
func TestG5FleetBehindASmallPooler(t *testing.T) {
	if testing.Short() {
		return
	}
	const rows = 500
	s, _ := behindPooler(t, "exec", 2)
	var w witness
	book := new(logbook)
	stop := s.fleet(3, book, "", w.publish, outbox.PublishOptions{BatchSize: 10})
	s.stageMany(s.latest(""), "k", rows)
	eventually(t, "all to be published and settled", func() bool { return w.len() >= rows && s.empty() })
	stop()
	require.Empty(t, w.twice())
	require.Empty(t, book.noise())
}
