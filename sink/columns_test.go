package sink_test

import (
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

func accounts(d dialect.Dialect) sink.Options {
	o := sink.Options{Table: "accounts", Columns: []sink.Column{
		{Name: "name", Type: "text"},
		{Name: "balance", Type: "numeric(20,2)", Field: "Balance's"},
		{Name: "visits", Type: "bigint"},
		{Name: "vip", Type: "boolean"},
		{Name: "address", Type: "jsonb"},
	}}
	if d.Name() == "sqlite" {
		for i := range o.Columns {
			o.Columns[i].Type = ""
		}
	}
	return o
}

func document(key string, version int64, json string) sink.Row {
	return sink.Row{Key: key, Version: version, Payload: []byte(json)}
}

func requireColumns(t *testing.T, db *sql.DB, key, want string) {
	t.Helper()
	var have string
	err := db.QueryRow(`SELECT coalesce(cast(name AS text), '-') || '|' || coalesce(cast(balance AS text), '-') || '|' ||
		coalesce(cast(visits AS text), '-') || '|' || coalesce(cast(vip AS text), '-') || '|' ||
		coalesce(cast(address AS text), '-') || '|' || cast(version AS text) || '|' ||
		CASE WHEN deleted_at IS NULL THEN 'live' ELSE 'gone' END FROM accounts WHERE key = '` + key + `'`).Scan(&have)
	require.NoError(t, err)
	require.Equal(t, want, have)
}

func TestColumnsTakeTheMembersOfThePayload(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, accounts(d))
		yes, address := "true", `{"city": "Göteborg"}`
		if d.Name() == "sqlite" {
			yes, address = "1", `{"city":"Göteborg"}`
		}
		apply(t, s, 2, 0,
			document("a", 2, `{"name":"O'Brien \"x\"","Balance's":"1234567890123456.78","visits":9007199254740993,"vip":true,"address":{"city":"Göteborg"},"unknown":1}`),
			document("b", 3, ` {"name":null}`))
		requireColumns(t, db, "a", `O'Brien "x"|1234567890123456.78|9007199254740993|`+yes+`|`+address+`|2|live`)
		requireColumns(t, db, "b", `-|-|-|-|-|3|live`)

		apply(t, s, 0, 1, document("a", 1, `{"name":"older"}`))
		apply(t, s, 1, 0, gone("a", 4))
		requireColumns(t, db, "a", `-|-|-|-|-|4|gone`)
		requireRow(t, s, gone("a", 4))
		apply(t, s, 1, 0, document("a", 5, `{"name":"back"}`))
		requireColumns(t, db, "a", `back|-|-|-|-|5|live`)
	})
}

func TestOneRefusedValueDoesNotHoldUpItsBatch(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		o := accounts(d)
		s := newSink(t, db, d, o)
		bad := `{"name":"bad","visits":"SECRET"}`
		if d.Name() == "sqlite" {
			_, err := db.Exec(`CREATE UNIQUE INDEX one_vip ON accounts (vip)`)
			require.NoError(t, err)
			apply(t, s, 1, 0, document("vip", 1, `{"vip":"SECRET"}`))
			bad = `{"name":"bad","vip":"SECRET"}`
		}
		var rows []sink.Row
		for i := range 50 {
			rows = append(rows, document(fmt.Sprint("k", i), int64(i+1), fmt.Sprintf(`{"name":"n%d"}`, i)))
		}
		rows[17].Payload, rows[40].Payload, rows[3].Payload = []byte(bad), []byte(bad), []byte(`["SECRET"]`)

		result, err := s.Apply(t.Context(), rows)
		require.Equal(t, sink.Result{Applied: 47}, result)
		var refused *sink.RowsError
		require.ErrorAs(t, err, &refused)
		require.Len(t, refused.Rows, 3)
		require.Equal(t, []int{3, 17, 40}, []int{refused.Rows[0].Index, refused.Rows[1].Index, refused.Rows[2].Index})
		require.Equal(t, "k17", refused.Rows[1].Key)
		require.ErrorIs(t, &refused.Rows[0], sink.ErrInvalid)
		for i := range refused.Rows {
			require.NotContains(t, refused.Rows[i].Error(), "SECRET")
		}
		requireColumns(t, db, "k49", `n49|-|-|-|-|50|live`)

		// In a transaction the statement cannot be cut up, nor may its text tell.
		if err := inTx(db, nil, func(tx *sql.Tx) error {
			_, err := s.ApplyIn(t.Context(), tx, rows[17:18])
			return err
		}); true {
			require.Error(t, err)
			require.NotContains(t, err.Error(), "SECRET")
			require.False(t, errors.As(err, &refused))
		}
	})
}

func TestConstraintNamesTheRow(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		_, err := db.Exec(`CREATE TABLE accounts (key text PRIMARY KEY, version bigint, deleted_at ` +
			map[string]string{"postgres": "timestamptz", "sqlite": "INTEGER"}[d.Name()] +
			`, name text, CONSTRAINT named CHECK (name IS NOT NULL OR deleted_at IS NOT NULL))`)
		require.NoError(t, err)
		s := newSink(t, db, d, sink.Options{Table: "accounts", UpdatedAt: sink.NoColumn, Columns: []sink.Column{{Name: "name"}}})
		result, err := s.Apply(t.Context(), []sink.Row{document("a", 1, `{"name":"x"}`), document("b", 2, `{}`), gone("c", 3)})
		require.Equal(t, sink.Result{Applied: 2}, result)
		var refused *sink.RowsError
		require.ErrorAs(t, err, &refused)
		require.Len(t, refused.Rows, 1)
		require.Equal(t, 1, refused.Rows[0].Index)
		require.ErrorContains(t, err, "named")
	})
}

// A table that had rows before it had a version column has versions of NULL.
func TestNullVersionIsOlderThanAny(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		_, err := db.Exec(`CREATE TABLE projections (key text PRIMARY KEY)`)
		require.NoError(t, err)
		_, err = db.Exec(`INSERT INTO projections VALUES ('a')`)
		require.NoError(t, err)
		types := map[string][2]string{"postgres": {"timestamptz", "bytea"}, "sqlite": {"INTEGER", "BLOB"}}[d.Name()]
		for _, column := range []string{"version bigint", "deleted_at " + types[0], "updated_at " + types[0], "value " + types[1]} {
			_, err = db.Exec(`ALTER TABLE projections ADD COLUMN ` + column)
			require.NoError(t, err)
		}
		s := newSink(t, db, d, sink.Options{})
		requireRow(t, s, sink.Row{Key: "a"})
		apply(t, s, 1, 0, live("a", 1))
		requireRow(t, s, live("a", 1))
	})
}

func TestKeysOfOtherTypes(t *testing.T) {
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) {
			db := openPostgres(t, pgx.QueryExecModeCacheStatement)
			_, err := db.Exec(`CREATE TABLE things (id uuid PRIMARY KEY, v bigint, gone_at timestamptz, body bytea)`)
			require.NoError(t, err)
			testKeyType(t, newSink(t, db, dialect.Postgres(), sink.Options{
				Table: "things", Key: sink.Column{Name: "id", Type: "uuid"},
				Version: "v", DeletedAt: "gone_at", UpdatedAt: sink.NoColumn, Value: "body",
			}), "0b0e7f9c-6a0c-4f0e-9f61-6f0c7b7f1e11", "0b0e7f9c-6a0c-4f0e-9f61-6f0c7b7f1e12")
		})
	}
	t.Run("sqlite", func(t *testing.T) {
		testKeyType(t, newSink(t, openSQLite(t), dialect.SQLite(), sink.Options{
			Table: "things", Key: sink.Column{Name: "id", Type: "INTEGER"},
		}), "42", "7")
	})
}

func testKeyType(t *testing.T, s *sink.Sink, one, two string) {
	apply(t, s, 2, 0, live(one, 2), gone(two, 2))
	apply(t, s, 1, 1, live(one, 1), live(two, 3))
	requireRow(t, s, live(one, 2))
	requireRow(t, s, live(two, 3))
	_, err := s.Purge(t.Context(), 1)
	require.NoError(t, err)
}

// The statement that the package documentation gives for tables which Options
// cannot describe.
func TestDocumentedStatementGuardsATableWithTwoKeyColumns(t *testing.T) {
	if testing.Short() {
		return
	}
	db := openPostgres(t, pgx.QueryExecModeCacheStatement)
	_, err := db.Exec(`CREATE TABLE accounts (tenant bigint, id uuid, name text, version bigint, deleted_at timestamptz, PRIMARY KEY (tenant, id))`)
	require.NoError(t, err)
	for _, c := range []struct{ version, changed int64 }{{2, 1}, {1, 0}, {2, 0}, {3, 1}} {
		result, err := db.Exec(`
			INSERT INTO accounts AS have (tenant, id, name, version, deleted_at)
			SELECT * FROM unnest($1::bigint[], $2::uuid[], $3::text[], $4::bigint[], $5::timestamptz[])
			ON CONFLICT (tenant, id) DO UPDATE
			SET name = excluded.name, version = excluded.version, deleted_at = excluded.deleted_at
			WHERE coalesce(have.version, 0) < excluded.version`,
			[]int64{1}, []string{"0b0e7f9c-6a0c-4f0e-9f61-6f0c7b7f1e11"}, []string{"x"}, []int64{c.version}, []*time.Time{nil})
		require.NoError(t, err)
		changed, err := result.RowsAffected()
		require.NoError(t, err)
		require.Equal(t, c.changed, changed, "version %d", c.version)
	}
}
