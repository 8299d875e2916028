package filestore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

const mails = "mails"

// moving is a file and a database, and what was sent from either.
type moving struct {
	t      *testing.T
	clock  *outboxtest.Clock
	file   *Store
	target *sqlstore.Store

	mu   sync.Mutex
	sent map[string]int
}

// newMoving opens a file and a SQLite database.
func newMoving(t *testing.T) *moving {
	m := &moving{t: t, clock: outboxtest.NewClock(time.Time{}), sent: map[string]int{}}
	m.file = openFile(t, m.clock)
	m.target = openSQLite(t, m.clock)
	return m
}

func openFile(t *testing.T, clock *outboxtest.Clock) *Store {
	s, err := Open(filepath.Join(t.TempDir(), "outbox.json"), Options{Clock: clock.Now})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, s.Close()) })
	return s
}

func openSQLite(t *testing.T, clock *outboxtest.Clock) *sqlstore.Store {
	db, err := sql.Open("sqlite", dialect.SQLiteDSN(filepath.Join(t.TempDir(), "app.db")))
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	return openSQL(t, db, dialect.SQLite(), clock)
}

func openSQL(t *testing.T, db *sql.DB, d dialect.Dialect, clock *outboxtest.Clock) *sqlstore.Store {
	require.NoError(t, migrations.Up(t.Context(), db, d))
	s, err := sqlstore.New(db, d, sqlstore.Options{Clock: clock.Now})
	require.NoError(t, err)
	return s
}

func journalOf(t testing.TB, s outbox.JournalStore) *outbox.Journal {
	j, err := outbox.NewJournal(s, outbox.JournalOptions{Channel: mails})
	require.NoError(t, err)
	return j
}

// mover moves from file to the database given.
func (m *moving) mover(file moveSource, to Target, o MoveOptions) *mover {
	return &mover{from: file, to: to, path: "/var/lib/agent/outbox.json", now: m.clock.Now, o: o}
}

func (m *moving) move(o MoveOptions) (Moved, error) {
	return m.mover(m.file, m.target, o).move(m.t.Context())
}

func (m *moving) add(s outbox.JournalStore, ms ...outbox.Message) {
	m.t.Helper()
	for _, msg := range ms {
		if msg.Payload == nil {
			msg.Payload = []byte(msg.Key)
		}
		r, err := journalOf(m.t, s).Add(m.t.Context(), msg)
		require.NoError(m.t, err)
		require.True(m.t, r.Created)
	}
}

// end begins the message of a key and settles it: as sent where how is nil.
func (m *moving) end(s outbox.JournalStore, key string, how error) {
	m.t.Helper()
	j := journalOf(m.t, s)
	r, err := j.Begin(m.t.Context(), key, time.Minute)
	require.NoError(m.t, err)
	if how == nil {
		require.NoError(m.t, j.MarkSent(m.t.Context(), r.Lease, "ref-"+key))
		return
	}
	require.NoError(m.t, j.MarkFailed(m.t.Context(), r.Lease, how))
}

// relay sends all that is due in a store, as a program that runs on it would,
// with a relay that keeps nothing of what it sent, and never sends twice by itself.
func (m *moving) relay(ctx context.Context, s outbox.JournalStore) {
	m.t.Helper()
	r, err := outbox.NewRelay(outbox.RelayOptions{Logger: slog.New(slog.DiscardHandler)}, journalOf(m.t, s).Sender(func(_ context.Context, r *outbox.Record) (string, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.sent[r.Key]++
		return "", nil
	}, outbox.SendOptions{Retention: outbox.DeleteOnSent, OnUnknown: outbox.Park}))
	require.NoError(m.t, err)
	_, err = r.Flush(ctx)
	require.NoError(m.t, err)
}

// states returns what a store holds: "state group ref code" of each key.
func (m *moving) states(s outbox.JournalStore) map[string]string {
	m.t.Helper()
	rs, after, err := journalOf(m.t, s).List(m.t.Context(), outbox.Filter{All: true, Limit: 10_000})
	require.NoError(m.t, err)
	require.Empty(m.t, after)
	got := map[string]string{}
	for _, r := range rs {
		got[r.Key] = fmt.Sprintf("%s %s %s %s", r.State, r.Group, r.Ref, r.Code)
	}
	return got
}

// everything fills a store with messages in all states.
func (m *moving) everything(s outbox.JournalStore) {
	m.t.Helper()
	m.add(s,
		outbox.Message{Key: "sent"}, outbox.Message{Key: "sent in g", Group: "g"},
		outbox.Message{Key: "pending", Header: outbox.Header{"tenant": "t"}, Payload: []byte{0, 0xff}},
		outbox.Message{Key: "later", Delay: time.Hour},
		outbox.Message{Key: "failed"}, outbox.Message{Key: "dead"}, outbox.Message{Key: "unknown"}, outbox.Message{Key: "interrupted"}, outbox.Message{Key: "doubtful"},
		outbox.Message{Key: "g1", Group: "g"}, outbox.Message{Key: "g2", Group: "g"},
		outbox.Message{Key: "dead in h", Group: "h"}, outbox.Message{Key: "h2", Group: "h"},
	)
	m.end(s, "sent", nil)
	m.end(s, "sent in g", nil)
	m.end(s, "failed", outbox.WithCode("busy", outbox.RetryAfter(2*time.Hour, errors.New("greylisted"))))
	m.end(s, "dead", outbox.WithCode("smtp-550", outbox.Permanent(errors.New("no mailbox"))))
	m.end(s, "dead in h", outbox.Permanent(errors.New("no mailbox")))
	m.end(s, "unknown", outbox.Unknown(errors.New("connection reset")))
	_, err := journalOf(m.t, s).Begin(m.t.Context(), "interrupted", time.Minute)
	require.NoError(m.t, err)
	r, err := journalOf(m.t, s).Begin(m.t.Context(), "doubtful", time.Minute)
	require.NoError(m.t, err)
	rs, err := s.Settle(m.t.Context(), outbox.Channel{System: outbox.SystemJournal, Name: mails}, []outbox.Settlement{{
		Row: outbox.Row{Key: "doubtful", Token: r.Lease.Token}, Outcome: outbox.OutcomeRetry, Doubt: outbox.DoubtRaised, Error: "timeout",
	}})
	require.NoError(m.t, err)
	require.Equal(m.t, []outbox.Result{outbox.ResultDone}, rs)
	m.clock.Advance(time.Minute + time.Second)
}

// Of everything, what stays as it is in the end.
var endsAs = map[string]string{
	"sent": "sent  ref-sent ", "sent in g": "sent g ref-sent in g ",
	"dead": "dead   smtp-550", "dead in h": "dead h  ", "h2": "pending h  ", "unknown": "unknown   ", "interrupted": "unknown   ", "doubtful": "unknown   ",
}

func TestMoveKeepsEveryStateAndTheOrder(t *testing.T) {
	test := func(t *testing.T, m *moving) {
		m.everything(m.file)
		due := m.clock.Now()
		var progress []int
		moved, err := m.move(MoveOptions{Progress: func(n int) { progress = append(progress, n) }})
		require.NoError(t, err)
		require.Equal(t, Moved{Channels: []MovedChannel{{Channel: mails, Pending: 6, Sent: 2, Dead: 2, Unknown: 3, Interrupted: 1}}}, moved)
		require.Equal(t, 13, moved.Messages())
		require.Equal(t, []int{13}, progress)
		require.Empty(t, m.states(m.file))
		for _, s := range []outbox.JournalStore{m.file, m.target} {
			stats, err := s.Stats(t.Context())
			require.NoError(t, err)
			for _, st := range stats {
				require.Zero(t, st.Paused)
			}
		}

		j := journalOf(t, m.target)
		r, err := j.Get(t.Context(), "pending")
		require.NoError(t, err)
		require.Equal(t, []byte{0, 0xff}, r.Payload)
		require.Equal(t, outbox.Header{"tenant": "t"}, r.Header)
		require.Equal(t, outbox.StatePending, r.State)
		for key, want := range map[string]time.Time{"later": due.Add(time.Hour - time.Minute - time.Second), "failed": due.Add(2*time.Hour - time.Minute - time.Second)} {
			r, err := j.Get(t.Context(), key)
			require.NoError(t, err)
			require.Equal(t, want, r.Due, key)
			require.Zero(t, r.Attempt)
		}
		r, err = j.Get(t.Context(), "dead")
		require.NoError(t, err)
		require.Contains(t, r.LastError, "no mailbox")
		put, err := j.Add(t.Context(), outbox.Message{Key: "sent in g", Group: "g", Payload: []byte("sent in g")})
		require.NoError(t, err)
		require.False(t, put.Created, "a key that was sent is known")
		require.False(t, put.Differs)

		m.clock.Advance(3 * time.Hour)
		m.relay(t.Context(), m.target)
		require.Equal(t, map[string]int{"pending": 1, "later": 1, "failed": 1, "g1": 1, "g2": 1}, m.sent)
		require.Equal(t, endsAs, m.states(m.target))
	}
	t.Run("to SQLite", func(t *testing.T) { test(t, newMoving(t)) })
	t.Run("to Postgres", func(t *testing.T) {
		if testing.Short() {
			t.Skip("-short leaves Postgres out")
		}
		m := newMoving(t)
		m.target = openSQL(t, pgtest.Open(t), dialect.Postgres(), m.clock)
		test(t, m)
	})
}

func TestMoveKeepsTheOrderOfGroups(t *testing.T) {
	m := newMoving(t)
	var want []string
	for i := range moveBatch + 50 {
		key := fmt.Sprintf("%04d", i)
		m.add(m.file, outbox.Message{Key: key, Group: "g"})
		want = append(want, key)
	}
	moved, err := m.move(MoveOptions{})
	require.NoError(t, err)
	require.Equal(t, len(want), moved.Channels[0].Pending)
	var got []string
	relay, err := outbox.NewRelay(outbox.RelayOptions{Logger: slog.New(slog.DiscardHandler)}, journalOf(t, m.target).Sender(func(_ context.Context, r *outbox.Record) (string, error) {
		got = append(got, r.Key)
		return "", nil
	}, outbox.SendOptions{}))
	require.NoError(t, err)
	_, err = relay.Flush(t.Context())
	require.NoError(t, err)
	require.Equal(t, want, got)
}

// crash lets a process die at one of its steps, before or after the step took
// effect: from then on nothing works.
type crash struct {
	mu      sync.Mutex
	at      int // 0: never
	after   bool
	step    int
	dead    bool
	inside  bool   // of a transaction of the target
	between func() // called between any two steps
}

var errCrash = errors.New("the process died")

func (c *crash) run(f func() error) error {
	c.mu.Lock()
	c.step++
	now := c.step == c.at
	before := now && !c.after || c.dead
	c.dead = c.dead || now
	quiet := c.inside || c.between == nil
	c.mu.Unlock()
	if before {
		return errCrash
	}
	if err := f(); err != nil {
		return err
	}
	if !quiet {
		c.between()
	}
	if now {
		return errCrash
	}
	return nil
}

func (c *crash) enter(inside bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inside = inside
}

type crashingFile struct {
	moveSource
	*crash
}

func (c crashingFile) Pause(ctx context.Context, channel string, d time.Duration, reason string) error {
	return c.run(func() error { return c.moveSource.Pause(ctx, channel, d, reason) })
}

func (c crashingFile) ListMessages(ctx context.Context, tx outbox.Tx, channel string, l outbox.MessageList) (rows []outbox.Row, err error) {
	err = c.run(func() error { rows, err = c.moveSource.ListMessages(ctx, tx, channel, l); return err })
	return rows, err
}

func (c crashingFile) forget(ctx context.Context, channel string, rows []outbox.Row) error {
	return c.run(func() error { return c.moveSource.forget(ctx, channel, rows) })
}

func (c crashingFile) Settle(ctx context.Context, ch outbox.Channel, ss []outbox.Settlement) (rs []outbox.Result, err error) {
	err = c.run(func() error { rs, err = c.moveSource.Settle(ctx, ch, ss); return err })
	return rs, err
}

type crashingTarget struct {
	Target
	*crash
}

func (c crashingTarget) Pause(ctx context.Context, channel string, d time.Duration, reason string) error {
	return c.run(func() error { return c.Target.Pause(ctx, channel, d, reason) })
}

func (c crashingTarget) Transact(ctx context.Context, o *sql.TxOptions, f func(*sql.Tx) error) error {
	return c.run(func() error {
		return c.Target.Transact(ctx, o, func(tx *sql.Tx) error {
			c.enter(true)
			defer c.enter(false)
			return f(tx)
		})
	})
}

func (c crashingTarget) PutRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.PutRow, begin time.Duration) (as []outbox.PutAnswer, err error) {
	err = c.run(func() error { as, err = c.Target.PutRows(ctx, tx, channel, rows, begin); return err })
	return as, err
}

func (c crashingTarget) SettleMessages(ctx context.Context, tx outbox.Tx, channel string, ss []outbox.Settlement) (rs []outbox.Result, err error) {
	err = c.run(func() error { rs, err = c.Target.SettleMessages(ctx, tx, channel, ss); return err })
	return rs, err
}

// The process may die at every step of a move, before and after its effect,
// while a relay runs on the database all the time and, after the crash, one on
// the file too: nothing is lost and nothing sent twice.
func TestMoveSurvivesACrashAtEveryStep(t *testing.T) {
	for _, after := range []bool{false, true} {
		t.Run(map[bool]string{false: "before", true: "after"}[after], func(t *testing.T) {
			t.Parallel()
			steps := 0
			for crashAt(t, newMoving(t), steps+1, after) {
				steps++
			}
			require.Greater(t, steps, 15)
		})
	}
	t.Run("after, to Postgres", func(t *testing.T) {
		if testing.Short() {
			t.Skip("-short leaves Postgres out")
		}
		t.Parallel()
		db := pgtest.Open(t)
		for step := 1; ; step++ {
			m := newMoving(t)
			m.target = openSQL(t, db, dialect.Postgres().In("", fmt.Sprintf("o%d_", step)), m.clock)
			if !crashAt(t, m, step, true) {
				break
			}
		}
	})
}

// crashAt reports whether there was a step to die at.
func crashAt(t *testing.T, m *moving, at int, after bool) bool {
	m.everything(m.file)
	c := &crash{at: at, after: after, between: func() { m.relay(context.Background(), m.target) }}
	_, err := m.mover(crashingFile{m.file, c}, crashingTarget{m.target, c}, MoveOptions{}).move(t.Context())
	if !c.dead {
		require.NoError(t, err)
	} else {
		require.ErrorIs(t, err, errCrash)
		m.relay(t.Context(), m.target)
		m.relay(t.Context(), m.file)
		_, err = m.move(MoveOptions{})
		require.NoError(t, err)
	}
	require.Empty(t, m.states(m.file))
	m.clock.Advance(3 * time.Hour)
	m.relay(t.Context(), m.target)
	require.Equal(t, map[string]int{"pending": 1, "later": 1, "failed": 1, "g1": 1, "g2": 1}, m.sent, "step %d", at)
	require.Equal(t, endsAs, m.states(m.target), "step %d", at)
	for _, s := range []outbox.JournalStore{m.file, m.target} {
		stats, err := s.Stats(t.Context())
		require.NoError(t, err)
		for _, st := range stats {
			require.Zero(t, st.Paused, "step %d", at)
		}
	}
	return c.dead
}
