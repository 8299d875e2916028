package dialect_test

import (
	"database/sql"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

func TestSQLiteDSNOpensThatVeryFile(t *testing.T) {
	for _, name := range []string{"plain.db", "with space.db", "100%.db", "what?.db", "hash#.db", "a&b=c.db", "ünïcode.db", "it's.db", "%41.db", "plus+.db"} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), name)
			db, err := sql.Open("sqlite", dialect.SQLiteDSN(path))
			require.NoError(t, err)
			defer db.Close()
			var mode string
			require.NoError(t, db.QueryRow(`PRAGMA journal_mode`).Scan(&mode))
			require.Equal(t, "wal", mode)
			_, err = db.Exec(`CREATE TABLE t (x)`)
			require.NoError(t, err)
			require.FileExists(t, path)
			entries, err := os.ReadDir(filepath.Dir(path))
			require.NoError(t, err)
			for _, e := range entries {
				require.True(t, strings.HasPrefix(e.Name(), name), e.Name())
			}
		})
	}
}

func TestSQLiteDSNTakesNoFolderForAHost(t *testing.T) {
	path := filepath.Join(t.TempDir(), "app.db")
	db, err := sql.Open("sqlite", dialect.SQLiteDSN("//"+path))
	require.NoError(t, err)
	defer db.Close()
	_, err = db.Exec(`CREATE TABLE t (x)`)
	require.NoError(t, err)
	require.FileExists(t, path)
}

func TestSQLiteDSNTakesRelativePaths(t *testing.T) {
	t.Chdir(t.TempDir())
	db, err := sql.Open("sqlite", dialect.SQLiteDSN("app.db"))
	require.NoError(t, err)
	defer db.Close()
	_, err = db.Exec(`CREATE TABLE t (x)`)
	require.NoError(t, err)
	require.FileExists(t, "app.db")
}

func TestRenderQuotesNamesForWhereTheyStand(t *testing.T) {
	d := dialect.Postgres().In(`o'b"x`, `a.b$_`)
	require.NoError(t, d.Validate())
	require.Equal(t, `"o'b""x" "o'b""x"."a.b$_entries" "a.b$_entries" '"o''b""x"."a.b$_seq"'`,
		d.Render(`{schema} {t:entries} {i:entries} {s:seq}`))
	require.Equal(t, `'{"a":1}' {x:y}`, d.Render(`'{"a":1}' {x:y}`), "what is no placeholder stays")
	require.NotEqual(t, d.Render(`{t:entries}`), d.In("", "other_").Render(`{t:entries}`))
}

func TestImpossibleNamesAreRefused(t *testing.T) {
	for _, d := range []dialect.Dialect{
		{},
		dialect.Postgres().In("a\nb", ""),
		dialect.Postgres().In("a\x00b", ""),
		dialect.Postgres().In("\xff", ""),
		dialect.Postgres().In(strings.Repeat("x", 64), ""),
		dialect.Postgres().In("", strings.Repeat("x", 41)),
		dialect.Postgres().In("x$outbox$", ""),
	} {
		require.Error(t, d.Validate())
	}
	for _, d := range []dialect.Dialect{
		dialect.Postgres(), dialect.SQLite(), dialect.Postgres().In(strings.Repeat("x", 63), strings.Repeat("x", 40)), dialect.SQLite().In("", ""),
	} {
		require.NoError(t, d.Validate())
	}
}
