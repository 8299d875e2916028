package migrations

import (
	"context"
	"database/sql"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

func TestAttachedFileIsASchema(t *testing.T) {
	p := onSQLite(t)
	db := p.open(t)
	db.SetMaxOpenConns(1) // a file is attached to one connection
	for _, schema := range []string{"box", "my-schema", "select", "o'brien", `a"b`, "a.b"} {
		ident := p.d.Ident(schema)
		_, err := db.Exec(`ATTACH ? AS `+ident, filepath.Join(t.TempDir(), "attached.db"))
		require.NoError(t, err)
		q := p
		q.d = p.d.In(schema, "o_")
		require.NoError(t, Up(t.Context(), db, q.d), schema)
		installed(t, q, db)
		stage(t, q, db)
		require.Empty(t, objects(t, p, db), "nothing is in main")
		require.Error(t, Down(t.Context(), db, q.d, false))
		require.NoError(t, Down(t.Context(), db, q.d, true))
		var left int
		require.NoError(t, db.QueryRow(`SELECT count(*) FROM `+ident+`.sqlite_master`).Scan(&left))
		require.Zero(t, left)
		_, err = db.Exec(`DETACH ` + ident)
		require.NoError(t, err)
	}
}

func TestDatabaseInMemoryWorks(t *testing.T) {
	p := place{dialect.SQLite(), "sqlite", ":memory:"}
	db := p.open(t)
	db.SetMaxOpenConns(1)
	require.NoError(t, Up(t.Context(), db, p.d))
	installed(t, p, db)
	require.NoError(t, Down(t.Context(), db, p.d, false))
	require.Empty(t, objects(t, p, db))
}

func TestWaitForAnotherWriterIsBounded(t *testing.T) {
	p := onSQLite(t)
	p.dsn = strings.Replace(p.dsn, "busy_timeout(5000)", "busy_timeout(10)", 1)
	writer, db := p.open(t), p.open(t)
	tx, err := writer.Begin()
	require.NoError(t, err)
	in, err := open(db, p.d)
	require.NoError(t, err)
	in.wait = 200 * time.Millisecond
	require.ErrorContains(t, in.patiently(t.Context(), in.up), "others have been writing for 200ms")

	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	require.ErrorIs(t, Up(ctx, db, p.d), context.DeadlineExceeded)

	done := make(chan error)
	go func() { done <- Up(t.Context(), db, p.d) }()
	_, err = tx.Exec(`CREATE TABLE mine (n INTEGER)`)
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
	require.NoError(t, <-done)
	installed(t, p, db)
}

// Without WAL a commit waits for the readers.
func TestReaderInRollbackModeIsWaitedFor(t *testing.T) {
	p := onSQLite(t)
	p.dsn, _, _ = strings.Cut(p.dsn, "?")
	db, reader := p.open(t), p.open(t)
	_, err := reader.Exec(`CREATE TABLE mine (n INTEGER); INSERT INTO mine VALUES (1), (2)`)
	require.NoError(t, err)
	rows, err := reader.Query(`SELECT n FROM mine`)
	require.NoError(t, err)
	require.True(t, rows.Next())
	in, err := open(db, p.d)
	require.NoError(t, err)
	in.wait = 200 * time.Millisecond
	err = in.patiently(t.Context(), in.up)
	require.ErrorContains(t, err, "commit: ")
	require.NoError(t, rows.Close())
	require.Len(t, objects(t, p, db), 1)
	require.NoError(t, Up(t.Context(), db, p.d))
	installed(t, p, db)
}

func TestReadOnlyFileThatIsUpToDateIsFine(t *testing.T) {
	p := onSQLite(t)
	db := p.open(t)
	readOnly := func() *sql.DB {
		db, err := sql.Open("sqlite", strings.Replace(p.dsn, "?", "?mode=ro&", 1))
		require.NoError(t, err)
		t.Cleanup(func() { db.Close() })
		return db
	}
	require.NoError(t, db.Ping())
	_, err := db.Exec(`CREATE TABLE mine (n INTEGER)`)
	require.NoError(t, err)
	require.ErrorContains(t, Up(t.Context(), readOnly(), p.d), "the database takes no writes")
	require.NoError(t, Up(t.Context(), db, p.d))
	require.NoError(t, Up(t.Context(), readOnly(), p.d))
	installed(t, p, readOnly())
}

func TestFileThatIsNoDatabaseIsLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notes.txt")
	text := []byte(strings.Repeat("not a database\n", 100))
	require.NoError(t, os.WriteFile(path, text, 0o600))
	p := place{dialect.SQLite(), "sqlite", dialect.SQLiteDSN(path)}
	require.Error(t, Up(t.Context(), p.open(t), p.d))
	got, err := os.ReadFile(path)
	require.NoError(t, err)
	require.Equal(t, text, got)
}
