package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// TestMain lets the demo start this binary as its relay process.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "demo-relay" {
		a := app{stdin: os.Stdin, stdout: os.Stdout, stderr: os.Stderr, env: func(string) string { return "" }}
		os.Exit(a.run(context.Background(), os.Args))
	}
	os.Exit(m.Run())
}

// result is what a command line came to.
type result struct {
	code           int
	stdout, stderr string
}

// call runs a command line in this process.
func call(t testing.TB, args ...string) result {
	t.Helper()
	return app{}.call(t, args...)
}

func (a app) call(t testing.TB, args ...string) result {
	t.Helper()
	var stdout, stderr bytes.Buffer
	a.stdout, a.stderr = &stdout, &stderr
	if a.stdin == nil {
		a.stdin = strings.NewReader("")
	}
	if a.env == nil {
		a.env = func(string) string { return "" }
	}
	code := a.run(t.Context(), append([]string{"outbox"}, args...))
	return result{code, stdout.String(), stderr.String()}
}

// ok runs a command line that must succeed and returns its output.
func ok(t testing.TB, args ...string) string {
	t.Helper()
	r := call(t, args...)
	require.Equal(t, exitOK, r.code, "%v\n%s%s", args, r.stdout, r.stderr)
	return r.stdout
}

// okJSON reads the output of a command line that must succeed.
func okJSON(t testing.TB, into any, args ...string) {
	t.Helper()
	d := json.NewDecoder(strings.NewReader(ok(t, append(args, "--json")...)))
	d.DisallowUnknownFields()
	require.NoError(t, d.Decode(into))
}

// onBoth runs a test with the DSN of an empty database of each kind.
func onBoth(t *testing.T, test func(t *testing.T, dsn string)) {
	t.Run("sqlite", func(t *testing.T) { test(t, filepath.Join(t.TempDir(), "app.db")) })
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) { test(t, pgtest.DSN(t)) })
	}
}

// open opens the database of a DSN as the program does.
func open(t testing.TB, dsn string) *session {
	t.Helper()
	target, err := parseDSN(dsn)
	require.NoError(t, err)
	s, err := target.connect(t.Context(), toOperate)
	require.NoError(t, err)
	t.Cleanup(func() { s.db.Close() })
	return s
}

// stage commits a value for each key.
func stage(t testing.TB, s *session, channel string, delay time.Duration, keys ...string) {
	t.Helper()
	l, err := outbox.NewLatest(s.store, outbox.LatestOptions[string]{Channel: channel, BatchDelay: delay})
	require.NoError(t, err)
	require.NoError(t, s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
		for _, key := range keys {
			if _, err := l.Stage(t.Context(), tx, key, "value"); err != nil {
				return err
			}
		}
		return nil
	}))
}

// asRole returns the DSN of the same Postgres database for another role.
func asRole(t testing.TB, dsn, role, password string) string {
	t.Helper()
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	u.User = url.UserPassword(role, password)
	return u.String()
}

func TestExitCodes(t *testing.T) {
	dir := t.TempDir()
	db := filepath.Join(dir, "app.db")
	ok(t, "migrate", "up", "--dsn", db)
	missing := filepath.Join(dir, "missing.db")
	notOne := filepath.Join(dir, "text.db")
	require.NoError(t, os.WriteFile(notOne, []byte(strings.Repeat("not a database ", 100)), 0o600))
	for _, c := range []struct {
		line string
		code int
		says string // on stderr
	}{
		{"stats --dsn DB", 0, ""},
		{"--dsn DB stats", 0, ""},
		{"version", 0, ""},
		{"--version", 0, ""},
		{"--version --dsn DB", 0, ""},
		{"", 0, ""},
		{"migrate", 0, ""},
		{"stats", 2, "no database: give --dsn, or set OUTBOX_DSN\nSee outbox stats --help."},
		{"stat", 2, `there is no command "stat"; did you mean "stats"?`},
		{"migrate dwn", 2, `migrate: there is no command "dwn"; did you mean "down"?` + "\nSee outbox migrate --help."},
		{"stats --dsn DB extra", 2, `stats: takes no argument, but was given "extra"`},
		{"stats --nonsense", 2, "stats: flag provided but not defined: -nonsense"},
		{"stats --dsn DB --watch -1s", 2, "stats: --watch is -1s"},
		{"stats --dsn DB --watch 0s", 2, "stats: --watch is 0s"},
		{"stats --dsn DB --schema other", 2, "SQLite has only the schema main"},
		{"stats --dsn mysql://root:secret@host/db", 2, `scheme "mysql://" is not known`},
		{"pause --dsn DB --for 1h", 2, "pause: CHANNEL is missing"},
		{"pause --dsn DB orders", 2, "pause: --for is missing"},
		{"pause --dsn DB orders --for 0s", 2, "pause: --for is 0s: outbox resume ends a pause"},
		{"pause --dsn DB orders --for 900000h1s", 2, "not within 0 and 100 years"},
		{"pause --dsn DB orders --for soon", 2, `invalid value "soon"`},
		{"pause --dsn DB orders --for soon", 2, "not a duration such as 90s, 36h or 1d12h"},
		{"pause --dsn DB orders --for 36501d", 2, "not within 0 and 100 years"},
		{"stats --dsn DB --timeout 1d", 0, ""},
		{"pause --dsn DB " + strings.Repeat("x", 129) + " --for 1h", 2, "over the limit of 128"},
		{"resume --dsn DB one two", 2, `resume: takes only CHANNEL, but was also given "two"`},
		{"stats --dsn MISSING", 1, "it does not exist; outbox migrate up would make it"},
		{"stats --dsn NOTONE", 1, "connect to SQLite file"},
		{"stats --dsn DIR", 1, "it is a directory"},
		{"stats --dsn DB --prefix other_", 1, "See outbox migrate status"},
		{"fence --dsn DB --prefix other_", 1, "run the migrations"},
		{"stats --dsn postgres://someone@127.0.0.1:1/app?sslmode=disable", 1, `connect to Postgres database "app"`},
		{"list --dsn DB", 0, ""},
		{"list --dsn DB --state gone", 2, `list: --state: `},
		{"list --dsn DB --group=", 2, "list: --group is empty"},
		{"list --dsn DB --limit 0", 2, "list: --limit is 0, not 1 to 10000"},
		{"list --dsn DB --limit 5 --all", 2, "list: --all and --limit exclude each other"},
		{"list --dsn DB --after ?", 2, "After is no cursor"},
		{"list --dsn DB KEY", 2, `list: takes no argument, but was given "KEY"`},
		{"list --dsn DB --channel=", 2, "list: --channel: "},
		{"show --dsn DB", 2, "show: KEY is missing"},
		{"show --dsn DB a b", 2, `show: takes only KEY, but was also given "b"`},
		{"show --dsn DB a", 1, "not found: it was never put"},
		{"retry --dsn DB", 2, "retry: which messages? Give KEY, a filter (--state, --group, --code), or --all"},
		{"retry --dsn DB a --all", 2, "retry: give KEY or a filter, not both"},
		{"retry --dsn DB a --state dead", 2, "retry: give KEY or a filter, not both"},
		{"retry --dsn DB a b", 2, `retry: takes only [KEY], but was also given "b"`},
		{"retry --dsn DB a", 1, "not found"},
		{"retry --dsn DB --all", 0, ""},
		{"discard --dsn DB", 2, "discard: which messages?"},
		{"discard --dsn DB --all", 2, "discard: this cannot be undone: --yes confirms"},
		{"discard --dsn DB --all --dry-run", 0, ""},
		{"discard --dsn DB --all --yes", 0, ""},
		{"resolve --dsn DB", 2, "resolve: KEY is missing"},
		{"resolve --dsn DB a", 2, "resolve: what became of it? Give --sent REF, --not-sent or --dead"},
		{"resolve --dsn DB a --dead --not-sent", 2, "resolve: give one of --sent REF, --not-sent and --dead, not several"},
		{"resolve --dsn DB a --dead", 1, "not found"},
		{"purge --dsn DB", 2, "purge: give one of --before TIME and --older-than DURATION"},
		{"purge --dsn DB --before 2026-01-01 --older-than 1d", 2, "purge: give one of --before TIME and --older-than DURATION"},
		{"purge --dsn DB --before yesterday", 2, `purge: --before is "yesterday": not a time such as 2006-01-02T15:04:05Z`},
		{"purge --dsn DB --older-than 0s", 2, "purge: --older-than is 0s; it must be more than 0"},
		{"purge --dsn DB --older-than 30d --state failed", 2, "purge: --state is failed: only sent, dead and unknown messages are purged; outbox discard deletes others"},
		{"purge --dsn DB --older-than 30d", 2, "purge: this cannot be undone: --yes confirms"},
		{"purge --dsn DB --older-than 30d --yes", 0, ""},
		{"migrate down --dsn DB --drop-undelivered", 2, "migrate down: this cannot be undone: --yes confirms that you want to remove the outbox's tables"},
		{"migrate sql", 2, "no database: give --dsn, or set OUTBOX_DSN; or give --dialect"},
		{"migrate sql --dialect oracle", 2, `--dialect is "oracle"`},
		{"demo --duration 1ms", 2, "demo: --duration is 1ms, not 1s to 1h"},
		{"demo --orders 0", 2, "demo: --orders is 0"},
		{"demo --dsn DB", 1, "works in a new one only"},
	} {
		var args []string
		for _, arg := range strings.Fields(c.line) {
			switch arg {
			case "DB":
				arg = db
			case "MISSING":
				arg = missing
			case "NOTONE":
				arg = notOne
			case "DIR":
				arg = dir
			}
			args = append(args, arg)
		}
		r := call(t, args...)
		require.Equal(t, c.code, r.code, "%s\n%s%s", c.line, r.stdout, r.stderr)
		require.Contains(t, r.stderr, c.says, c.line)
		require.NotContains(t, r.stderr, "secret", c.line)
		if c.code == 0 {
			require.Empty(t, r.stderr, c.line)
			require.NotEmpty(t, r.stdout, c.line)
		} else {
			require.Empty(t, r.stdout, c.line)
			require.True(t, strings.HasPrefix(r.stderr, "outbox: "), r.stderr)
		}
	}
	require.NoFileExists(t, missing)
}

func TestInterruptedHasItsOwnExitCode(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	db := filepath.Join(t.TempDir(), "app.db")
	ok(t, "migrate", "up", "--dsn", db)
	var stdout, stderr bytes.Buffer
	a := app{stdout: &stdout, stderr: &stderr, env: func(string) string { return db }}
	require.Equal(t, exitInterrupted, a.run(ctx, []string{"outbox", "stats"}))
	require.Equal(t, "outbox: interrupted\n", stderr.String())
}

func TestTimeoutIsNamed(t *testing.T) {
	db := filepath.Join(t.TempDir(), "app.db")
	ok(t, "migrate", "up", "--dsn", db)
	r := call(t, "stats", "--dsn", db, "--timeout", "1ns")
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, "gave up after 1ns (--timeout)")
}

func TestEnvironmentNamesTheDatabase(t *testing.T) {
	db := filepath.Join(t.TempDir(), "app.db")
	a := app{env: func(name string) string { return map[string]string{"OUTBOX_DSN": db}[name] }}
	require.Equal(t, exitOK, a.call(t, "migrate", "up").code)
	require.FileExists(t, db)
	require.Equal(t, exitOK, a.call(t, "stats").code)
}

func TestHelpNeverShowsTheEnvironment(t *testing.T) {
	t.Setenv("OUTBOX_DSN", "postgres://user:topsecret@host/db")
	a := app{env: os.Getenv}
	for _, args := range [][]string{{"--help"}, {"stats", "--help"}, {"help", "demo"}, {}, {"migrate"}, {"stats", "--nonsense"}} {
		r := a.call(t, args...)
		require.NotContains(t, r.stdout+r.stderr, "topsecret", args)
	}
}

func TestVersionTellsSchemaAndGo(t *testing.T) {
	var b build
	okJSON(t, &b, "version")
	require.Equal(t, dialect.SchemaVersion, b.Schema)
	require.NotEmpty(t, b.Go)
	require.Contains(t, ok(t, "version"), fmt.Sprintf("schema %d", dialect.SchemaVersion))
	require.Equal(t, ok(t, "version"), ok(t, "--version"))
}
