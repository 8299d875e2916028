package integration

import (
	"context"
	"database/sql"
	"path/filepath"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// bare is a site without an outbox.
func bare(t *testing.T, d dialect.Dialect) *site {
	s := &site{t: t, dialect: d, driver: "sqlite", dsn: dialect.SQLiteDSN(filepath.Join(t.TempDir(), "bare.db"))}
	if s.postgres() {
		s.driver, s.dsn = "pgx", pgtest.DSN(t)
	}
	s.db = s.open()
	s.exec(`CREATE TABLE app (id text PRIMARY KEY, note text NOT NULL)`)
	s.store = s.newStore(sqlstore.Options{})
	return s
}

func onBothBare(t *testing.T, test func(t *testing.T, s *site)) {
	t.Run("sqlite", func(t *testing.T) { test(t, bare(t, dialect.SQLite())) })
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) { test(t, bare(t, dialect.Postgres())) })
	}
}

// refusesSchema makes sure that Check and Run say ErrSchema.
func refusesSchema(t *testing.T, s *site) {
	t.Helper()
	require.ErrorIs(t, s.store.Check(t.Context()), outbox.ErrSchema)
	require.ErrorContains(t, s.store.Check(t.Context()), s.dialect.Prefix())
	r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, s.latest("orders").Publisher(failing, outbox.PublishOptions{}))
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
	defer cancel()
	require.ErrorIs(t, r.Run(ctx), outbox.ErrSchema)
	require.NoError(t, ctx.Err(), "Run did not say so at its start")
}

// stagingRefusesSchema makes sure that staging says ErrSchema. On SQLite the
// caller's transaction goes on; on Postgres it is lost.
func stagingRefusesSchema(t *testing.T, s *site) {
	t.Helper()
	for range 2 { // the second time, something may have been remembered
		for _, items := range [][]outbox.Item[string]{{{Key: "k"}}, {{Key: "k"}, {Key: "l"}}} {
			tx := s.begin()
			_, err := s.latest("orders").StageMany(t.Context(), tx, items)
			require.ErrorIs(t, err, outbox.ErrSchema)
			_, err = tx.Exec(`INSERT INTO app VALUES ('after', 'note')`)
			if s.postgres() {
				require.Error(t, err)
				_, err = s.latest("orders").StageMany(t.Context(), tx, items)
				require.ErrorIs(t, err, outbox.ErrTx)
			} else {
				require.NoError(t, err)
			}
			require.NoError(t, tx.Rollback())
		}
	}
}

func TestG10MissingSchemaIsTold(t *testing.T) {
	onBothBare(t, func(t *testing.T, s *site) {
		refusesSchema(t, s)
		stagingRefusesSchema(t, s)
		_, err := s.latest("orders").Pending(t.Context(), nil, "k")
		require.ErrorIs(t, err, outbox.ErrSchema)
		_, err = s.store.Stats(t.Context())
		require.ErrorIs(t, err, outbox.ErrSchema)

		install(t, s.db, s.dialect) // and then it works, without a restart
		require.NoError(t, s.store.Check(t.Context()))
		s.stage(s.latest("orders"), "k", "value")
	})
}

// TestG10SchemaThatIsRemovedIsTold: also after statements were prepared.
func TestG10SchemaThatIsRemovedIsTold(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		var err error
		s.store, err = sqlstore.New(s.db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		require.NoError(t, s.store.Check(t.Context()))
		s.stage(s.latest("orders"), "k", "value")
		uninstall(t, s.db, s.dialect)
		refusesSchema(t, s)
		stagingRefusesSchema(t, s)
		install(t, s.db, s.dialect)
		s.stage(s.latest("orders"), "k", "value")
	})
}

// TestG10SchemaOfAnotherReleaseIsTold: older, newer, and newer but compatible.
func TestG10SchemaOfAnotherReleaseIsTold(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		set := func(version, compatible int) {
			s.exec(s.dialect.Render(`UPDATE {t:meta} SET version = $1, compatible = $2`), version, compatible)
		}
		const ours = dialect.SchemaVersion
		set(ours-1, ours-1)
		refusesSchema(t, s)
		require.ErrorContains(t, s.store.Check(t.Context()), "run the migrations")
		set(ours+3, ours+1)
		refusesSchema(t, s)
		require.ErrorContains(t, s.store.Check(t.Context()), "upgrade the library")
		s.exec(s.dialect.Render(`DELETE FROM {t:meta}`))
		refusesSchema(t, s)
		s.exec(s.dialect.Render(`INSERT INTO {t:meta} (version, compatible) VALUES ($1, $2)`), ours+3, ours)
		require.NoError(t, s.store.Check(t.Context()), "newer, but made for us too")

		// What such a release removed is missed when staging.
		set(ours+3, ours+1)
		s.exec(s.dialect.Render(`ALTER TABLE {t:entries} RENAME COLUMN staged_at TO staged`))
		stagingRefusesSchema(t, s)
	})
}

// TestG10ForeignTablesAreTold: another program's tables of the same names.
func TestG10ForeignTablesAreTold(t *testing.T) {
	onBothBare(t, func(t *testing.T, s *site) {
		s.exec(s.dialect.Render(`CREATE TABLE {t:entries} (id text, body text)`))
		refusesSchema(t, s)
		stagingRefusesSchema(t, s)
		s.exec(s.dialect.Render(`CREATE TABLE {t:meta} (name text, value text)`))
		s.exec(s.dialect.Render(`INSERT INTO {t:meta} VALUES ('version', '7')`))
		refusesSchema(t, s)
		stagingRefusesSchema(t, s)
		require.Zero(t, s.count(`SELECT count(*) FROM {t:entries}`))
	})
}

// TestG10ForeignTablesWithAVersionColumnAreTold: a meta table that looks like
// ours and is not.
func TestG10ForeignTablesWithAVersionColumnAreTold(t *testing.T) {
	onBothBare(t, func(t *testing.T, s *site) {
		s.exec(s.dialect.Render(`CREATE TABLE {t:meta} (version text, compatible text)`))
		s.exec(s.dialect.Render(`INSERT INTO {t:meta} VALUES ('1.4.0', 'yes')`))
		refusesSchema(t, s)
		stagingRefusesSchema(t, s)
	})
}

// TestG10TransactionOfADatabaseWithoutOutboxIsErrSchema: the store's own
// database has one.
func TestG10TransactionOfADatabaseWithoutOutboxIsErrSchema(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		other := bare(t, s.dialect)
		for range 2 {
			tx := other.begin()
			_, err := s.latest("orders").Stage(t.Context(), tx, "k", "value")
			require.ErrorIs(t, err, outbox.ErrSchema)
			require.NoError(t, tx.Rollback())
			tx = other.begin()
			_, err = s.latest("orders").Pending(t.Context(), outbox.SQL(tx), "k")
			require.ErrorIs(t, err, outbox.ErrSchema)
			require.NoError(t, tx.Rollback())
		}
		require.True(t, s.empty())
	})
}

// TestG10MissingSchemaIsToldWithAPoolOfOne: the caller's transaction has the
// only connection, so nothing else may ask for one.
func TestG10MissingSchemaIsToldWithAPoolOfOne(t *testing.T) {
	onBothBare(t, func(t *testing.T, s *site) {
		s.db.SetMaxOpenConns(1)
		var err error
		s.store, err = sqlstore.New(s.db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		done := make(chan error, 1)
		var tx *sql.Tx = s.begin()
		go func() {
			_, err := s.latest("orders").Stage(context.Background(), tx, "k", "value")
			done <- err
		}()
		select {
		case err := <-done:
			require.ErrorIs(t, err, outbox.ErrSchema)
		case <-time.After(10 * time.Second):
			t.Error("Stage waits for a second connection")
		}
		require.NoError(t, tx.Rollback())
	})
}
