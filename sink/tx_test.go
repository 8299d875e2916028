package sink_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

func TestApplyInCommitsAndRollsBackWithTheCaller(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		for _, commit := range []bool{false, true} {
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			result, err := s.ApplyIn(t.Context(), tx, []sink.Row{live("a", 2), live("a", 1), gone("b", 3)})
			require.NoError(t, err)
			require.Equal(t, sink.Result{Applied: 2, Stale: 1}, result)
			if commit {
				require.NoError(t, tx.Commit())
				break
			}
			require.NoError(t, tx.Rollback())
			_, err = s.Get(t.Context(), "a")
			require.ErrorIs(t, err, sink.ErrNotFound)
		}
		requireRow(t, s, live("a", 2))
		requireRow(t, s, gone("b", 3))
	})
}

func TestApplyInRefusesAnUnusableTransaction(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		_, err := s.ApplyIn(t.Context(), nil, []sink.Row{live("a", 1)})
		require.ErrorIs(t, err, sink.ErrInvalid)
		tx, err := db.BeginTx(t.Context(), nil)
		require.NoError(t, err)
		require.NoError(t, tx.Rollback())
		_, err = s.ApplyIn(t.Context(), tx, []sink.Row{live("a", 1)})
		require.ErrorIs(t, err, sql.ErrTxDone)
	})
}

// A context that ends while a statement runs must not end the caller's
// transaction behind its back: what the caller writes next would commit alone.
func TestCancelledContextLeavesASQLiteTransactionWhole(t *testing.T) {
	db := openSQLite(t)
	s := newSink(t, db, dialect.SQLite(), sink.Options{})
	_, err := db.Exec(`
		CREATE TABLE business (id INTEGER);
		CREATE VIEW slow AS WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 100000) SELECT i FROM n;
		CREATE TRIGGER slowly AFTER INSERT ON projections BEGIN SELECT count(*) FROM slow; END`)
	require.NoError(t, err)

	tx, err := db.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	_, err = tx.Exec(`INSERT INTO business VALUES (1)`)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	_, err = s.ApplyIn(ctx, tx, []sink.Row{live("a", 1), live("b", 1), live("c", 1), live("d", 1), live("e", 1)})
	require.NoError(t, err)
	require.ErrorIs(t, ctx.Err(), context.DeadlineExceeded, "the statement was too fast for this test")
	_, err = s.ApplyIn(ctx, tx, []sink.Row{live("f", 1)})
	require.ErrorIs(t, err, context.DeadlineExceeded)

	_, err = tx.Exec(`INSERT INTO business VALUES (2)`)
	require.NoError(t, err)
	require.NoError(t, tx.Rollback())
	var stray int
	require.NoError(t, db.QueryRow(`SELECT (SELECT count(*) FROM business) + (SELECT count(*) FROM projections)`).Scan(&stray))
	require.Zero(t, stray)
}

func TestCancelledContextStopsApply(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		_, err := s.Apply(ctx, []sink.Row{live("a", 1)})
		require.ErrorIs(t, err, context.Canceled)
		_, err = s.Get(t.Context(), "a")
		require.ErrorIs(t, err, sink.ErrNotFound)
	})
}

// Transactions that write the same keys, each in an order of its own, would
// deadlock if a call did not lock them in one order.
func TestKeysAreLockedInOneOrder(t *testing.T) {
	if testing.Short() {
		return
	}
	db := openPostgres(t, pgx.QueryExecModeCacheStatement)
	s := newSink(t, db, dialect.Postgres(), sink.Options{})
	var wg sync.WaitGroup
	failed := make(chan error, 8)
	for w := range 8 {
		wg.Go(func() {
			for round := range 50 {
				rows := make([]sink.Row, 20)
				for i := range rows {
					rows[i] = live(fmt.Sprint(i), int64(1+round*8+w))
				}
				rand.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
				if err := inTx(db, nil, func(tx *sql.Tx) error {
					_, err := s.ApplyIn(t.Context(), tx, rows)
					return err
				}); err != nil {
					failed <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(failed)
	require.NoError(t, firstOf(failed))
	requireRow(t, s, live("7", 400))
}

func inTx(db *sql.DB, o *sql.TxOptions, f func(tx *sql.Tx) error) error {
	tx, err := db.BeginTx(context.Background(), o)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

func TestSerializationFailureIsPassedThrough(t *testing.T) {
	if testing.Short() {
		return
	}
	db := openPostgres(t, pgx.QueryExecModeCacheStatement)
	s := newSink(t, db, dialect.Postgres(), sink.Options{})
	apply(t, s, 1, 0, live("a", 1))
	err := inTx(db, &sql.TxOptions{Isolation: sql.LevelRepeatableRead}, func(tx *sql.Tx) error {
		var n int
		if err := tx.QueryRow(`SELECT count(*) FROM projections`).Scan(&n); err != nil {
			return err
		}
		apply(t, s, 1, 0, live("a", 3))
		_, err := s.ApplyIn(t.Context(), tx, []sink.Row{live("a", 2)})
		return err
	})
	var state interface{ SQLState() string }
	require.True(t, errors.As(err, &state), "%v", err)
	require.Equal(t, "40001", state.SQLState())
	requireRow(t, s, live("a", 3))
}

func TestPurgeSkipsRowsInUse(t *testing.T) {
	if testing.Short() {
		return
	}
	db := openPostgres(t, pgx.QueryExecModeCacheStatement)
	s := newSink(t, db, dialect.Postgres(), sink.Options{})
	apply(t, s, 2, 0, gone("held", 1), gone("free", 2))
	require.NoError(t, inTx(db, nil, func(tx *sql.Tx) error {
		if _, err := s.ApplyIn(t.Context(), tx, []sink.Row{live("held", 3)}); err != nil {
			return err
		}
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		defer cancel()
		n, err := s.Purge(ctx, time.Microsecond)
		require.Equal(t, 1, n)
		return err
	}))
	requireRow(t, s, live("held", 3))
}
