package sink_test

import (
	"database/sql"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

func TestRowsThatBreakARuleAreNamedAndTheOthersWritten(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		rows := []sink.Row{live("a", 1), live("", 1), live("b", 0), live("c\x00", 1), live("d\xff", 1), live("e", -5), live("f", 1)}

		tx, err := db.Begin()
		require.NoError(t, err)
		result, err := s.ApplyIn(t.Context(), tx, rows)
		require.Zero(t, result)
		var refused *sink.RowsError
		require.ErrorAs(t, err, &refused)
		require.Len(t, refused.Rows, 5)
		require.NoError(t, tx.Commit())
		_, err = s.Get(t.Context(), "a")
		require.ErrorIs(t, err, sink.ErrNotFound, "ApplyIn writes nothing")

		result, err = s.Apply(t.Context(), rows)
		require.Equal(t, sink.Result{Applied: 2}, result)
		require.ErrorAs(t, err, &refused)
		require.ErrorIs(t, err, sink.ErrInvalid)
		require.Equal(t, 1, refused.Rows[0].Index)
		require.Equal(t, 5, refused.Rows[4].Index)
		requireRow(t, s, live("f", 1))
	})
}

func TestTableThatDoesNotFitIsToldWithItsRemedy(t *testing.T) {
	timestamp := map[string]string{"postgres": "timestamptz", "sqlite": "INTEGER"}
	bytes := map[string]string{"postgres": "bytea", "sqlite": "BLOB"}
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		when, value := timestamp[d.Name()], bytes[d.Name()]
		for _, c := range []struct{ what, table string }{
			{"missing", ``},
			{"no version", `CREATE TABLE projections (key text PRIMARY KEY, value ` + value + `, deleted_at ` + when + `, updated_at ` + when + `)`},
			{"no unique index", `CREATE TABLE projections (key text, version bigint, value ` + value + `, deleted_at ` + when + `, updated_at ` + when + `)`},
		} {
			t.Run(c.what, func(t *testing.T) {
				_, err := db.Exec(c.table)
				require.NoError(t, err)
				s, err := sink.New(db, d, sink.Options{Table: "projections"})
				require.NoError(t, err)
				requireUnfit(t, s.Check(t.Context()))
				_, err = s.Apply(t.Context(), []sink.Row{live("a", 1), live("b", 1)})
				requireUnfit(t, err)
				_, err = db.Exec(`DROP TABLE IF EXISTS projections`)
				require.NoError(t, err)
			})
		}
	})
}

func requireUnfit(t *testing.T, err error) {
	t.Helper()
	require.ErrorIs(t, err, sink.ErrTable)
	require.ErrorContains(t, err, `"projections"`)
}

func TestWrongTypeAndMissingGrantAreTold(t *testing.T) {
	if testing.Short() {
		return
	}
	db := openPostgres(t, pgx.QueryExecModeCacheStatement)
	_, err := db.Exec(`CREATE TABLE projections (key text PRIMARY KEY, version bigint, value bytea, deleted_at boolean, updated_at timestamptz)`)
	require.NoError(t, err)
	s, err := sink.New(db, dialect.Postgres(), sink.Options{Table: "projections"})
	require.NoError(t, err)
	requireUnfit(t, s.Check(t.Context()))

	_, err = db.Exec(`DROP TABLE projections`)
	require.NoError(t, err)
	require.NoError(t, s.Create(t.Context()))
	db.SetMaxOpenConns(1)
	_, err = db.Exec(`SET ROLE pg_monitor`) // a role that may do nothing here
	require.NoError(t, err)
	require.NoError(t, s.Create(t.Context()), "what exists needs no right to create")
	requireUnfit(t, s.Check(t.Context()))
	_, err = db.Exec(`SET ROLE none`)
	require.NoError(t, err)
	require.NoError(t, s.Check(t.Context()))
}

func TestGetOfAnUnknownKeyIsNotFound(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		_, err := newSink(t, db, d, sink.Options{}).Get(t.Context(), "nobody")
		require.ErrorIs(t, err, sink.ErrNotFound)
		require.ErrorContains(t, err, `"nobody"`)
	})
}
