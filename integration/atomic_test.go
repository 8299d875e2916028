package integration

import (
	"context"
	"database/sql"
	"errors"
	"log/slog"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// quiet is the logger of relays whose words a test does not need.
var quiet = slog.New(slog.DiscardHandler)

func TestG1StagedValueCommitsWithTheBusinessRow(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		tx := s.begin()
		_, err := tx.Exec(`INSERT INTO app VALUES ('a', 'note')`)
		require.NoError(t, err)
		v, err := l.Stage(t.Context(), tx, "a", "new")
		require.NoError(t, err)
		_, err = l.StageDelete(t.Context(), tx, "b")
		require.NoError(t, err)

		_, err = l.Pending(t.Context(), nil, "a")
		require.ErrorIs(t, err, outbox.ErrNotFound, "seen before the commit")
		e, err := l.Pending(t.Context(), outbox.SQL(tx), "a")
		require.NoError(t, err)
		require.Equal(t, v, e.Version)
		require.Zero(t, s.once(l, outbox.PublishOptions{}, newMirror().publish), "claimed before the commit")

		require.NoError(t, tx.Commit())
		require.Equal(t, 1, s.count(`SELECT count(*) FROM app`))
		e, err = l.Pending(t.Context(), nil, "a")
		require.NoError(t, err)
		require.Equal(t, "new", e.Value)
		e, err = l.Pending(t.Context(), nil, "b")
		require.NoError(t, err)
		require.True(t, e.Deleted)
	})
}

func TestG1RollbackBringsBackWhatWasPending(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		s.stage(l, "old", "kept")
		s.stage(l, "failed", "kept")
		s.settle("orders", outbox.OutcomeRetry, time.Hour, s.claim("orders", 2, time.Minute)...)
		s.stage(l, "leased", "kept")
		s.claim("orders", 1, time.Minute)
		before := s.entries()

		tx := s.begin()
		_, err := tx.Exec(`INSERT INTO app VALUES ('a', 'note')`)
		require.NoError(t, err)
		for _, key := range []string{"old", "failed", "leased", "never seen"} {
			_, err := l.Stage(t.Context(), tx, key, "undone")
			require.NoError(t, err)
			_, err = l.StageDelete(t.Context(), tx, key)
			require.NoError(t, err)
		}
		require.NoError(t, tx.Rollback())
		require.Equal(t, before, s.entries())
		require.Zero(t, s.count(`SELECT count(*) FROM app`))
	})
}

func TestG1SavepointTakesBackWhatWasStagedSince(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		do := func(tx *sql.Tx, text string) {
			_, err := tx.Exec(text)
			require.NoError(t, err)
		}
		stage := func(tx *sql.Tx, key, value string) outbox.Version {
			v, err := l.Stage(t.Context(), tx, key, value)
			require.NoError(t, err)
			return v
		}
		tx := s.begin()
		first := stage(tx, "k", "before the savepoint")
		do(tx, `SAVEPOINT one`)
		second := stage(tx, "k", "undone")
		stage(tx, "born and undone", "undone")
		do(tx, `ROLLBACK TO SAVEPOINT one`)
		third := stage(tx, "born and undone", "kept")
		do(tx, `SAVEPOINT two`)
		fourth := stage(tx, "released", "kept")
		do(tx, `RELEASE SAVEPOINT two`)
		require.NoError(t, tx.Commit())

		// On SQLite the counter goes back with the savepoint; nobody has seen
		// the versions that were undone.
		require.Greater(t, second, first)
		require.Greater(t, third, first)
		require.Greater(t, fourth, third)
		m := newMirror()
		s.once(l, outbox.PublishOptions{}, m.publish)
		require.Empty(t, m.regressions())
		require.Equal(t, "before the savepoint", m.value("k"))
		require.Equal(t, "kept", m.value("born and undone"))
		require.Equal(t, "kept", m.value("released"))
		require.Equal(t, 3, m.published)
	})
}

func TestG1RefusedCallsLeaveTheTransactionUsable(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		for _, r := range refusals {
			tx := s.begin()
			_, err := l.Stage(t.Context(), tx, "before", r.name)
			require.NoError(t, err)
			require.ErrorIs(t, r.call(t.Context(), l, tx), outbox.ErrInvalid, r.name)
			_, err = tx.Exec(`INSERT INTO app VALUES ($1, 'after a refusal')`, r.name)
			require.NoError(t, err, r.name)
			_, err = l.Stage(t.Context(), tx, "after", r.name)
			require.NoError(t, err, r.name)
			require.NoError(t, tx.Commit(), r.name)
			require.Equal(t, 1, s.count(`SELECT count(*) FROM app WHERE id = $1`, r.name))
			require.Equal(t, 2, s.count(`SELECT count(*) FROM {t:entries}`), "%s wrote something", r.name)
		}
	})
}

// sessionState is what a session shows of itself, by the kind of database.
var sessionState = map[string][]string{
	"postgres": {
		`SELECT name, setting FROM pg_settings ORDER BY name`,
		`SELECT pg_current_xact_id_if_assigned()::text, current_user, session_user, current_schemas(true)::text`,
		`SELECT relname FROM pg_class WHERE relpersistence = 't'`,
		`SELECT locktype, mode FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'`,
		`SELECT pg_listening_channels()`,
	},
	"sqlite": {
		`PRAGMA foreign_keys`, `PRAGMA busy_timeout`, `PRAGMA synchronous`, `PRAGMA journal_mode`, `PRAGMA locking_mode`,
		`PRAGMA recursive_triggers`, `PRAGMA query_only`, `PRAGMA temp_store`, `PRAGMA cache_size`,
		`PRAGMA defer_foreign_keys`, `PRAGMA ignore_check_constraints`, `PRAGMA read_uncommitted`, `PRAGMA database_list`,
		`SELECT name FROM sqlite_temp_master`,
	},
}

func TestG1SessionStaysAsTheCallerSetIt(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		state := func(q queryer) (all []string) {
			for _, query := range sessionState[s.dialect.Name()] {
				all = append(all, tableOf(t, q, query)...)
			}
			return all
		}
		conn, err := s.db.Conn(t.Context())
		require.NoError(t, err)
		defer conn.Close()
		state(conn) // SQLite opens its temporary schema at the first look
		idle := state(conn)

		tx, err := conn.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		defer tx.Rollback()
		_, err = tx.Exec(`INSERT INTO app VALUES ('a', 'note')`)
		require.NoError(t, err)
		if s.postgres() {
			_, err = tx.Exec(`SET LOCAL search_path TO pg_catalog; SET LOCAL enable_seqscan = off; SET LOCAL work_mem = '99kB'`)
			require.NoError(t, err)
		}
		inside := state(tx)
		for range 3 { // the third time, a function's plans are kept
			_, err = l.Stage(t.Context(), tx, "a", "value")
			require.NoError(t, err)
			_, err = l.StageMany(t.Context(), tx, []outbox.Item[string]{{Key: "b"}, {Key: "c"}, {Key: "b"}})
			require.NoError(t, err)
			_, err = l.StageDelete(t.Context(), tx, "d")
			require.NoError(t, err)
			_, err = l.Pending(t.Context(), outbox.SQL(tx), "a")
			require.NoError(t, err)
			_, err = l.Pending(t.Context(), outbox.SQL(tx), "missing")
			require.ErrorIs(t, err, outbox.ErrNotFound)
			for _, r := range refusals {
				require.Error(t, r.call(t.Context(), l, tx))
			}
		}
		require.Equal(t, inside, state(tx))
		require.NoError(t, tx.Commit())
		require.Equal(t, idle, state(conn))
	})
}

// TestG1NoNameDependsOnTheSearchPath is field case S52, with tables of the same
// names lying in wait in another schema.
func TestG1NoNameDependsOnTheSearchPath(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, plain *site) {
		u, err := url.Parse(plain.dsn)
		require.NoError(t, err)
		q := u.Query()
		q.Set("search_path", "")
		u.RawQuery = q.Encode()
		d := dialect.Postgres().In("q", "outbox_")
		s := &site{t: t, dialect: d, driver: plain.driver, dsn: u.String()}
		s.db = s.open()
		install(t, s.db, d)
		s.store = s.newStore(sqlstore.Options{})
		require.NoError(t, s.store.Check(t.Context()))

		l := s.latest("orders")
		for _, path := range []string{`''`, `pg_catalog`, `public, pg_catalog`} { // plain's outbox is in public
			tx := s.begin()
			_, err := tx.Exec(`SET LOCAL search_path TO ` + path)
			require.NoError(t, err)
			_, err = l.Stage(t.Context(), tx, path, "value")
			require.NoError(t, err)
			_, err = l.StageMany(t.Context(), tx, []outbox.Item[string]{{Key: path}, {Key: path + "2", Value: "value"}})
			require.NoError(t, err)
			require.Equal(t, tableOf(t, tx, `SHOW search_path`)[0], "["+strings.ReplaceAll(path, `''`, `""`)+"]")
			require.NoError(t, tx.Commit())
		}
		stats, err := s.store.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, 6, stats[0].Due)
		require.NoError(t, s.store.Pause(t.Context(), "orders", time.Hour, "test"))
		require.NoError(t, s.store.Pause(t.Context(), "orders", 0, ""))
		_, _, err = s.store.Fence(t.Context())
		require.NoError(t, err)
		rows := s.claim("orders", 10, time.Minute)
		require.Len(t, rows, 6)
		extended, err := s.store.Extend(t.Context(), latestChannel("orders"), rows, time.Minute)
		require.NoError(t, err)
		require.Equal(t, allOf(outbox.ResultDone, 6), extended)
		require.Equal(t, allOf(outbox.ResultDone, 6), s.settle("orders", outbox.OutcomeDone, 0, rows...))
		require.ErrorIs(t, s.store.DiscardRow(t.Context(), "orders", "gone", 1), outbox.ErrNotFound)
		require.Zero(t, plain.count(`SELECT count(*) FROM {t:entries}`), "written into another schema's tables")
	})
}

func allOf(r outbox.Result, n int) []outbox.Result {
	list := make([]outbox.Result, n)
	for i := range list {
		list[i] = r
	}
	return list
}

// TestG1TransactRunsOnceAndSaysWhatBecameOfIt: a store's own Transact commits
// what its function staged, or nothing.
func TestG1TransactRunsOnceAndSaysWhatBecameOfIt(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		calls := 0
		put := func(end error) func(tx *sql.Tx) error {
			return func(tx *sql.Tx) error {
				calls++
				_, err := tx.Exec(`INSERT INTO app VALUES ('a', 'note')`)
				if err == nil {
					_, err = l.Stage(t.Context(), tx, "a", "value")
				}
				return errors.Join(err, end)
			}
		}
		failure := errors.New("no")
		require.ErrorIs(t, s.store.Transact(t.Context(), nil, put(failure)), failure)
		require.Panics(t, func() {
			_ = s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
				_ = put(nil)(tx)
				panic("no")
			})
		})
		ctx, cancel := context.WithCancel(t.Context())
		err := s.store.Transact(ctx, nil, func(tx *sql.Tx) error {
			err := put(nil)(tx)
			cancel()
			return err
		})
		require.ErrorIs(t, err, context.Canceled)
		require.False(t, s.store.Retryable(err))
		require.True(t, s.empty())
		require.Zero(t, s.count(`SELECT count(*) FROM app`))

		require.NoError(t, s.store.Transact(t.Context(), nil, put(nil)))
		require.Equal(t, 4, calls)
		require.Equal(t, 1, s.count(`SELECT count(*) FROM app`))
		require.Equal(t, 1, s.count(`SELECT count(*) FROM {t:entries}`))
	})
}
