package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func TestRetrySendsAgain(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		j := everyState(t, dsn, "mails")
		args := func(more ...string) []string {
			return append([]string{"retry", "--channel", "mails", "--dsn", dsn}, more...)
		}
		require.Equal(t, `message "dead" of channel "mails" would be retried`+"\n", ok(t, args("dead", "--dry-run")...))
		require.Equal(t, outbox.StateDead, stateOf(t, j, "dead"))
		require.Equal(t, `message "dead" of channel "mails" is retried`+"\n", ok(t, args("dead")...))
		require.Equal(t, outbox.StatePending, stateOf(t, j, "dead"))
		for _, dry := range [][]string{nil, {"--dry-run"}} {
			r := call(t, args(append(dry, "sent")...)...)
			require.Equal(t, exitFailed, r.code)
			require.Equal(t, `outbox: retry key "sent" of channel "mails": wrong state: it is sent; only a failed, dead or unknown message can be retried`+"\n", r.stderr)
		}
		r := call(t, args("nobody")...)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, `not found: it was never put`)

		require.Equal(t, "would be retried: 1 message of channel \"mails\", state failed or dead\n", ok(t, args("--all", "--dry-run")...))
		var a amended
		okJSON(t, &a, args("--all")...)
		require.Equal(t, amended{Channel: "mails", Action: "retry", Count: 1}, a)
		require.Equal(t, outbox.StatePending, stateOf(t, j, "failed"))
		require.Equal(t, outbox.StateUnknown, stateOf(t, j, "unknown")) // --all does not mean these
		require.Equal(t, "retried: 1 message of channel \"mails\", state unknown\n", ok(t, args("--state", "unknown")...))
		require.Equal(t, "retried: 0 messages of channel \"mails\", state failed or dead, group \"g\", code \"x\"\n", ok(t, args("--group", "g", "--code", "x")...))
		require.Equal(t, outbox.StateSent, stateOf(t, j, "sent"))
	})
}

func stateOf(t testing.TB, j *outbox.Journal, key string) outbox.State {
	t.Helper()
	r, err := j.Get(t.Context(), key)
	if errors.Is(err, outbox.ErrNotFound) {
		return 0
	}
	require.NoError(t, err)
	return r.State
}

func TestDiscardDeletes(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		j := everyState(t, dsn, "mails")
		args := func(more ...string) []string {
			return append([]string{"discard", "--channel", "mails", "--dsn", dsn}, more...)
		}
		require.Equal(t, `message "sending" of channel "mails" is discarded`+"\n", ok(t, args("sending")...))
		require.Zero(t, stateOf(t, j, "sending"))

		require.Equal(t, "would be discarded: 2 messages of channel \"mails\", group \"g\"\n", ok(t, args("--group", "g", "--dry-run")...))
		r := call(t, args("--group", "g")...)
		require.Equal(t, exitUsage, r.code)
		require.Contains(t, r.stderr, `discard: this cannot be undone: --yes confirms that you want to discard all messages of channel "mails", group "g"`)
		r = app{asks: true, stdin: strings.NewReader("n\n")}.call(t, args("--group", "g")...)
		require.Equal(t, exitFailed, r.code)
		require.Contains(t, r.stderr, `Really discard 2 messages of channel "mails", group "g"? [y/N]`)
		require.Contains(t, r.stderr, `nothing was changed: not confirmed`)
		require.Equal(t, outbox.StateDead, stateOf(t, j, "dead"))
		r = app{asks: true, stdin: strings.NewReader("y\n")}.call(t, args("--state", "pending", "--group", "g")...)
		require.Equal(t, exitOK, r.code, r.stderr)
		require.Equal(t, outbox.StateDead, stateOf(t, j, "dead"))
		require.Zero(t, stateOf(t, j, "blocked"))

		require.Equal(t, "discarded: 5 messages of channel \"mails\"\n", ok(t, args("--all", "--yes")...))
		var l messageList
		okJSON(t, &l, "list", "--channel", "mails", "--dsn", dsn)
		require.Empty(t, l.Messages)
	})
}

func TestResolveRecordsWhatAPersonHasFound(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		install(t, dsn)
		j := openMails(t, dsn, outbox.DefaultChannel)
		for _, key := range []string{"a", "b", "c", "d"} {
			put(t, j, outbox.Message{Key: key})
			ended(t, j, key, outbox.Unknown(errors.New("no answer")))
		}
		require.Equal(t, "message \"a\" of channel \"default\" is sent: recorded as sent\n", ok(t, "resolve", "a", "--sent", "ref-1", "--dsn", dsn))
		r, err := j.Get(t.Context(), "a")
		require.NoError(t, err)
		require.Equal(t, outbox.StateSent, r.State)
		require.Equal(t, "ref-1", r.Ref)
		require.Equal(t, "message \"b\" of channel \"default\" is pending: to be sent now\n", ok(t, "resolve", "b", "--not-sent", "--dsn", dsn))
		require.Equal(t, "message \"c\" of channel \"default\" is dead: not to be sent\n", ok(t, "resolve", "c", "--dead", "--dsn", dsn))
		require.Equal(t, outbox.StateDead, stateOf(t, j, "c"))
		var got struct{ Channel, Key, State string }
		okJSON(t, &got, "resolve", "d", "--sent", "", "--dsn", dsn)
		require.Equal(t, "sent", got.State)

		again := call(t, "resolve", "a", "--dead", "--dsn", dsn)
		require.Equal(t, exitFailed, again.code)
		require.Equal(t, `outbox: resolve key "a" of channel "default": wrong state: it is sent; only an unknown message can be resolved`+"\n", again.stderr)
		require.Equal(t, exitFailed, call(t, "resolve", "x", "--dead", "--dsn", dsn).code)
	})
}

func TestPurgeDeletesWhatHasEnded(t *testing.T) {
	onEach(t, func(t *testing.T, dsn string) {
		j := everyState(t, dsn, "mails")
		args := func(more ...string) []string {
			return append([]string{"purge", "--channel", "mails", "--dsn", dsn}, more...)
		}
		require.Equal(t, "would be purged: 0 messages of channel \"mails\" that ended (sent) more than 1d00h ago\n", ok(t, args("--older-than", "1d", "--dry-run")...))
		require.Equal(t, "would be purged: 1 message of channel \"mails\" that ended (sent) before 2100-01-01T00:00:00Z\n", ok(t, args("--before", "2100-01-01", "--dry-run")...))
		r := call(t, args("--before", "2100-01-01")...)
		require.Equal(t, exitUsage, r.code)
		require.Contains(t, r.stderr, "--yes confirms that you want to delete all messages of channel \"mails\" that ended (sent) before 2100-01-01T00:00:00Z")
		require.Equal(t, outbox.StateSent, stateOf(t, j, "sent"))

		var a amended
		okJSON(t, &a, args("--older-than", "1us", "--yes")...)
		require.Equal(t, amended{Channel: "mails", Action: "purge", Count: 1}, a)
		require.Zero(t, stateOf(t, j, "sent"))
		require.Equal(t, outbox.StateDead, stateOf(t, j, "dead"))
		require.Equal(t, "purged: 2 messages of channel \"mails\" that ended (dead or unknown) before 2100-01-01T00:00:00Z\n",
			ok(t, args("--before", "2100-01-01T00:00:00Z", "--state", "dead,unknown", "--yes")...))
		var l messageList
		okJSON(t, &l, "list", "--channel", "mails", "--dsn", dsn)
		require.Equal(t, "pending failed sending blocked", l.keys())
	})
}

// Long work goes in batches, and shows how far it is.
func TestLongWorkShowsProgress(t *testing.T) {
	onBoth(t, func(t *testing.T, dsn string) {
		ok(t, "migrate", "up", "--dsn", dsn)
		s := open(t, dsn)
		j := openMails(t, dsn, outbox.DefaultChannel)
		const n = 2*amendBatch + 100
		ms := make([]outbox.Message, n)
		for i := range ms {
			ms[i].Key = fmt.Sprint(i)
		}
		require.NoError(t, s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
			_, err := j.PutMany(t.Context(), tx, ms)
			return err
		}))
		for {
			rs, err := j.ClaimDue(t.Context(), 1000, time.Hour)
			require.NoError(t, err)
			if len(rs) == 0 {
				break
			}
			var dead []outbox.Settlement
			for _, r := range rs {
				dead = append(dead, outbox.Settlement{Row: outbox.Row{Key: r.Key, Token: r.Lease.Token}, Outcome: outbox.OutcomeDead, Error: "no"})
			}
			_, err = s.store.Settle(t.Context(), outbox.Channel{System: outbox.SystemJournal, Name: outbox.DefaultChannel}, dead)
			require.NoError(t, err)
		}
		r := app{terminal: true}.call(t, "retry", "--state", "dead", "--dsn", dsn)
		require.Equal(t, exitOK, r.code, r.stderr)
		require.Contains(t, r.stdout, fmt.Sprintf("(%d/%d)", n, n))
		require.True(t, strings.HasSuffix(r.stdout, "retried: 2,100 messages of channel \"default\", state dead\n"), r.stdout)
		require.Contains(t, ok(t, "discard", "--state", "pending", "--yes", "--dsn", dsn), "discarded: 2,100 messages")
		require.Contains(t, ok(t, "list", "--dsn", dsn), "no messages")
	})
}

func TestProgressIsLinesWhereThereIsNoTerminal(t *testing.T) {
	var out, lines strings.Builder
	a := app{stdout: &out, stderr: &lines}
	p := a.newProgress("purged", -1, false)
	p.set(1)
	require.Empty(t, lines.String())
	p.shown = time.Now().Add(-time.Minute)
	p.set(1000)
	require.Equal(t, "outbox: purged so far: 1,000 messages\n", lines.String())
	p.end(1000, context.Canceled)
	require.True(t, strings.HasSuffix(lines.String(), "outbox: note: purged before this: 1,000 messages\n"))
	require.Empty(t, out.String())
}
