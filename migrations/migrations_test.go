package migrations

import (
	"context"
	"database/sql"
	"io/fs"
	"path/filepath"
	"strings"
	"testing"
	"testing/fstest"
	"time"

	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
)

// A place is a new database of one kind.
type place struct {
	d      dialect.Dialect
	driver string
	dsn    string
}

func (p place) open(t testing.TB) *sql.DB {
	t.Helper()
	db, err := sql.Open(p.driver, p.dsn)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return db
}

// onEach runs f on a new database of each kind; under -short not on Postgres.
func onEach(t *testing.T, f func(t *testing.T, p place)) {
	t.Run("sqlite", func(t *testing.T) { f(t, onSQLite(t)) })
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) { f(t, onPostgres(t)) })
	}
}

func onSQLite(t testing.TB) place {
	return place{dialect.SQLite(), "sqlite", dialect.SQLiteDSN(filepath.Join(t.TempDir(), "outbox.db"))}
}

func onPostgres(t testing.TB) place {
	return place{dialect.Postgres(), "pgx", pgtest.DSN(t)}
}

// objects lists all that a database holds apart from what is always there.
func objects(t testing.TB, p place, db *sql.DB) []string {
	t.Helper()
	query := `SELECT type || ' ' || name FROM sqlite_master ORDER BY 1`
	if p.d.Name() == "postgres" {
		query = `
			SELECT 'schema ' || nspname FROM pg_namespace WHERE nspname !~ '^pg_' AND nspname NOT IN ('public', 'information_schema')
			UNION ALL SELECT 'relation ' || c.oid::regclass FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
				WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
			UNION ALL SELECT 'function ' || f.oid::regprocedure FROM pg_proc AS f JOIN pg_namespace AS n ON n.oid = f.pronamespace
				WHERE n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
			ORDER BY 1`
	}
	rows, err := db.Query(query)
	require.NoError(t, err)
	defer rows.Close()
	var list []string
	for rows.Next() {
		var s string
		require.NoError(t, rows.Scan(&s))
		list = append(list, s)
	}
	require.NoError(t, rows.Err())
	return list
}

// installed asserts that all steps were applied, once each.
func installed(t testing.TB, p place, db *sql.DB) {
	t.Helper()
	steps, err := Status(t.Context(), db, p.d)
	require.NoError(t, err)
	require.Len(t, steps, dialect.SchemaVersion)
	for i, s := range steps {
		require.Equal(t, int64(i+1), s.Version)
		require.True(t, s.Applied)
		require.Less(t, time.Since(s.AppliedAt).Abs(), time.Hour)
	}
	rows, err := db.Query(p.d.Render(`SELECT version_id FROM {t:migrations} ORDER BY id`))
	require.NoError(t, err)
	defer rows.Close()
	for want := range dialect.SchemaVersion + 1 {
		var got int
		require.True(t, rows.Next())
		require.NoError(t, rows.Scan(&got))
		require.Equal(t, want, got)
	}
	require.False(t, rows.Next())
	var version, compatible int
	require.NoError(t, db.QueryRow(p.d.Render(`SELECT version, compatible FROM {t:meta}`)).Scan(&version, &compatible))
	require.Equal(t, dialect.SchemaVersion, version)
	require.LessOrEqual(t, compatible, version)
}

func stage(t testing.TB, p place, db *sql.DB) {
	t.Helper()
	_, err := db.Exec(p.d.Render(`
		INSERT INTO {t:entries} (version, token, due, staged_at, tombstone, channel, key, payload)
		VALUES (1, 0, 1, 1, true, 'c', 'k', $1)`), []byte{})
	require.NoError(t, err)
}

func TestUpInstallsAndDownLeavesNothing(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		before := objects(t, p, db)
		require.NoError(t, Down(t.Context(), db, p.d, false), "nothing to do")
		for range 2 {
			steps, err := Status(t.Context(), db, p.d)
			require.NoError(t, err)
			require.Equal(t, Step{Version: 1, Name: "0001_latest.sql"}, steps[0])
			require.Equal(t, before, objects(t, p, db), "status only reads")

			require.NoError(t, Up(t.Context(), db, p.d))
			installed(t, p, db)
			all := objects(t, p, db)
			require.NoError(t, Up(t.Context(), db, p.d), "nothing to do")
			require.Equal(t, all, objects(t, p, db))
			stage(t, p, db)

			require.NoError(t, Down(t.Context(), db, p.d, true))
			require.Equal(t, before, objects(t, p, db))
		}
	})
}

func TestDownRefusesWhileRowsAreUndelivered(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		require.NoError(t, Up(t.Context(), db, p.d))
		stage(t, p, db)
		all := objects(t, p, db)

		err := Down(t.Context(), db, p.d, false)
		var undelivered *UndeliveredError
		require.ErrorAs(t, err, &undelivered)
		require.Equal(t, UndeliveredError{Table: p.d.Render(`{t:entries}`), Rows: 1}, *undelivered)
		require.EqualError(t, err, "migrate outbox down: table "+undelivered.Table+" holds 1 undelivered rows: "+
			"deliver them first, or say that they are to be dropped")
		require.Equal(t, all, objects(t, p, db))

		_, err = db.Exec(p.d.Render(`DELETE FROM {t:entries}`))
		require.NoError(t, err)
		require.NoError(t, Down(t.Context(), db, p.d, false))
	})
}

// Dead messages, and those of unknown fate, wait for somebody; sent ones are only kept.
func TestDownRefusesWhileMessagesAreUndelivered(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		require.NoError(t, Up(t.Context(), db, p.d))
		for _, outcome := range []int{0, 4, 5} {
			_, err := db.Exec(p.d.Render(`DELETE FROM {t:messages}`))
			require.NoError(t, err)
			_, err = db.Exec(p.d.Render(`
				INSERT INTO {t:messages} (seq, channel, key, due, created_at, payload, outcome) VALUES (1, 'c', 'k', 0, 0, $1, $2)`), []byte{}, outcome)
			require.NoError(t, err)
			var undelivered *UndeliveredError
			require.ErrorAs(t, Down(t.Context(), db, p.d, false), &undelivered, "outcome %d", outcome)
			require.Equal(t, UndeliveredError{Table: p.d.Render(`{t:messages}`), Rows: 1}, *undelivered)
		}
		_, err := db.Exec(p.d.Render(`UPDATE {t:messages} SET outcome = 1`))
		require.NoError(t, err)
		require.NoError(t, Down(t.Context(), db, p.d, false))
	})
}

func TestUpBringsAnEarlierSchemaUpToDate(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		in, err := open(db, p.d)
		require.NoError(t, err)
		earlier := &transaction{install: in, begun: in.prepare}
		require.NoError(t, in.run(t.Context(), earlier, func(ctx context.Context, g *goose.Provider) error {
			earlier.last = 1
			_, err := g.UpTo(ctx, 1)
			return err
		}))
		stage(t, p, db)
		require.NoError(t, Up(t.Context(), db, p.d))
		installed(t, p, db)
		var rows int
		require.NoError(t, db.QueryRow(p.d.Render(`SELECT count(*) FROM {t:entries}`)).Scan(&rows))
		require.Equal(t, 1, rows)
		var version, compatible int
		require.NoError(t, db.QueryRow(p.d.Installed().Text).Scan(&version, &compatible))
		require.Equal(t, []int{dialect.SchemaVersion, 1}, []int{version, compatible}, "replicas of the earlier release go on")
	})
}

func TestInstallsBySchemaAndPrefixAreApart(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		before := objects(t, p, db)
		a, b := p, p
		a.d, b.d = p.d.In("", "a_"), p.d.In("", "b_")
		require.NoError(t, Up(t.Context(), db, a.d))
		require.NoError(t, Up(t.Context(), db, b.d))
		stage(t, a, db)
		require.NoError(t, Down(t.Context(), db, b.d, false))
		installed(t, a, db)
		require.NoError(t, Down(t.Context(), db, a.d, true))
		require.Equal(t, before, objects(t, p, db))
	})
}

// Names that break tools which paste or split them (S53).
func TestOddNamesWork(t *testing.T) {
	prefixes := []string{
		"", "my-prefix", "User", "select", "o'brien", `a"b`, "a.b", "a$$b", "1x", "a b", "a;b", "a--b", "%d", "{schema}", `back\slash`, "ünï_",
		strings.Repeat("x", 40),
	}
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		before := objects(t, p, db)
		for _, prefix := range prefixes {
			q := p
			q.d = p.d.In("", prefix)
			require.NoError(t, Up(t.Context(), db, q.d), prefix)
			require.NoError(t, Up(t.Context(), db, q.d), prefix)
			installed(t, q, db)
			stage(t, q, db)
			require.Error(t, Down(t.Context(), db, q.d, false), prefix)
			require.NoError(t, Down(t.Context(), db, q.d, true), prefix)
			require.Equal(t, before, objects(t, p, db), prefix)
		}
	})
}

func TestBadNamesAreRefused(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		for _, d := range []dialect.Dialect{
			p.d.In(strings.Repeat("x", 64), ""), p.d.In("a\nb", ""), p.d.In("", "a\x00"), p.d.In("", "a\xff"),
			p.d.In("", strings.Repeat("x", 41)), {},
		} {
			before := objects(t, p, db)
			require.Error(t, Up(t.Context(), db, d))
			require.Error(t, Down(t.Context(), db, d, true))
			_, err := Status(t.Context(), db, d)
			require.Error(t, err)
			_, err = Files(d)
			require.Error(t, err)
			require.Equal(t, before, objects(t, p, db))
		}
		require.Error(t, Up(t.Context(), nil, p.d))
	})
}

// The lock and the steps of some tools take two connections (S49).
func TestOneConnectionIsEnough(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		db.SetMaxOpenConns(1)
		require.NoError(t, Up(t.Context(), db, p.d))
		installed(t, p, db)
		require.NoError(t, Down(t.Context(), db, p.d, false))
	})
}

func TestPoolThatIsUsedUpIsNamed(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		db.SetMaxOpenConns(1)
		conn, err := db.Conn(t.Context())
		require.NoError(t, err)
		defer conn.Close()
		in, err := open(db, p.d)
		require.NoError(t, err)
		in.wait = 10 * time.Millisecond
		require.ErrorContains(t, in.up(t.Context()), "SetMaxOpenConns allows 1")
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.ErrorIs(t, Up(ctx, db, p.d), context.Canceled)
	})
}

// withStep returns an install with one more step than there is.
func withStep(t testing.TB, p place, db *sql.DB, text string) *install {
	t.Helper()
	in, err := open(db, p.d)
	require.NoError(t, err)
	files := fstest.MapFS{"0099_next.sql": {Data: []byte("-- +goose Up\n-- +goose StatementBegin\n" + text + "\n-- +goose StatementEnd\n-- +goose Down\n")}}
	names, err := fs.Glob(in.files, "*.sql")
	require.NoError(t, err)
	for _, name := range names {
		data, err := fs.ReadFile(in.files, name)
		require.NoError(t, err)
		files[name] = &fstest.MapFile{Data: data}
	}
	in.files = files
	return in
}

func TestFailedStepLeavesEverythingAsItWas(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		p.d = p.d.In(map[string]string{"postgres": "made", "sqlite": "main"}[p.d.Name()], "o_")
		db := p.open(t)
		err := withStep(t, p, db, `INSERT INTO nowhere VALUES (1)`).up(t.Context())
		require.ErrorContains(t, err, "run 0099_next.sql (up): ")
		require.NotContains(t, err.Error(), "partial")
		require.NotEqual(t, dialect.FaultOther, p.d.Classify(err), "the driver's error stays reachable")
		require.Empty(t, objects(t, p, db))
		require.NoError(t, Up(t.Context(), db, p.d))
	})
}

func TestCancelledStepLeavesEverythingAsItWas(t *testing.T) {
	endless := map[string]string{
		"postgres": `SELECT pg_sleep(600)`,
		"sqlite": `CREATE TABLE endless AS
			WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT max(i) FROM n`,
	}
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		for _, pool := range []int{0, 1} {
			db.SetMaxOpenConns(pool)
			ctx, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
			defer cancel()
			err := withStep(t, p, db, endless[p.d.Name()]).up(ctx)
			require.Error(t, err)
			require.Error(t, ctx.Err())
			require.Empty(t, objects(t, p, db))
			// The connection came back clean, or not at all.
			_, err = db.Exec(`CREATE TABLE mine (n int)`)
			require.NoError(t, err)
			require.Len(t, objects(t, p, p.open(t)), 1, "outside any transaction")
			_, err = db.Exec(`DROP TABLE mine`)
			require.NoError(t, err)
		}
		require.NoError(t, Up(t.Context(), db, p.d))
	})
}

func TestStepOnTopOfAnInstalledSchemaIsApplied(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		require.NoError(t, Up(t.Context(), db, p.d))
		_, err := db.Exec(p.d.Render(`UPDATE {t:meta} SET version = 0`)) // as an older release would have left it
		require.NoError(t, err)
		in := withStep(t, p, db, p.d.Render(`UPDATE {t:meta} SET version = 99`))
		require.NoError(t, in.up(t.Context()))

		// This release meets a newer one's schema that still serves it.
		require.NoError(t, Up(t.Context(), db, p.d))
		steps, err := Status(t.Context(), db, p.d)
		require.NoError(t, err)
		last := steps[len(steps)-1]
		require.Equal(t, Step{Version: 99, Applied: true, AppliedAt: last.AppliedAt}, last)
		require.ErrorIs(t, Down(t.Context(), db, p.d, true), ErrSchema, "it does not know how")

		_, err = db.Exec(p.d.Render(`UPDATE {t:meta} SET compatible = 99`))
		require.NoError(t, err)
		err = Up(t.Context(), db, p.d)
		require.ErrorIs(t, err, ErrSchema)
		require.ErrorContains(t, err, "is at version 99 and needs a library of version 99")
	})
}
