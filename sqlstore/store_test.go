package sqlstore_test

import (
	"context"
	"database/sql"
	"errors"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// on runs a test on a store of each database.
func on(t *testing.T, test func(t *testing.T, s *sqlstore.Store, db *sql.DB)) {
	t.Run("sqlite", func(t *testing.T) {
		s, db := opener(dialect.SQLite(), "sqlite", sqliteFile, nil)(t)
		test(t, s, db)
	})
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) {
			s, db := opener(dialect.Postgres(), "pgx", pgDSN, nil)(t)
			test(t, s, db)
		})
	}
}

func TestTransactWakesRelaysOnceCommitted(t *testing.T) {
	on(t, func(t *testing.T, s *sqlstore.Store, db *sql.DB) {
		woken := 0
		stop := s.Hints(func(h outbox.Hint) {
			if h == (outbox.Hint{}) {
				woken++
			}
		})
		defer stop()
		failed := errors.New("refused")
		require.ErrorIs(t, s.Transact(t.Context(), nil, func(*sql.Tx) error { return failed }), failed)
		require.Panics(t, func() { _ = s.Transact(t.Context(), nil, func(*sql.Tx) error { panic("bug") }) })
		require.Zero(t, woken)
		require.NoError(t, s.Transact(t.Context(), nil, func(*sql.Tx) error { return nil }))
		require.Equal(t, 1, woken)
		require.Zero(t, db.Stats().InUse, "connections are given back")
	})
}

// TestG8RefusedCommitIsNoUnknownCommit: a transaction that an ignored error has
// aborted is rolled back for certain; so is one whose context had ended.
func TestG8RefusedCommitIsNoUnknownCommit(t *testing.T) {
	on(t, func(t *testing.T, s *sqlstore.Store, db *sql.DB) {
		if !sqlite(db) {
			err := s.Transact(t.Context(), nil, func(tx *sql.Tx) error {
				_, _ = tx.Exec(`SELECT * FROM nothing_of_the_kind`)
				return nil
			})
			require.Error(t, err)
			require.NotErrorIs(t, err, outbox.ErrCommit)
		}
		ctx, cancel := context.WithCancel(t.Context())
		err := s.Transact(ctx, nil, func(*sql.Tx) error { cancel(); return nil })
		require.ErrorIs(t, err, context.Canceled)
		require.NotErrorIs(t, err, outbox.ErrCommit)
	})
}

// TestG8LostCommitIsUnknown: the server ends the session instead of answering.
func TestG8LostCommitIsUnknown(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves Postgres out")
	}
	open, db := opener(dialect.Postgres(), "pgx", pgDSN, nil)(t)
	s := open
	_, err := db.Exec(`
		CREATE TABLE slow (id int PRIMARY KEY);
		CREATE FUNCTION die() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM pg_terminate_backend(pg_backend_pid()); RETURN NULL; END';
		CREATE CONSTRAINT TRIGGER dies AFTER INSERT ON slow DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION die()`)
	require.NoError(t, err)
	err = s.Transact(t.Context(), nil, func(tx *sql.Tx) error {
		_, err := tx.Exec(`INSERT INTO slow VALUES (1)`)
		return err
	})
	require.ErrorIs(t, err, outbox.ErrCommit)
	require.False(t, s.Retryable(err))
}

func TestNewRefusesWhatCannotWork(t *testing.T) {
	_, err := sqlstore.New(nil, dialect.SQLite(), sqlstore.Options{})
	require.ErrorIs(t, err, outbox.ErrInvalid)
	db, err := sql.Open("sqlite", sqliteFile(t))
	require.NoError(t, err)
	defer db.Close()
	for _, d := range []dialect.Dialect{{}, dialect.SQLite().In("a\nb", ""), dialect.Postgres().In("", string(make([]byte, 10)))} {
		_, err := sqlstore.New(db, d, sqlstore.Options{})
		require.ErrorIs(t, err, outbox.ErrInvalid)
	}
}
