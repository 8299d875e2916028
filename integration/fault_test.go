package integration

import (
	"database/sql"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/stretchr/testify/require"
	"modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// TestG1SerializationFailuresPassThrough: at higher isolation an invisible
// duplicate is 40001.
func TestG1SerializationFailuresPassThrough(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		for _, level := range []sql.IsolationLevel{sql.LevelRepeatableRead, sql.LevelSerializable} {
			for name, meanwhile := range map[string]func(){
				"replaced":  func() { s.stage(l, "held", "by another") },
				"born":      func() { s.stage(l, level.String(), "by another") },
				"published": func() { drained(t, s.store, "orders", func(outbox.Row) {}) },
			} {
				s.stage(l, "held", "before")
				tx, err := s.db.BeginTx(t.Context(), &sql.TxOptions{Isolation: level})
				require.NoError(t, err)
				_, err = tx.Exec(`SELECT count(*) FROM app`) // takes the snapshot
				require.NoError(t, err)
				meanwhile()
				key := "held"
				if name == "born" {
					key = level.String()
				}
				_, err = l.Stage(t.Context(), tx, key, "too late")
				if name == "published" && err == nil { // deleted and not seen is free to be born again
					require.NoError(t, tx.Rollback())
					continue
				}
				var pg *pgconn.PgError
				require.ErrorAs(t, err, &pg, "%s at %s", name, level)
				require.Equal(t, "40001", pg.Code)
				require.True(t, s.store.Retryable(err))
				require.NoError(t, tx.Rollback())
				s.stage(l, key, "again, as a whole")
			}
		}
	})
}

// TestG1CallersTimeoutsAreRespected: lock_timeout and statement_timeout are the
// caller's, and their errors come through.
func TestG1CallersTimeoutsAreRespected(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		holder := s.begin()
		_, err := l.Stage(t.Context(), holder, "k", "held")
		require.NoError(t, err)
		for setting, state := range map[string]string{"lock_timeout": "55P03", "statement_timeout": "57014"} {
			tx := s.begin()
			_, err := tx.Exec(`SET LOCAL ` + setting + ` = '50ms'`)
			require.NoError(t, err)
			_, err = l.Stage(t.Context(), tx, "k", "waits")
			var pg *pgconn.PgError
			require.ErrorAs(t, err, &pg)
			require.Equal(t, state, pg.Code)
			require.False(t, s.store.Retryable(err))
			_, err = l.Stage(t.Context(), tx, "another", "in an aborted transaction")
			require.ErrorIs(t, err, outbox.ErrTx)
			require.NoError(t, tx.Rollback())
		}
	})
}

// TestG1DeferredTransactionLearnsTheRemedy is field case S73.
func TestG1DeferredTransactionLearnsTheRemedy(t *testing.T) {
	onlySQLite(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		read := func(db *sql.DB) *sql.Tx {
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			tableOf(t, tx, `SELECT * FROM app`)
			return tx
		}
		deferred, err := sql.Open("sqlite", strings.Replace(s.dsn, "_txlock=immediate", "_txlock=deferred", 1))
		require.NoError(t, err)
		defer deferred.Close()
		tx := read(deferred)
		s.stage(l, "k", "by another")
		began := time.Now()
		_, err = l.Stage(t.Context(), tx, "k", "too late")
		require.Less(t, time.Since(began), 3*time.Second, "SQLite does not wait, so neither should we")
		var busy *sqlite.Error
		require.ErrorAs(t, err, &busy)
		require.Equal(t, 517, busy.Code()) // SQLITE_BUSY_SNAPSHOT
		require.ErrorContains(t, err, "_txlock=immediate")
		require.True(t, s.store.Retryable(err))
		require.NoError(t, tx.Rollback())

		tx = read(s.db) // with the DSN of package dialect the same works
		_, err = l.Stage(t.Context(), tx, "k", "in time")
		require.NoError(t, err)
		require.NoError(t, tx.Commit())
	})
}

// TestG1RelayNeverReadsBeforeItWrites: a relay on a pool of deferred
// transactions takes its write lock first, so it never sees SQLITE_BUSY.
func TestG1RelayNeverReadsBeforeItWrites(t *testing.T) {
	onlySQLite(t, func(t *testing.T, s *site) {
		s.dsn = strings.Replace(s.dsn, "_txlock=immediate", "_txlock=deferred", 1)
		relayed := latestOn(t, s.newStore(sqlstore.Options{}), "orders")
		l := s.latest("orders")
		book := new(logbook)
		m := newMirror()
		stop := s.run(book.options(), relayed.Publisher(m.publish, outbox.PublishOptions{BatchSize: 3}))
		var stagers sync.WaitGroup
		for i := range 4 {
			stagers.Go(func() {
				for range 50 {
					err := s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
						_, err := l.Stage(t.Context(), tx, string(rune('a'+i)), "value")
						return err
					})
					if err != nil {
						t.Errorf("stage: %v", err)
					}
				}
			})
		}
		stagers.Wait()
		eventually(t, "everything to be published", s.empty)
		require.NoError(t, stop())
		require.Empty(t, book.of(outbox.EventTrouble))
		require.Empty(t, m.regressions())
	})
}
