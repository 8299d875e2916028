package integration

import (
	"context"
	"database/sql"
	"fmt"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// TestFieldTablesChangeUnderRunningProcesses is field case S46: what a later
// release's migration, or a person, does to the tables while statements that
// were prepared before it are in use. Nothing that a caller or a relay does may
// fail for it: an error would lose the caller's transaction.
func TestFieldTablesChangeUnderRunningProcesses(t *testing.T) {
	t.Run("sqlite", func(t *testing.T) {
		t.Parallel()
		dsn := strings.Replace(dialect.SQLiteDSN(filepath.Join(t.TempDir(), "app.db")), "synchronous(FULL)", "synchronous(OFF)", 1)
		changeTables(t, newSite(t, dialect.SQLite(), "sqlite", dsn), []string{
			`ALTER TABLE {t:entries} ADD COLUMN extra text`, `ALTER TABLE {t:messages} ADD COLUMN extra integer NOT NULL DEFAULT 7`,
			`ALTER TABLE {t:groups} ADD COLUMN extra text`, `ALTER TABLE {t:channels} ADD COLUMN extra text`,
			`ANALYZE`, `ALTER TABLE {t:messages} DROP COLUMN extra`,
		})
	})
	if testing.Short() {
		return
	}
	for _, mode := range []string{"cache_statement", "cache_describe"} {
		t.Run("postgres "+mode, func(t *testing.T) {
			t.Parallel()
			s := newSite(t, dialect.Postgres(), "pgx", withParameter(t, pgtest.DSN(t), "default_query_exec_mode", mode))
			changeTables(t, s, []string{
				`ALTER TABLE {t:entries} ADD COLUMN extra text`, `ALTER TABLE {t:messages} ADD COLUMN extra integer NOT NULL DEFAULT 7`,
				`ALTER TABLE {t:groups} ADD COLUMN extra text`, `ALTER TABLE {t:channels} ADD COLUMN extra text`,
				`CREATE INDEX field_entries ON {t:entries} (staged_at)`, `CREATE INDEX field_messages ON {t:messages} (created_at)`,
				`DROP INDEX {schema}.field_entries`, `DROP INDEX {schema}.field_messages`,
				`ALTER TABLE {t:messages} DROP COLUMN extra`, `ANALYZE`,
			})
		})
	}
}

// changeTables makes the changes one by one while values are staged and
// messages put, relayed and looked at.
func changeTables(t *testing.T, s *site, changes []string) {
	t.Helper()
	var w witness
	var r receiver
	book := new(logbook)
	l, j := s.latest("states"), s.journal("mail")
	stop := s.run(book.options(), l.Publisher(w.publish, outbox.PublishOptions{BatchSize: 3}), j.Sender(r.send, outbox.SendOptions{BatchSize: 3}))

	ctx, cancel := context.WithCancel(t.Context())
	var writers sync.WaitGroup
	var mu sync.Mutex
	written := 0
	progress := func() int { mu.Lock(); defer mu.Unlock(); return written }
	db := s.open() // whose statements were prepared before the changes
	for n := range 2 {
		writers.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				if r.len() < 2*progress()-20 { // SQLite's one writer takes no turns: let the relay have it
					time.Sleep(time.Millisecond)
					continue
				}
				key := fmt.Sprint(n, " ", i)
				err := inTx(db, func(tx *sql.Tx) error {
					_, err := l.Stage(context.Background(), tx, key, "x")
					if err == nil {
						_, err = l.StageMany(context.Background(), tx, []outbox.Item[string]{{Key: key, Value: "y"}, {Key: key + "b", Value: "y"}})
					}
					if err == nil {
						_, err = j.PutMany(context.Background(), tx, []outbox.Message{{Key: key, Group: "g"}, {Key: key + "b"}})
					}
					if err == nil {
						_, err = j.Put(context.Background(), tx, outbox.Message{Key: key})
					}
					return err
				})
				if err != nil {
					t.Errorf("transaction %s: %v", key, err)
					return
				}
				mu.Lock()
				written++
				mu.Unlock()
			}
		})
	}
	look := func() {
		_, err := s.store.Stats(t.Context())
		require.NoError(t, err)
		_, _, err = j.List(t.Context(), outbox.Filter{Limit: 5, Payload: true})
		require.NoError(t, err)
		_, err = l.List(t.Context(), "", 5)
		require.NoError(t, err)
	}
	person := s.open()
	for _, change := range changes {
		before, sent := progress(), r.len()
		look()
		eventually(t, "work between the changes", func() bool { return progress() > before+3 && r.len() > sent || t.Failed() })
		eventually(t, change, func() bool {
			_, err := person.Exec(s.dialect.Render(change))
			require.True(t, err == nil || s.store.Retryable(err), "%s: %v", change, err)
			return err == nil
		})
		look()
	}
	last := r.len()
	eventually(t, "work after the changes", func() bool { return r.len() > last+3 || t.Failed() })
	cancel()
	writers.Wait()
	eventually(t, "all to be delivered", func() bool { return s.empty() && s.unfinished() == 0 })
	require.NoError(t, stop())
	require.Len(t, w.newest(), 2*written)
	require.Len(t, r.all(), 2*written, "each message once")
	require.Len(t, r.times(), 2*written)
	require.Empty(t, book.of(outbox.EventLost))
	require.Empty(t, book.noise())
}

// inTx runs f in a transaction of a pool of the test's choice.
func inTx(db *sql.DB, f func(tx *sql.Tx) error) error {
	tx, err := db.Begin()
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// TestFieldSweepsByHandSendNoMessageTwice is field cases S82, S83 and S87:
// operators retry everything, purge everything and flush, each several at once
// and again and again, while messages are in flight. None is sent twice, none is
// deleted before it was sent, and nobody deadlocks.
func TestFieldSweepsByHandSendNoMessageTwice(t *testing.T) {
	const operators = 3
	onBothUnsynced(t, func(t *testing.T, s *site) {
		n := 600
		if !s.postgres() {
			n = 240
		}
		j := s.journal("mail")
		ms := append(letters("plain", n/2, 0), letters("grouped", n/2, 20)...)
		s.put(j, ms...)
		var r receiver
		slow := func(ctx context.Context, m *outbox.Record) (string, error) {
			time.Sleep(5 * time.Millisecond)
			return r.send(ctx, m)
		}
		book := new(logbook)
		stop := s.senders(2, book, "mail", slow, outbox.SendOptions{})
		ctx, cancel := context.WithCancel(t.Context())
		purged := make([]int64, operators)
		var sweeps sync.WaitGroup
		for i := range operators {
			mine := s.journal("mail")
			byHand, err := outbox.NewRelay(book.options(), mine.Sender(slow, outbox.SendOptions{BatchSize: 10}))
			require.NoError(t, err)
			sweeps.Go(func() {
				for ctx.Err() == nil {
					_, err := mine.Retry(context.Background(), outbox.Filter{All: true})
					if err != nil {
						t.Errorf("retry: %v", err)
						return
					}
					gone, err := mine.Purge(context.Background(), time.Now().Add(time.Hour))
					if purged[i] += gone; err != nil {
						t.Errorf("purge: %v", err)
						return
					}
					if _, err := byHand.Flush(context.Background()); err != nil {
						t.Errorf("flush: %v", err)
						return
					}
				}
			})
		}
		eventually(t, "all to be sent and settled", func() bool { return r.len() >= n && s.unfinished() == 0 || t.Failed() })
		cancel()
		sweeps.Wait()
		stop()
		require.Equal(t, each(1, keysOf(ms)...), r.times())
		total := int64(len(s.records(j)))
		for _, gone := range purged {
			total += gone
		}
		require.EqualValues(t, n, total, "each was deleted once, if at all")
		require.Empty(t, book.of(outbox.EventLost))
		require.Empty(t, book.of(outbox.EventTrouble))
	})
}
