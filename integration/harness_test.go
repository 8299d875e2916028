// Package integration holds the tests of the guarantees on real databases:
// TestG1… to TestG10… are named for those of the documentation. Each runs on
// Postgres and on SQLite; go test -short leaves Postgres out.
package integration

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// site is an application's database with an outbox in it.
type site struct {
	t       testing.TB
	dialect dialect.Dialect
	driver  string
	dsn     string
	db      *sql.DB
	store   *sqlstore.Store
}

// onBoth runs a test on Postgres and on SQLite.
func onBoth(t *testing.T, test func(t *testing.T, s *site)) { onBothAtOnce(t, onSQLite, test) }

// onBothAtOnce runs a test on SQLite and on Postgres at the same time, as most
// wait for longer than they compute.
func onBothAtOnce(t *testing.T, onSQLite func(testing.TB) *site, test func(t *testing.T, s *site)) {
	t.Run("sqlite", func(t *testing.T) { t.Parallel(); test(t, onSQLite(t)) })
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) { t.Parallel(); test(t, onPostgres(t)) })
	}
}

func onSQLite(t testing.TB) *site {
	path := filepath.Join(t.TempDir(), "app.db")
	return newSite(t, dialect.SQLite(), "sqlite", dialect.SQLiteDSN(path))
}

func onPostgres(t testing.TB) *site {
	return newSite(t, dialect.Postgres(), "pgx", pgtest.DSN(t))
}

// newSite installs the outbox and a table of business data: app (id, note).
func newSite(t testing.TB, d dialect.Dialect, driver, dsn string) *site {
	s := &site{t: t, dialect: d, driver: driver, dsn: dsn}
	s.db = s.open()
	require.NoError(t, migrations.Up(t.Context(), s.db, d))
	_, err := s.db.Exec(`CREATE TABLE app (id text PRIMARY KEY, note text NOT NULL)`)
	require.NoError(t, err)
	s.store, err = sqlstore.New(s.db, d, sqlstore.Options{})
	require.NoError(t, err)
	return s
}

// open opens another pool on the same database: another process, nearly.
func (s *site) open() *sql.DB {
	db, err := sql.Open(s.driver, s.dsn)
	require.NoError(s.t, err)
	db.SetMaxOpenConns(40)
	db.SetMaxIdleConns(40)
	s.t.Cleanup(func() { db.Close() })
	return db
}

// newStore makes a store on a pool of its own.
func (s *site) newStore(o sqlstore.Options) *sqlstore.Store {
	store, err := sqlstore.New(s.open(), s.dialect, o)
	require.NoError(s.t, err)
	return store
}

func (s *site) postgres() bool { return s.dialect.Name() == "postgres" }

// exec runs a statement with $1-style parameters on either database.
func (s *site) exec(query string, args ...any) {
	s.t.Helper()
	_, err := s.db.Exec(query, args...)
	require.NoError(s.t, err)
}

// count returns a single number.
func (s *site) count(query string, args ...any) (n int) {
	s.t.Helper()
	require.NoError(s.t, s.db.QueryRow(s.dialect.Render(query), args...).Scan(&n))
	return n
}

// begin begins a transaction that the test's end rolls back if it is open.
func (s *site) begin() *sql.Tx {
	s.t.Helper()
	tx, err := s.db.BeginTx(context.Background(), nil)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = tx.Rollback() })
	return tx
}

// latest is a Latest of strings, its payload the string itself, as JSON.
func (s *site) latest(channel string) *outbox.Latest[string] {
	l, err := outbox.NewLatest(s.store, outbox.LatestOptions[string]{Channel: channel})
	require.NoError(s.t, err)
	return l
}

// stage commits one value, and a business row beside it.
func (s *site) stage(l *outbox.Latest[string], key, value string) outbox.Version {
	s.t.Helper()
	tx := s.begin()
	v, err := l.Stage(s.t.Context(), tx, key, value)
	require.NoError(s.t, err)
	require.NoError(s.t, tx.Commit())
	return v
}

// stageMany commits n values with keys prefix0000000 and so on.
func (s *site) stageMany(l *outbox.Latest[string], prefix string, n int) {
	s.t.Helper()
	items := make([]outbox.Item[string], n)
	for i := range items {
		items[i] = outbox.Item[string]{Key: fmt.Sprintf("%s%07d", prefix, i), Value: strings.Repeat("v", 20)}
	}
	tx := s.begin()
	_, err := l.StageMany(s.t.Context(), tx, items)
	require.NoError(s.t, err)
	require.NoError(s.t, tx.Commit())
}

// run runs a relay until the test, or the returned stop, ends it; stop returns
// what Run did.
func (s *site) run(o outbox.RelayOptions, as ...outbox.Attachment) (stop func() error) {
	s.t.Helper()
	r, err := outbox.NewRelay(o, as...)
	require.NoError(s.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	var result error
	ended := false
	stop = func() error {
		if !ended {
			cancel()
			result, ended = <-done, true
		}
		return result
	}
	s.t.Cleanup(func() { _ = stop() })
	return stop
}

// eventually waits for a condition; it fails the test after 30 s.
func eventually(t testing.TB, what string, condition func() bool) {
	t.Helper()
	deadline := time.Now().Add(30 * time.Second)
	for !condition() {
		if time.Now().After(deadline) {
			t.Fatalf("waited 30 s for %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
