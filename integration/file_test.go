package integration

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// inMemory opens a database in memory with a pool of a size.
func inMemory(t *testing.T, dsn string, connections int) *site {
	s := &site{t: t, dialect: dialect.SQLite(), driver: "sqlite", dsn: dsn}
	db, err := sql.Open("sqlite", dsn)
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	db.SetMaxOpenConns(connections)
	s.db = db
	s.store, err = sqlstore.New(db, s.dialect, sqlstore.Options{})
	require.NoError(t, err)
	return s
}

// A database in memory is each connection's own and goes when that is closed:
// refused with a pool, while a pool of one connection that stays works.
func TestSQLiteInMemoryIsRefusedWithAPool(t *testing.T) {
	for _, dsn := range []string{":memory:", "file::memory:?cache=shared", ""} {
		t.Run(dsn, func(t *testing.T) {
			many := inMemory(t, dsn, 0)
			conn, err := many.db.Conn(t.Context()) // keeps what cache=shared shares
			require.NoError(t, err)
			defer conn.Close()
			one := inMemory(t, dsn, 1)
			install(t, one.db, one.dialect)
			if dsn != "file::memory:?cache=shared" {
				require.ErrorIs(t, many.store.Check(t.Context()), outbox.ErrSchema, "another connection sees no tables")
			} else {
				require.ErrorContains(t, many.store.Check(t.Context()), "SetMaxOpenConns(1)")
			}
			one.round(t)
		})
	}
}

// What a DSN lacks is found, and said with the remedy.
func TestSQLiteFindingsNameTheRemedy(t *testing.T) {
	full := dialect.SQLiteDSN(filepath.Join(t.TempDir(), "app.db"))
	s := newSite(t, dialect.SQLite(), "sqlite", full)
	for _, test := range []struct {
		without, with, remedy string
		fault                 bool
	}{
		{"", "", "", false},
		{"_txlock=immediate&", "", "_txlock=immediate", false},
		{"_pragma=busy_timeout(5000)&", "", "busy_timeout", true},
		{"synchronous(FULL)", "synchronous(NORMAL)", "synchronous", false},
	} {
		dsn := full
		if test.without != "" {
			require.Contains(t, full, test.without)
			dsn = strings.Replace(full, test.without, test.with, 1)
		}
		db, err := sql.Open("sqlite", dsn)
		require.NoError(t, err)
		store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		fs, err := store.Findings(t.Context())
		require.NoError(t, err)
		require.NoError(t, db.Close())
		if test.remedy == "" {
			require.Empty(t, fs)
			continue
		}
		require.Len(t, fs, 1, dsn)
		require.Contains(t, fs[0].Text, test.remedy)
		require.Equal(t, test.fault, fs[0].Fault)
	}
}

func TestSQLiteFindsARollbackJournal(t *testing.T) {
	dsn := strings.Replace(dialect.SQLiteDSN(filepath.Join(t.TempDir(), "app.db")), "journal_mode(WAL)", "journal_mode(DELETE)", 1)
	s := newSite(t, dialect.SQLite(), "sqlite", dsn)
	fs, err := s.store.Findings(t.Context())
	require.NoError(t, err)
	require.Len(t, fs, 1)
	require.Contains(t, fs[0].Text, "journal_mode")
	s.round(t)
}

// No reader stays open: the write-ahead log is reset while a relay works, a
// destination is slow, and somebody reads the stats and lists all the time.
func TestSQLiteWriteAheadLogStaysBounded(t *testing.T) {
	const rounds, each, limit = 100 / raceFactor / raceFactor, 50, 15 << 20
	s := onSQLite(t)
	l := s.latest("")
	relay, err := outbox.NewRelay(new(logbook).options(), l.Publisher(func(context.Context, []*outbox.Entry[string]) error {
		time.Sleep(time.Millisecond)
		return nil
	}, outbox.PublishOptions{}))
	require.NoError(t, err)
	ctx, cancel := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := relay.Run(ctx); err != nil {
			t.Error(err)
		}
	})
	wg.Go(func() {
		for ctx.Err() == nil {
			_, err := relay.Stats(ctx)
			_, err2 := l.List(ctx, "", 1000)
			if ctx.Err() == nil && (err != nil || err2 != nil) {
				t.Error(err, err2)
			}
			time.Sleep(50 * time.Millisecond)
		}
	})
	written, highest := 0, int64(0)
	value := strings.Repeat("v", 16_000)
	for round := range rounds {
		items := make([]outbox.Item[string], each)
		for i := range items {
			items[i] = outbox.Item[string]{Key: fmt.Sprintf("%d-%d", round, i), Value: value}
		}
		tx := s.begin()
		_, err := l.StageMany(t.Context(), tx, items)
		require.NoError(t, err)
		require.NoError(t, tx.Commit())
		written += each * len(value)
		wal, err := os.Stat(s.file() + "-wal")
		require.NoError(t, err)
		highest = max(highest, wal.Size())
	}
	eventually(t, "all to be settled", s.empty)
	cancel()
	wg.Wait()
	t.Logf("%d bytes of values, at most %d in the log", written, highest)
	require.Less(t, highest, int64(limit), "of %d bytes of values alone, each written, claimed and deleted", written)
}

// file returns the path of a SQLite database.
func (s *site) file() (path string) {
	require.NoError(s.t, s.db.QueryRow(`SELECT file FROM pragma_database_list WHERE name = 'main'`).Scan(&path))
	return path
}
