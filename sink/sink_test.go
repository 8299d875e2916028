package sink_test

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

func openSQLite(t testing.TB) *sql.DB {
	db, err := sql.Open("sqlite", dialect.SQLiteDSN(filepath.Join(t.TempDir(), "sink.db")))
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	require.NoError(t, db.Ping()) // one connection alone makes a new file a WAL one: two at once get SQLITE_BUSY
	return db
}

// openPostgres opens an empty database with one of pgx's query modes.
func openPostgres(t testing.TB, mode pgx.QueryExecMode) *sql.DB {
	config, err := pgx.ParseConfig(pgtest.DSN(t))
	require.NoError(t, err)
	config.DefaultQueryExecMode = mode
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { db.Close() })
	return db
}

// each runs a test on both databases; with -short on SQLite alone.
func each(t *testing.T, f func(t *testing.T, db *sql.DB, d dialect.Dialect)) {
	t.Run("sqlite", func(t *testing.T) { f(t, openSQLite(t), dialect.SQLite()) })
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) {
			f(t, openPostgres(t, pgx.QueryExecModeCacheStatement), dialect.Postgres())
		})
	}
}

// eachMode is each with every query mode of pgx.
func eachMode(t *testing.T, f func(t *testing.T, db *sql.DB, d dialect.Dialect)) {
	each(t, f)
	if testing.Short() {
		return
	}
	for _, mode := range []pgx.QueryExecMode{
		pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec,
		pgx.QueryExecModeExec, pgx.QueryExecModeSimpleProtocol,
	} {
		t.Run("postgres "+mode.String(), func(t *testing.T) { f(t, openPostgres(t, mode), dialect.Postgres()) })
	}
}

func newSink(t testing.TB, db *sql.DB, d dialect.Dialect, o sink.Options) *sink.Sink {
	t.Helper()
	if o.Table == "" {
		o.Table = "projections"
	}
	s, err := sink.New(db, d, o)
	require.NoError(t, err)
	require.NoError(t, s.Create(t.Context()))
	require.NoError(t, s.Check(t.Context()))
	return s
}

func live(key string, version int64) sink.Row {
	return sink.Row{Key: key, Version: version, Payload: fmt.Appendf(nil, "%s@%d", key, version)}
}

func gone(key string, version int64) sink.Row {
	return sink.Row{Key: key, Version: version, Deleted: true}
}

func apply(t *testing.T, s *sink.Sink, applied, stale int, rows ...sink.Row) {
	t.Helper()
	result, err := s.Apply(t.Context(), rows)
	require.NoError(t, err)
	require.Equal(t, sink.Result{Applied: applied, Stale: stale}, result)
}

func requireRow(t *testing.T, s *sink.Sink, want sink.Row) {
	t.Helper()
	have, err := s.Get(t.Context(), want.Key)
	require.NoError(t, err)
	require.Equal(t, want, have)
}

func TestNewerVersionReplacesAndOlderIsStale(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		apply(t, s, 0, 0)
		apply(t, s, 2, 0, live("a", 5), live("b", 6))
		apply(t, s, 1, 1, live("b", 7), live("a", 4))
		requireRow(t, s, live("a", 5))
		requireRow(t, s, live("b", 7))

		again := sink.Row{Key: "a", Version: 5, Payload: []byte("another value under the same version")}
		apply(t, s, 0, 1, again)
		requireRow(t, s, live("a", 5))
	})
}

func TestTombstoneOutlivesALateWrite(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		apply(t, s, 1, 0, live("a", 1))
		apply(t, s, 1, 0, sink.Row{Key: "a", Version: 3, Deleted: true, Payload: []byte("a zero value, encoded")})
		requireRow(t, s, gone("a", 3))
		apply(t, s, 0, 1, live("a", 2))
		requireRow(t, s, gone("a", 3))
		apply(t, s, 1, 0, gone("unseen", 4))
		apply(t, s, 0, 1, live("unseen", 2))
		requireRow(t, s, gone("unseen", 4))
		apply(t, s, 1, 0, live("a", 5))
		requireRow(t, s, live("a", 5))
	})
}

func TestKeyGivenTwiceKeepsItsHighestVersion(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		apply(t, s, 2, 3, live("a", 2), live("b", 1), live("a", 9), gone("a", 4), live("a", 3))
		requireRow(t, s, live("a", 9))
		requireRow(t, s, live("b", 1))
	})
}

func TestPayloadIsKeptByteForByte(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		all := make([]byte, 256)
		for i := range all {
			all[i] = byte(i)
		}
		rows := []sink.Row{
			{Key: "nil", Version: 1},
			{Key: "empty", Version: 1, Payload: []byte{}},
			{Key: "all bytes", Version: 1, Payload: all},
			{Key: `quo"te's, {comma} \ $1 ?1 NULL é 😀`, Version: 1, Payload: []byte(`"'\,{}NULL$1?`)},
			{Key: "NULL", Version: 1<<53 - 1, Payload: []byte("NULL")},
			{Key: "large", Version: 1<<63 - 1, Payload: slices.Repeat(all, 4096)},
		}
		apply(t, s, len(rows), 0, rows...)
		for _, row := range rows {
			requireRow(t, s, row)
		}
	})
}

func TestTenThousandRowsInOneCall(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		rows := make([]sink.Row, 10_000)
		for i := range rows {
			rows[i] = live(fmt.Sprint("key ", i), int64(i+1))
		}
		apply(t, s, 10_000, 0, rows...)
		apply(t, s, 0, 10_000, rows...)
		requireRow(t, s, rows[9_999])
	})
}

// Ten relays that hold every version of a few keys and publish them in any
// order, one or several at a time, must leave the highest of each.
func TestGuardHoldsBetweenConcurrentWriters(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		const keys, versions, writers = 4, 150, 10
		s := newSink(t, db, d, sink.Options{})
		db.SetMaxOpenConns(writers)
		var rows []sink.Row
		want := map[string]sink.Row{}
		for k := range keys {
			for v := range versions {
				row := live(fmt.Sprint("key ", k), int64(1+v*keys+k))
				if (v+k)%3 == 0 {
					row = gone(row.Key, row.Version)
				}
				rows = append(rows, row)
				want[row.Key] = row
			}
		}
		rand.Shuffle(len(rows), func(i, j int) { rows[i], rows[j] = rows[j], rows[i] })
		var wg sync.WaitGroup
		failed := make(chan error, len(rows))
		for w := range writers {
			wg.Go(func() {
				mine := rows[w*len(rows)/writers : (w+1)*len(rows)/writers]
				for len(mine) > 0 {
					n := min(1+rand.IntN(8), len(mine))
					if _, err := s.Apply(t.Context(), mine[:n]); err != nil {
						failed <- err
					}
					mine = mine[n:]
				}
			})
		}
		wg.Wait()
		close(failed)
		require.Empty(t, failed, "%v", firstOf(failed))
		for _, row := range want {
			requireRow(t, s, row)
		}
	})
}

func firstOf(errs <-chan error) error {
	for err := range errs {
		return err
	}
	return nil
}

func TestPurgeDeletesOldTombstonesOnly(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		apply(t, s, 3, 0, live("live", 1), gone("old", 2), gone("young", 3))
		backdate := `UPDATE projections SET deleted_at = deleted_at - 3600000000, updated_at = 0 WHERE key <> 'young'`
		if d.Name() == "postgres" {
			backdate = `UPDATE projections SET deleted_at = deleted_at - interval '1h', updated_at = 'epoch' WHERE key <> 'young'`
		}
		_, err := db.Exec(backdate)
		require.NoError(t, err)

		n, err := s.Purge(t.Context(), 2*time.Hour)
		require.NoError(t, err)
		require.Zero(t, n)
		n, err = s.Purge(t.Context(), 30*time.Minute)
		require.NoError(t, err)
		require.Equal(t, 1, n)
		requireRow(t, s, live("live", 1))
		requireRow(t, s, gone("young", 3))
		_, err = s.Get(t.Context(), "old")
		require.ErrorIs(t, err, sink.ErrNotFound)

		_, err = s.Purge(t.Context(), 0)
		require.ErrorIs(t, err, sink.ErrInvalid)
	})
}

func TestPurgeGoesOnBeyondOneChunk(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{})
		rows := make([]sink.Row, 2_500)
		for i := range rows {
			rows[i] = gone(fmt.Sprint(i), 1)
		}
		apply(t, s, len(rows), 0, rows...)
		time.Sleep(2 * time.Millisecond) // tombstones must be older than the shortest age
		n, err := s.Purge(t.Context(), time.Microsecond)
		require.NoError(t, err)
		require.Equal(t, len(rows), n)
	})
}

func TestCreateByManyAtOnceAndAgain(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s, err := sink.New(db, d, sink.Options{Table: "projections"})
		require.NoError(t, err)
		var wg sync.WaitGroup
		failed := make(chan error, 10)
		for range cap(failed) {
			wg.Go(func() {
				if err := s.Create(t.Context()); err != nil {
					failed <- err
				}
			})
		}
		wg.Wait()
		close(failed)
		require.NoError(t, firstOf(failed))
		apply(t, s, 1, 0, live("a", 1))
		require.NoError(t, s.Create(t.Context()))
		requireRow(t, s, live("a", 1))
	})
}

func TestOddNamesAreQuoted(t *testing.T) {
	eachMode(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		o := sink.Options{
			Table: `Or"der's {version} $1 ?1`, Key: sink.Column{Name: "select"}, Version: `ver"sion`,
			DeletedAt: "{value}", UpdatedAt: "updated at", Value: "group",
		}
		if d.Name() == "postgres" {
			o.Schema = `odd "schema"`
			_, err := db.Exec(`CREATE SCHEMA "odd ""schema"""`)
			require.NoError(t, err)
		}
		s := newSink(t, db, d, o)
		apply(t, s, 1, 0, live("a", 2))
		apply(t, s, 0, 1, live("a", 1))
		requireRow(t, s, live("a", 2))
		_, err := s.Purge(t.Context(), time.Hour)
		require.NoError(t, err)
	})
}

func TestSinksOfTwoTablesDoNotMeet(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		one := newSink(t, db, d, sink.Options{Table: "one"})
		two := newSink(t, db, d, sink.Options{Table: "two"})
		apply(t, one, 1, 0, live("a", 2))
		apply(t, two, 1, 0, live("a", 1))
		requireRow(t, one, live("a", 2))
		requireRow(t, two, live("a", 1))
	})
}

func TestWithoutUpdatedAt(t *testing.T) {
	each(t, func(t *testing.T, db *sql.DB, d dialect.Dialect) {
		s := newSink(t, db, d, sink.Options{UpdatedAt: sink.NoColumn})
		apply(t, s, 1, 0, live("a", 1))
		requireRow(t, s, live("a", 1))
		_, err := db.ExecContext(context.Background(), `SELECT updated_at FROM projections`)
		require.Error(t, err)
	})
}

func TestJSONMakesARowOfAnEntry(t *testing.T) {
	type version int64
	row, err := sink.JSON("k", version(7), false, map[string]int{"n": 1})
	require.NoError(t, err)
	require.Equal(t, sink.Row{Key: "k", Version: 7, Payload: []byte(`{"n":1}`)}, row)
	row, err = sink.JSON("k", version(8), true, func() {})
	require.NoError(t, err)
	require.Equal(t, gone("k", 8), row)
	_, err = sink.JSON("k", version(9), false, func() {})
	require.ErrorContains(t, err, `key "k"`)
}

func TestOptionsAreCheckedByNew(t *testing.T) {
	db := openSQLite(t)
	for name, o := range map[string]sink.Options{
		"no table":       {},
		"control":        {Table: "a\x00b"},
		"not UTF-8":      {Table: "a\xff"},
		"too long":       {Table: strings.Repeat("x", 64)},
		"same twice":     {Table: "t", Version: "key"},
		"column twice":   {Table: "t", Columns: []sink.Column{{Name: "a"}, {Name: "a"}}},
		"column is key":  {Table: "t", Columns: []sink.Column{{Name: "key"}}},
		"unnamed column": {Table: "t", Columns: []sink.Column{{Type: "text"}}},
		"type":           {Table: "t", Columns: []sink.Column{{Name: "a", Type: "text; DROP"}}},
		"field":          {Table: "t", Columns: []sink.Column{{Name: "a", Field: `b"`}}},
	} {
		t.Run(name, func(t *testing.T) {
			_, err := sink.New(db, dialect.Postgres(), o)
			require.ErrorIs(t, err, sink.ErrInvalid)
			require.ErrorContains(t, err, "Options.")
		})
	}
	_, err := sink.New(nil, dialect.SQLite(), sink.Options{Table: "t"})
	require.ErrorIs(t, err, sink.ErrInvalid)
	_, err = sink.New(db, dialect.Dialect{}, sink.Options{Table: "t"})
	require.ErrorIs(t, err, sink.ErrInvalid)
}
