package main

import (
	"bytes"
	"context"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/filestore"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// onEach is onBoth, and with a file store.
func onEach(t *testing.T, test func(t *testing.T, dsn string)) {
	onBoth(t, test)
	t.Run("file", func(t *testing.T) { test(t, "file://"+filepath.Join(t.TempDir(), "state", "outbox.json")) })
}

// install makes what the messages of a DSN are kept in.
func install(t testing.TB, dsn string) {
	if !isFileStore(dsn) {
		ok(t, "migrate", "up", "--dsn", dsn)
	}
}

// released is a file store that gives its lock back after each call, for the
// command to take it.
type released struct{ *filestore.Store }

func openReleased(t testing.TB, dsn string) released {
	target, err := parseDSN(dsn)
	require.NoError(t, err)
	s, err := filestore.Open(target.fileStore, filestore.Options{})
	require.NoError(t, err)
	require.NoError(t, s.Close())
	return released{s}
}

func (r released) PutRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.PutRow, begin time.Duration) ([]outbox.PutAnswer, error) {
	defer r.Close()
	return r.Store.PutRows(ctx, tx, channel, rows, begin)
}

func (r released) ClaimMessages(ctx context.Context, tx outbox.Tx, c outbox.Claim) (outbox.Claimed, error) {
	defer r.Close()
	return r.Store.ClaimMessages(ctx, tx, c)
}

func (r released) BeginMessage(ctx context.Context, tx outbox.Tx, channel, key string, lease time.Duration) (outbox.Row, error) {
	defer r.Close()
	return r.Store.BeginMessage(ctx, tx, channel, key, lease)
}

func (r released) Settle(ctx context.Context, ch outbox.Channel, ss []outbox.Settlement) ([]outbox.Result, error) {
	defer r.Close()
	return r.Store.Settle(ctx, ch, ss)
}

func (r released) ListMessages(ctx context.Context, tx outbox.Tx, channel string, l outbox.MessageList) ([]outbox.Row, error) {
	defer r.Close()
	return r.Store.ListMessages(ctx, tx, channel, l)
}

func TestDSNsThatNameAFileStore(t *testing.T) {
	for dsn, path := range map[string]string{
		"outbox.json":                         "outbox.json",
		"./state/../outbox.json\n":            "outbox.json",
		"/var/lib/agent/outbox.json":          "/var/lib/agent/outbox.json",
		"file:outbox.json":                    "outbox.json",
		"file:///var/lib/agent/outbox.json":   "/var/lib/agent/outbox.json",
		"file://localhost/var/lib/a%20b.json": "/var/lib/a b.json",
		"100%.json":                           "100%.json",
		"what?.json":                          "what?.json",
	} {
		got, err := parseDSN(dsn)
		require.NoError(t, err, dsn)
		require.Equal(t, target{fileStore: path, label: "outbox file " + path}, got, dsn)
	}
	for _, dsn := range []string{"sqlite:outbox.json", "sqlite:///var/outbox.json", "outbox.json.db", "outbox.json/app.db", "file:a.db?x=.json"} {
		got, err := parseDSN(dsn)
		require.NoError(t, err, dsn)
		require.Equal(t, "sqlite", got.d.Name(), dsn)
		require.Empty(t, got.fileStore, dsn)
	}
}

func TestFileStoresThatCannotBeUsed(t *testing.T) {
	dir := t.TempDir()
	missing, file, foreign := filepath.Join(dir, "missing.json"), filepath.Join(dir, "outbox.json"), filepath.Join(dir, "foreign.json")
	put(t, openMails(t, file, "mails"), outbox.Message{Key: "a"})
	require.NoError(t, os.WriteFile(foreign, []byte(`{"name": "package"}`), 0o600))
	for _, c := range []struct {
		line string
		code int
		says string
	}{
		{"stats --dsn " + missing, 1, "missing.json\": it does not exist; a program makes it when it adds its first message"},
		{"list --dsn file://" + missing, 1, "it does not exist"},
		{"list --dsn " + foreign, 1, "foreign.json"},
		{"stats --dsn file:" + file + "?mode=ro", 2, "a file store, which takes no parameters; a SQLite database of such a name is sqlite:PATH"},
		{"stats --prefix x_ --dsn " + file, 2, "stats: --schema, --prefix: " + file + " is a file store, which has no tables"},
		{"migrate up --dsn " + file, 2, "migrate up: " + file + " is a file store, which has no schema"},
		{"migrate down --dsn " + file, 2, "migrate down: " + file + " is a file store, which has no schema"},
		{"migrate status --dsn " + file, 2, "migrate status: " + file + " is a file store, which has no schema"},
		{"migrate sql --dsn " + file, 2, "migrate sql: " + file + " is a file store, which has no schema"},
		{"fence --dsn " + file, 2, "fence: " + file + " is a file store, which has no schema"},
		{"demo --dsn " + file, 2, "demo: " + file + " is a file store"},
	} {
		r := call(t, strings.Fields(c.line)...)
		require.Equal(t, c.code, r.code, "%s\n%s%s", c.line, r.stdout, r.stderr)
		require.Contains(t, r.stderr, c.says, c.line)
		require.Empty(t, r.stdout, c.line)
	}
	require.NoFileExists(t, missing)
	require.NoFileExists(t, missing+".lock")
	content, err := os.ReadFile(foreign)
	require.NoError(t, err)
	require.Equal(t, `{"name": "package"}`, string(content))
}

// While its program runs, nothing else may use the file: the command says so,
// and changes nothing.
func TestFileStoreOfARunningProgram(t *testing.T) {
	file := filepath.Join(t.TempDir(), "outbox.json")
	s, err := filestore.Open(file, filestore.Options{})
	require.NoError(t, err)
	defer s.Close()
	j, err := outbox.NewJournal(s, outbox.JournalOptions{})
	require.NoError(t, err)
	put(t, j, outbox.Message{Key: "a"})
	for _, args := range [][]string{{"stats"}, {"list"}, {"discard", "a"}, {"pause", "default", "--for", "1h"}} {
		r := call(t, append(args, "--dsn", file)...)
		require.Equal(t, exitFailed, r.code)
		require.Regexp(t, `^outbox: open outbox file ".*outbox.json": file is in use \(pid \d+\).*stop the other`, r.stderr)
	}
	d := diagnose(t, exitOK, "--dsn", file)
	require.Contains(t, d.texts("note"), "file: its program is running, so it cannot be examined: ")
	_, err = j.Get(t.Context(), "a")
	require.NoError(t, err)
}

func TestFileStoreIsWatchedAndPaused(t *testing.T) {
	file := filepath.Join(t.TempDir(), "outbox.json")
	everyState(t, file, "mails")
	var got statistics
	okJSON(t, &got, "stats", "--dsn", file)
	require.Len(t, got.Channels, 1)
	require.Equal(t, []any{"journal", "mails", 1, 1}, []any{got.Channels[0].System, got.Channels[0].Channel, got.Channels[0].Dead, got.Channels[0].Unknown})
	require.Regexp(t, `^channel "mails" is paused for 1h0m0s`, ok(t, "pause", "mails", "--for", "1h", "--reason", "moving house", "--dsn", file))
	require.Contains(t, ok(t, "stats", "--dsn", file), ": moving house")

	d := diagnose(t, exitOK, "--dsn", file)
	require.Equal(t, "outbox file "+file, d.Database)
	require.Empty(t, d.Schema)
	require.Contains(t, d.texts("ok"), "file: it can be read and is whole")
	require.Contains(t, d.texts("warning"), `channels: "mails": paused for another`)
	require.Contains(t, d.texts("warning"), `channels: "mails": dead messages`)
	require.True(t, strings.HasPrefix(ok(t, "doctor", "--dsn", file), "outbox file "+file+"\n"))
	require.Contains(t, ok(t, "resume", "mails", "--dsn", file), `channel "mails" is resumed`)

	ok(t, "pause", "mails", "--for", "1h", "--reason", `run outbox import again: messages are being moved out of "x"`, "--dsn", file)
	warnings := diagnose(t, exitOK, "--dsn", file).texts("warning")
	require.Contains(t, warnings, "run outbox import again")
	require.NotContains(t, warnings, "outbox resume", "which could have messages sent twice")

	require.NoError(t, os.Chmod(file, 0o644))
	d = diagnose(t, exitFailed, "--dsn", file)
	require.Contains(t, d.texts("fault"), "file: ")
	require.Contains(t, diagnose(t, exitFailed, "--dsn", file+".json").texts("fault"), "it does not exist")
}

func TestImportMovesAFileIntoADatabase(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		file := filepath.Join(t.TempDir(), "outbox.json")
		everyState(t, file, "mails")

		r := call(t, "import", "--from", file, "--dsn", dsn)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, "outbox migrate up")
		install(t, dsn)
		require.Contains(t, ok(t, "import", "--from", "file://"+file, "--dsn", dsn, "--dry-run"), "would be moved: 7 messages from outbox file "+file+" to ")

		var got jsonImport
		okJSON(t, &got, "import", "--from", file, "--dsn", dsn)
		require.Equal(t, jsonImport{From: file, To: got.To, Messages: 7, Channels: []jsonImportChannel{{
			Channel: "mails", Pending: 3, Sent: 1, Dead: 1, Unknown: 2, Interrupted: 1, Conflicts: []string{}, Left: []jsonLeftGroup{},
		}}}, got)
		var l messageList
		okJSON(t, &l, "list", "--channel", "mails", "--dsn", dsn)
		require.Len(t, l.Messages, 7)
		okJSON(t, &l, "list", "--channel", "mails", "--dsn", file)
		require.Empty(t, l.Messages)
		require.Regexp(t, `^moved: 0 messages from outbox file `, ok(t, "import", "--from", file, "--dsn", dsn))
	})
}

func TestImportSaysWhatStaysAndWhatToDo(t *testing.T) {
	dir := t.TempDir()
	file, db := filepath.Join(dir, "outbox.json"), filepath.Join(dir, "app.db")
	install(t, db)
	j := openMails(t, file, "mails")
	put(t, j, outbox.Message{Key: "m1", Group: "g"}, outbox.Message{Key: "m2", Group: "g"}, outbox.Message{Key: "m3", Group: "g"})
	_, err := j.ClaimDue(t.Context(), 2, time.Hour)
	require.NoError(t, err)
	put(t, j, outbox.Message{Key: "free"})
	other := openMails(t, file, "other")
	put(t, other, outbox.Message{Key: "same", Payload: []byte("secret")})
	put(t, openMails(t, db, "other"), outbox.Message{Key: "same", Payload: []byte("secret too")})

	r := call(t, "import", "--from", file, "--dsn", db)
	require.Equal(t, exitFailed, r.code)
	require.Regexp(t, `^moved: 1 message from outbox file .* to SQLite file .*
CHANNEL +PENDING +SENT +DEAD +UNKNOWN +INTERRUPTED
mails +1 +0 +0 +0 +2
other +0 +0 +0 +0 +0
stays: group "g" of channel "mails", 3 messages: dead or unknown are "m1", "m2"; only the first of a group may be: outbox retry, resolve or discard the others, with --dsn ".*outbox.json" --channel "mails"
stays: all of channel "other": key "same" is another message in the database; outbox show it in both, and outbox discard the wrong one
$`, r.stdout)
	require.Contains(t, r.stderr, "messages stay in the file")
	require.NotContains(t, r.stdout+r.stderr, "secret")

	ok(t, "resolve", "m2", "--not-sent", "--channel", "mails", "--dsn", file)
	ok(t, "discard", "same", "--channel", "other", "--dsn", db)
	require.Contains(t, ok(t, "import", "--from", file, "--dsn", db), "moved: 4 messages from ")
	var l messageList
	okJSON(t, &l, "list", "--channel", "mails", "--dsn", db)
	require.Equal(t, "free m1 m2 m3", l.keys())
}

func TestImportCanSendInterruptedMessagesAgain(t *testing.T) {
	dir := t.TempDir()
	file, db := filepath.Join(dir, "outbox.json"), filepath.Join(dir, "app.db")
	install(t, db)
	j := openMails(t, file, "mails")
	put(t, j, outbox.Message{Key: "a"})
	_, err := j.Begin(t.Context(), "a", time.Hour)
	require.NoError(t, err)
	r := app{terminal: true}.call(t, "import", "--from", file, "--dsn", db, "--interrupted", "resend")
	require.Equal(t, exitOK, r.code, r.stderr)
	require.Contains(t, r.stdout, "1/1") // the bar
	require.Equal(t, outbox.StatePending, stateOf(t, openMails(t, db, "mails"), "a"))
}

func TestImportRefusesAWrongCommandLine(t *testing.T) {
	dir := t.TempDir()
	file, db := filepath.Join(dir, "outbox.json"), filepath.Join(dir, "app.db")
	install(t, db)
	for line, says := range map[string]string{
		"import --dsn " + db:                               "import: --from is missing: the path of the file store",
		"import --from " + db + " --dsn " + db:             "import: --from names no file store: its path ends in .json",
		"import --from " + file:                            "no database: give --dsn",
		"import --from " + file + " --dsn " + file:         "import: --dsn names a file store too: a file is moved into Postgres or SQLite",
		"import --from " + file + " extra --dsn " + db:     "import: takes no argument",
		"import --from a.json --interrupted x --dsn " + db: `import: --interrupted is "x", not unknown or resend`,
	} {
		r := call(t, strings.Fields(line)...)
		require.Equal(t, exitUsage, r.code, "%s\n%s", line, r.stderr)
		require.Contains(t, r.stderr, says, line)
	}
	r := call(t, "import", "--from", file, "--dsn", db)
	require.Equal(t, exitFailed, r.code)
	require.Contains(t, r.stderr, "it does not exist")
	require.NoFileExists(t, file)
}

// Somebody who watches does not keep the program from starting.
func TestWatchingAFileStoreLeavesItToItsProgram(t *testing.T) {
	file := filepath.Join(t.TempDir(), "outbox.json")
	put(t, openMails(t, file, "mails"), outbox.Message{Key: "a"})
	var stderr bytes.Buffer
	shown := make(chan struct{})
	stdout := &stopAfter{text: "mails", times: 1, stop: sync.OnceFunc(func() { close(shown) })}
	a := app{stdout: stdout, stderr: &stderr, env: func(string) string { return file }}
	code := make(chan int)
	go func() { code <- a.run(t.Context(), []string{"outbox", "stats", "--watch", "100ms"}) }()
	<-shown
	var s *filestore.Store
	require.Eventually(t, func() (opened bool) {
		var err error
		s, err = filestore.Open(file, filestore.Options{})
		return err == nil
	}, 10*time.Second, time.Millisecond)
	require.Equal(t, exitFailed, <-code) // it cannot go on
	require.NoError(t, s.Close())
	require.Contains(t, stderr.String(), "file is in use")
}
