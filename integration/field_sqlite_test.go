package integration

import (
	"context"
	"database/sql"
	"errors"
	"math/rand/v2"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// TestFieldCommitThatReadersRefuse is field case S75: without WAL a COMMIT may
// find the file read by others and answer SQLITE_BUSY. Then nothing is stored,
// for certain, the error says that the transaction may be run again, and the
// connection is given back without it.
func TestFieldCommitThatReadersRefuse(t *testing.T) {
	dsn := strings.NewReplacer("journal_mode(WAL)", "journal_mode(DELETE)", "busy_timeout(5000)", "busy_timeout(30)").
		Replace(dialect.SQLiteDSN(filepath.Join(t.TempDir(), "app.db")))
	require.Contains(t, dsn, "DELETE")
	require.Contains(t, dsn, "busy_timeout(30)")
	s := newSite(t, dialect.SQLite(), "sqlite", dsn)
	l, j := s.latest("states"), s.journal("mail")
	s.stage(l, "there", "x")
	s.post(j, "there", "begun")
	begun, err := j.Begin(t.Context(), "begun", time.Minute)
	require.NoError(t, err)
	s.exec(`INSERT INTO app VALUES ('a', 'x'), ('b', 'x')`)
	before := append(s.entries(), s.messages()...)

	db := s.open()
	db.SetMaxOpenConns(1)
	store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
	require.NoError(t, err)
	mine := journalOn(t, store, "mail")
	put := func(tx *sql.Tx) error {
		_, err := tx.Exec(`INSERT INTO app VALUES ('business', 'x')`)
		if err == nil {
			_, err = l.Stage(context.Background(), tx, "new", "x")
		}
		if err == nil {
			_, err = j.Put(context.Background(), tx, outbox.Message{Key: "new", Group: "g"})
		}
		return err
	}
	settle := func(ctx context.Context) error {
		_, err := store.ClaimRows(ctx, outbox.Claim{Channel: "states", Limit: 10, Lease: time.Minute, Full: true})
		return err
	}
	calls := map[string]func(ctx context.Context) error{
		"transact":    func(ctx context.Context) error { return store.Transact(ctx, nil, put) },
		"add":         func(ctx context.Context) error { _, err := mine.Add(ctx, outbox.Message{Key: "added"}); return err },
		"mark sent":   func(ctx context.Context) error { return mine.MarkSent(ctx, begun.Lease, "ref") },
		"claim":       settle,
		"claim due":   func(ctx context.Context) error { _, err := mine.ClaimDue(ctx, 10, time.Minute); return err },
		"discard all": func(ctx context.Context) error { _, err := mine.Discard(ctx, outbox.Filter{All: true}); return err },
		"pause":       func(ctx context.Context) error { return store.Pause(ctx, "mail", time.Hour, "x") },
	}
	reader := s.open()
	rows, err := reader.Query(`SELECT id FROM app`)
	require.NoError(t, err)
	require.True(t, rows.Next(), "holds a read lock")
	for name, call := range calls {
		err := call(t.Context())
		require.Error(t, err, name)
		require.True(t, store.Retryable(err), "%s: %v", name, err)
		require.NotErrorIs(t, err, outbox.ErrCommit, name)
	}
	require.NoError(t, rows.Close())
	require.Equal(t, before, append(s.entries(), s.messages()...), "what was refused is stored all the same")
	require.Equal(t, 2, s.count(`SELECT count(*) FROM app`))
	conn, err := db.Conn(t.Context()) // the only one, in no transaction
	require.NoError(t, err)
	_, err = conn.ExecContext(t.Context(), `BEGIN IMMEDIATE`)
	require.NoError(t, err, "the refused transaction is still open")
	_, err = conn.ExecContext(t.Context(), `ROLLBACK`)
	require.NoError(t, err)
	require.NoError(t, conn.Close())

	require.NoError(t, calls["transact"](t.Context()))
	require.NoError(t, calls["mark sent"](t.Context()))
	require.Equal(t, 3, s.count(`SELECT count(*) FROM app`))
	require.Equal(t, outbox.StateSent, s.get(j, "begun").State)
	require.Equal(t, outbox.StatePending, s.get(j, "new").State)
}

// TestFieldCancelledJournalCallsLeaveThePoolClean is field case S74 for the
// journal: no connection stays in a transaction, a plain write still works, and
// what a call was about is there as before.
func TestFieldCancelledJournalCallsLeaveThePoolClean(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		loops := 2_000 / raceFactor
		if s.postgres() {
			loops = 100 // each cancelled statement costs a connection
		}
		const connections = 4
		db := s.open()
		db.SetMaxOpenConns(connections)
		db.SetMaxIdleConns(connections)
		store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		j := journalOn(t, store, "mail")
		ms := append(letters("plain", 10, 0), letters("grouped", 10, 3)...)
		s.put(j, ms...)
		var cancelled, worked atomic.Int64
		var wg sync.WaitGroup
		for range 2 {
			wg.Go(func() {
				for range loops / 2 {
					if db.PingContext(t.Context()) != nil { // replaces a connection that was lost
						t.Error("the database is out of reach")
					}
					ctx, cancel := s.soon()
					err := someJournalCall(ctx, store, j, ms)
					cancel()
					switch {
					case err == nil:
						worked.Add(1)
					case isCancellation(err):
						cancelled.Add(1)
					default:
						t.Errorf("a cancelled call does not say so: %v", err)
						return
					}
				}
			})
		}
		wg.Wait()
		require.Greater(t, cancelled.Load(), int64(loops/20))
		require.Greater(t, worked.Load(), int64(loops/20))
		requireClean(t, s, db, connections)
		require.ElementsMatch(t, keysOf(ms), func() (keys []string) {
			for _, r := range s.records(j) {
				keys = append(keys, r.Key)
			}
			return keys
		}())
		var r receiver
		stop := s.senders(1, new(logbook), "mail", r.send, outbox.SendOptions{MaxAttempts: outbox.NoLimit, Order: outbox.Skip})
		eventually(t, "nothing to be stranded", func() bool { return s.unfinished() == 0 })
		stop()
		require.Len(t, s.states(j), len(ms))
	})
}

// someJournalCall makes one call whose messages stay. What it says of a message
// that another call has in hand is no error.
func someJournalCall(ctx context.Context, store *sqlstore.Store, j *outbox.Journal, ms []outbox.Message) error {
	key := ms[rand.N(len(ms))].Key
	fair := func(err error) error {
		for _, expected := range []error{outbox.ErrState, outbox.ErrBlocked, outbox.ErrBusy, outbox.ErrLeaseLost, outbox.ErrNotFound} {
			if errors.Is(err, expected) {
				return nil
			}
		}
		return err
	}
	switch rand.N(7) {
	case 0:
		_, err := j.Add(ctx, ms[rand.N(len(ms))])
		return err
	case 1:
		r, err := j.Begin(ctx, key, 100*time.Millisecond)
		if err == nil {
			err = j.MarkFailed(ctx, r.Lease, outbox.Permanent(errDown))
		}
		return fair(err)
	case 2:
		_, err := j.Retry(ctx, outbox.Filter{All: true})
		return err
	case 3:
		_, err := j.Discard(ctx, outbox.Filter{Key: "missing"})
		return fair(err)
	case 4:
		_, err := j.Purge(ctx, time.Now().Add(-time.Hour))
		return err
	case 5:
		_, _, err := j.List(ctx, outbox.Filter{Payload: true})
		return err
	}
	ch := messageChannel("mail")
	c, err := store.ClaimMessages(ctx, nil, outbox.Claim{Channel: "mail", Limit: 4, Lease: time.Millisecond, Full: true})
	if err != nil || len(c.Rows) == 0 {
		return err
	}
	if _, err := store.Extend(ctx, ch, c.Rows, 2*time.Millisecond); err != nil {
		return err
	}
	_, err = store.Settle(ctx, ch, endings(outbox.OutcomeRetry, time.Millisecond, c.Rows))
	return err
}
