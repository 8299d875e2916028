package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// status is the output of migrate status --json.
type status struct {
	Needed int        `json:"needed"`
	Steps  []jsonStep `json:"steps"`
}

func TestMigrateInstallsAndRemoves(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		out := ok(t, "migrate", "up", "--dsn", dsn)
		require.Contains(t, out, "applied 0001_latest.sql\napplied 0002_journal.sql\nthe outbox is installed in ")
		require.Contains(t, ok(t, "migrate", "up", "--dsn", dsn), "nothing to do\n")
		var s status
		okJSON(t, &s, "migrate", "status", "--dsn", dsn)
		require.Equal(t, dialect.SchemaVersion, s.Needed)
		require.Len(t, s.Steps, dialect.SchemaVersion)
		for _, step := range s.Steps {
			require.True(t, step.Applied)
			require.NotNil(t, step.AppliedAt)
		}
		require.Contains(t, ok(t, "migrate", "status", "--dsn", dsn), "0001_latest.sql    applied 2")

		require.Contains(t, ok(t, "migrate", "down", "--dsn", dsn), "tables are removed")
		require.Contains(t, ok(t, "migrate", "down", "--dsn", dsn), "nothing to do: no outbox is installed")
		okJSON(t, &s, "migrate", "status", "--dsn", dsn)
		require.False(t, s.Steps[0].Applied)
		require.Nil(t, s.Steps[0].AppliedAt)
		require.Contains(t, ok(t, "migrate", "status", "--dsn", dsn), "pending: run outbox migrate up")
	})
}

func TestMigrateDownRefusesToLoseEntries(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		s := open(t, dsn)
		stage(t, s, "orders", 0, "a", "b")
		r := call(t, "migrate", "down", "--dsn", dsn)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, "holds 2 undelivered rows")
		require.Contains(t, r.stderr, "--drop-undelivered removes them")
		require.Empty(t, r.stdout)
		require.Regexp(t, `(?m)^orders +latest +2 `, ok(t, "stats", "--dsn", dsn))
		ok(t, "migrate", "down", "--drop-undelivered", "--yes", "--dsn", dsn)
	})
}

func TestMigrateDownRefusesToLoseMessages(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		put(t, openMails(t, dsn, "mails"), outbox.Message{Key: "a"})
		r := call(t, "migrate", "down", "--dsn", dsn)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, "holds 1 undelivered rows")
		r = call(t, "migrate", "down", "--drop-undelivered", "--dsn", dsn)
		require.Equal(t, exitUsage, r.code)
		require.Contains(t, r.stderr, "with all that waits to be published or sent")
		require.Contains(t, ok(t, "list", "--channel", "mails", "--dsn", dsn), "\na ")
		ok(t, "migrate", "down", "--drop-undelivered", "--yes", "--dsn", dsn)
	})
}

func TestMigrateDownAsksAPerson(t *testing.T) {
	db := filepath.Join(t.TempDir(), "app.db")
	for _, answer := range []string{"", "\n", "n\n", "yess\n"} {
		ok(t, "migrate", "up", "--dsn", db)
		r := app{asks: true, stdin: strings.NewReader(answer)}.call(t, "migrate", "down", "--dsn", db)
		require.Equal(t, exitFailed, r.code, "%q", answer)
		require.Contains(t, r.stderr, "Really remove the outbox's tables from SQLite file "+db)
		require.Contains(t, r.stderr, "nothing was changed: not confirmed")
		require.Contains(t, ok(t, "migrate", "status", "--dsn", db), "applied")
	}
	for _, c := range []struct {
		answer string
		args   []string
	}{
		{"y\n", nil},
		{" Yes", nil},
		{"", []string{"--yes"}},
		{"y\n", []string{"--drop-undelivered"}},
	} {
		ok(t, "migrate", "up", "--dsn", db)
		r := app{asks: true, stdin: strings.NewReader(c.answer)}.call(t, append([]string{"migrate", "down", "--dsn", db}, c.args...)...)
		require.Equal(t, exitOK, r.code, r.stderr)
		require.Equal(t, c.answer == "", r.stderr == "", r.stderr)
	}
}

// What migrate sql prints installs and removes the same as migrate up does.
func TestMigrateSQLServesOtherTools(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		names := []string{"--dsn", dsn, "--prefix", "my_"}
		up := ok(t, append(names, "migrate", "sql")...)
		down := ok(t, append(names, "migrate", "sql", "--down")...)
		require.NotContains(t, up+down, "+goose")
		require.NotContains(t, up, "DROP TABLE")
		if _, err := os.Stat(dsn); err != nil && !strings.Contains(dsn, "://") {
			require.NoError(t, os.WriteFile(dsn, nil, 0o600)) // nothing has opened the file
		}
		s := open(t, dsn)
		_, err := s.db.Exec(up)
		require.NoError(t, err)
		ok(t, append(names, "doctor")...)
		require.Contains(t, ok(t, append(names, "migrate", "status")...), "applied by another tool")
		require.Contains(t, ok(t, append(names, "migrate", "up")...), "nothing to do")
		r := call(t, append(names, "migrate", "down")...)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, "not installed by this package")
		_, err = s.db.Exec(down)
		require.NoError(t, err)
		require.Contains(t, ok(t, append(names, "migrate", "status")...), "pending")
	})
}

func TestMigrateSQLWritesFiles(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "db", "migrations") // neither exists
	args := []string{"migrate", "sql", "--dialect", "postgres", "--schema", "app", "--dir", dir}
	out := ok(t, args...)
	require.True(t, strings.HasPrefix(out, "wrote "+filepath.Join(dir, "0001_latest.up.sql")+"\nwrote "+filepath.Join(dir, "0001_latest.down.sql")+"\n"), out)
	up, err := os.ReadFile(filepath.Join(dir, "0001_latest.up.sql"))
	require.NoError(t, err)
	require.Contains(t, string(up), `CREATE TABLE "app"."outbox_entries"`)
	r := call(t, args...)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, "file exists")

	ok(t, append(args, "--goose")...)
	both, err := os.ReadFile(filepath.Join(dir, "0001_latest.sql"))
	require.NoError(t, err)
	require.Contains(t, string(both), "-- +goose Down")
	require.Contains(t, ok(t, "migrate", "sql", "--goose", "--dialect", "postgres", "--schema", "app"), "-- 0001_latest.sql\n"+string(both))
	require.Equal(t, exitUsage, call(t, append(args, "--down")...).code)
}
