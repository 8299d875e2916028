package main

import (
	"fmt"
	"math/rand/v2"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestDSNsThatNameSQLite(t *testing.T) {
	t.Chdir(t.TempDir())
	require.NoError(t, os.WriteFile("odd?_name.db", nil, 0o600))
	for _, c := range []struct {
		dsn, path, file string
		bare            bool
	}{
		{"app.db", "app.db", "file:app.db", true},
		{"./dir/../app.db", "app.db", "file:app.db", true},
		{"../app.db", "../app.db", "file:../app.db", true},
		{"/var/lib/app.db", "/var/lib/app.db", "file:/var/lib/app.db", true},
		{"//var//app.db", "/var/app.db", "file:/var/app.db", true},
		{"app.db\n", "app.db", "file:app.db", true},
		{"my app.db", "my app.db", "file:my%20app.db", true},
		{"100%.db", "100%.db", "file:100%25.db", true},
		{"a#b.db", "a#b.db", "file:a%23b.db", true},
		{"what?.db", "what?.db", "file:what%3F.db", true},
		{"odd?_name.db", "odd?_name.db", "file:odd%3F_name.db", true},
		{"a:b.db", "a:b.db", "file:a:b.db", true},
		{"user=me.db/x", "", "", false}, // a Postgres keyword
		{"users=me.db", "users=me.db", "file:users=me.db", true},
		{"postgres", "postgres", "file:postgres", true},
		{"日本.db", "日本.db", "file:%E6%97%A5%E6%9C%AC.db", true},
		{"app.db?_pragma=busy_timeout(1)", "app.db", "file:app.db?_pragma=busy_timeout(1)", false},
		{"file:app.db", "app.db", "file:app.db", false},
		{"file:app.db?", "app.db", "file:app.db", false},
		{"file:app.db#part", "app.db", "file:app.db", false},
		{"file:my%20app.db?mode=ro", "my app.db", "file:my%20app.db?mode=ro", false},
		{"file:/var/app.db", "/var/app.db", "file:/var/app.db", false},
		{"file:///var/app.db", "/var/app.db", "file:/var/app.db", false},
		{"file://localhost/var/app.db", "/var/app.db", "file:/var/app.db", false},
		{"sqlite:app.db", "app.db", "file:app.db", false},
		{"sqlite://app.db", "app.db", "file:app.db", false},
		{"sqlite://dir/app.db?_txlock=deferred", "dir/app.db", "file:dir/app.db?_txlock=deferred", false},
		{"sqlite3:///var/app.db", "/var/app.db", "file:/var/app.db", false},
		{"SQLite:////var/app.db", "/var/app.db", "file:/var/app.db", false},
	} {
		got, err := parseDSN(c.dsn)
		if c.path == "" {
			require.True(t, err != nil || got.postgres != nil, c.dsn)
			continue
		}
		require.NoError(t, err, c.dsn)
		require.Nil(t, got.postgres, c.dsn)
		require.Equal(t, "sqlite", got.d.Name())
		require.Equal(t, c.path, got.path, c.dsn)
		require.Equal(t, c.file, got.file, c.dsn)
		require.Equal(t, c.bare, got.bare, c.dsn)
	}
}

func TestDSNsThatNamePostgres(t *testing.T) {
	t.Setenv("PGUSER", "me")
	t.Setenv("PGDATABASE", "")
	for _, c := range []struct {
		dsn, host, user, password, database string
		port                                uint16
	}{
		{"postgres://u:p@h:5433/d", "h", "u", "p", "d", 5433},
		{"postgresql://u@h/d", "h", "u", "", "d", 5432},
		{"POSTGRES://u@h/d", "h", "u", "", "d", 5432},
		{" postgres://u@h/d\n", "h", "u", "", "d", 5432},
		{"postgres://u:p%40ss%2F%25%3A@h/d", "h", "u", "p@ss/%:", "d", 5432},
		{"postgres://u:a:b@h/d", "h", "u", "a:b", "d", 5432},
		{"postgres://h/d", "h", "me", "", "d", 5432},
		{"postgres://u@h1:5433,h2:5434/d", "h1", "u", "", "d", 5433},
		{"postgres:///d?host=/run/postgresql", "/run/postgresql", "me", "", "d", 5432},
		{"postgres://%2Frun%2Fpostgresql/d", "/run/postgresql", "me", "", "d", 5432},
		{"postgres://[::1]:5433/d", "::1", "me", "", "d", 5433},
		{"postgres://h/d?user=u&password=p", "h", "u", "p", "d", 5432},
		{"host=h port=5433 user=u password='p w' dbname=d", "h", "u", "p w", "d", 5433},
		{"user=u password=p host=h dbname=d", "h", "u", "p", "d", 5432},
		{"dbname = d host = h", "h", "me", "", "d", 5432},
	} {
		got, err := parseDSN(c.dsn)
		require.NoError(t, err, c.dsn)
		require.NotNil(t, got.postgres, c.dsn)
		require.Equal(t, "postgres", got.d.Name())
		p := got.postgres
		require.Equal(t, []any{c.host, c.user, c.password, c.database, c.port},
			[]any{p.Host, p.User, p.Password, p.Database, p.Port}, c.dsn)
		require.Equal(t, "outbox", p.RuntimeParams["application_name"])
	}
	got, err := parseDSN("postgres://u@h/d?application_name=mine&default_query_exec_mode=simple_protocol")
	require.NoError(t, err)
	require.Equal(t, "mine", got.postgres.RuntimeParams["application_name"])
	require.Equal(t, "simple protocol", got.postgres.DefaultQueryExecMode.String())
}

func TestDSNsThatCannotBeRead(t *testing.T) {
	for dsn, says := range map[string]string{
		"":                                    "no database",
		" \n":                                 "no database",
		"mysql://u:secret@h/d":                `scheme "mysql://" is not known`,
		":memory:":                            "in memory",
		"file::memory:":                       "in memory",
		"file:x?mode=memory":                  "in memory",
		"file:/x?vfs=memdb":                   "in memory",
		"sqlite::memory:":                     "in memory",
		"file:":                               "names no file",
		"sqlite://":                           "names no file",
		"file:?mode=ro":                       "names no file",
		"file:100%.db":                        "a % in it is written %25",
		"file:a.db?x=%zz":                     "parameters",
		"file://server/share.db":              "name of a host",
		"postgres://u:secret/x@h/d":           "%40 for @",
		"postgres://u:secret#x@h/d":           "%40 for @",
		"postgres://u:secret?x@h/d":           "%40 for @",
		"postgres://u:12345/secret@h/d":       "%40 for @",
		"postgres://u:12345?se=cret@h/d":      "%40 for @",
		"postgres://u:se%zzcret@h/d":          "the Postgres DSN cannot be read: ",
		"postgres://u:se@cret@h/d":            "%40 for @",
		"postgres://u:p@h/d?password=se@cret": "%40 for @",
		"postgres://u:secret@h:x/d":           "the Postgres DSN cannot be read: ",
		"postgres://u:secret@h/d?sslmode=odd": "sslmode is invalid",
		"host=h password=secret words":        "the Postgres DSN cannot be read\n",
		"host=h password='secret":             "unterminated quoted string",
		"host=h user=u password=secret x":     "the Postgres DSN cannot be read: failed to parse as keyword/value",
	} {
		r := call(t, "stats", "--dsn", dsn)
		require.Equal(t, exitUsage, r.code, "%q: %s", dsn, r.stderr)
		require.Contains(t, r.stderr, says, dsn)
		require.NotContains(t, r.stderr, "secret", dsn)
		require.NotContains(t, r.stderr, "cret", dsn)
		require.NotContains(t, r.stderr, "12345", dsn)
	}
}

// What is in the user's DSN is kept; what is missing is added, but for what
// would change or hide the state of things.
func TestSQLiteDSNsAreCompleted(t *testing.T) {
	const wal, busy, sync, lock, old = "_pragma=journal_mode(WAL)", "_pragma=busy_timeout(5000)", "_pragma=synchronous(FULL)", "_txlock=immediate", "mode=rw"
	all := []string{wal, busy, sync, lock, old}
	for _, c := range []struct {
		dsn   string
		for_  purpose
		added []string
	}{
		{"a.db", toInstall, []string{wal, busy, sync, lock}},
		{"a.db", toOperate, []string{busy, sync, lock, old}},
		{"a.db", toRemove, []string{busy, sync, lock, old}},
		{"a.db", toExamine, []string{busy, sync, lock, old}},
		{"file:a.db", toInstall, []string{wal, busy, sync, lock}},
		{"file:a.db", toExamine, []string{old}},
		{"file:a.db?mode=ro", toOperate, []string{busy, sync, lock}},
		{"file:a.db?_txlock=deferred&_pragma=Busy_Timeout=7", toInstall, []string{wal, sync}},
		{"file:a.db?_timeout=7&_sync=1&_journal=DELETE", toInstall, []string{lock}},
	} {
		got, err := parseDSN(c.dsn)
		require.NoError(t, err)
		full := got.sqliteDSN(c.for_)
		require.True(t, strings.HasPrefix(full, got.file), full)
		rest := strings.TrimPrefix(full, got.file)
		for _, parameter := range all {
			added := false
			for _, want := range c.added {
				added = added || want == parameter
			}
			require.Equal(t, added, strings.Contains(rest, parameter), "%s: %s in %s", c.dsn, parameter, full)
		}
	}
}

func TestOpeningDoesNotChangeTheJournalMode(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a # b% c?.db")
	ok(t, "migrate", "up", "--dsn", path)
	require.FileExists(t, path)
	s := open(t, path)
	var mode string
	require.NoError(t, s.db.QueryRow(`PRAGMA journal_mode`).Scan(&mode))
	require.Equal(t, "wal", mode)
	require.NoError(t, s.db.QueryRow(`PRAGMA journal_mode(DELETE)`).Scan(&mode))
	ok(t, "stats", "--dsn", path)
	ok(t, "fence", "--dsn", path)
	require.Contains(t, ok(t, "doctor", "--dsn", path), "journal_mode is delete")
	require.NoError(t, s.db.QueryRow(`PRAGMA journal_mode`).Scan(&mode))
	require.Equal(t, "delete", mode)
}

// A password that was written down in any way, right or wrong, shows nowhere.
func TestPasswordsAreNeverPrinted(t *testing.T) {
	const odd = `@:/?#%&='" \[]{}<>;,+$!`
	rng := rand.New(rand.NewPCG(1, 2))
	for range 400 {
		var b strings.Builder
		var words []string
		for range 1 + rng.IntN(3) {
			word := fmt.Sprintf("q%06xz", rng.IntN(1<<24))
			words = append(words, word)
			b.WriteString(word)
			b.WriteByte(odd[rng.IntN(len(odd))])
		}
		raw := b.String()
		escaped := url.QueryEscape(raw)
		for _, dsn := range []string{
			"postgres://me:" + raw + "@127.0.0.1:1/app?sslmode=disable",
			"postgresql://me:" + escaped + "@127.0.0.1:1/app?sslmode=disable",
			"POSTGRES://me:" + raw + "@",
			"postgres://me:" + strings.ReplaceAll(raw, "@", "/"),
			"postgres://127.0.0.1:1/app?sslmode=disable&password=" + escaped,
			"host=127.0.0.1 port=1 sslmode=disable user=me password=" + words[0],
			"host=127.0.0.1 port=1 sslmode=disable user=me password='" + strings.NewReplacer(`\`, `\\`, `'`, `\'`).Replace(raw) + "'",
			"password='" + raw + " host=127.0.0.1 port=1 sslmode=disable connect_timeout=1",
			"mysql://me:" + raw + "@host/app",
		} {
			for _, args := range [][]string{
				{"stats", "--timeout", "2s", "--dsn", dsn},
				{"doctor", "--timeout", "2s", "--dsn", dsn},
			} {
				if target, err := parseDSN(dsn); err == nil { // a host with part of the password in it would be looked up
					require.NotNil(t, target.postgres, dsn)
					require.Contains(t, []string{"127.0.0.1", "/var/run/postgresql", "/tmp", "localhost"}, target.postgres.Host, dsn)
				}
				r := call(t, args...)
				require.NotEqual(t, exitOK, r.code)
				for _, word := range words {
					require.NotContains(t, r.stdout+r.stderr, word, dsn)
				}
			}
		}
		// Given in the wrong place.
		for _, args := range [][]string{
			{"stats", "postgres://me:" + raw + "@host/app"},
			{"pause", "a", "host=h password=" + words[0], "--for", "1s"},
			{"postgres://me:" + words[0] + "@host/app"},
		} {
			r := call(t, args...)
			require.Equal(t, exitUsage, r.code)
			require.NotContains(t, r.stdout+r.stderr, words[0], args)
		}
	}
}
