package integration

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sink"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// withParameter adds a parameter to a DSN of Postgres.
func withParameter(t testing.TB, dsn, name, value string) string {
	u, err := url.Parse(dsn)
	require.NoError(t, err)
	q := u.Query()
	q.Set(name, value)
	u.RawQuery = strings.ReplaceAll(q.Encode(), "+", "%20")
	return u.String()
}

// round goes the whole way, in every form that a value has: staged, relayed,
// and written to a guarded table of the same database.
func (s *site) round(t *testing.T) {
	t.Helper()
	require.NoError(t, s.store.Check(t.Context()))
	table, err := sink.New(s.db, s.dialect, sink.Options{Table: "mirror"})
	require.NoError(t, err)
	require.NoError(t, table.Create(t.Context()))
	l := s.latest("round")
	odd := "o'brien \"\\ \u00e9\u4e16\U0001F600\n$1 ?1"
	s.stage(l, "a", "old")
	s.stage(l, odd, odd)
	s.stage(l, "gone", "x")
	s.stageMany(l, "many", 120)
	require.NoError(t, s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
		_, err := l.Stage(t.Context(), tx, "a", "new")
		if err == nil {
			_, err = l.StageDelete(t.Context(), tx, "gone")
		}
		return err
	}))
	book := new(logbook)
	var failed sync.Once
	stop := s.run(book.options(), l.Publisher(func(ctx context.Context, batch []*outbox.Entry[string]) error {
		rows := make([]sink.Row, len(batch))
		for i, e := range batch {
			var err error
			if rows[i], err = sink.JSON(e.Key, e.Version, e.Deleted, e.Value); err != nil {
				return err
			}
		}
		failed.Do(func() { batch[0].Retry(time.Millisecond) })
		_, err := table.Apply(ctx, rows)
		return err
	}, outbox.PublishOptions{}))
	eventually(t, "the round to end", s.empty)
	require.NoError(t, stop())
	require.Len(t, book.noise(), len(book.grep("marked to be tried again")), "%q", book.noise())
	for key, want := range map[string]string{"a": `"new"`, "many0000119": `"vvvvvvvvvvvvvvvvvvvv"`} {
		row, err := table.Get(t.Context(), key)
		require.NoError(t, err)
		require.Equal(t, want, string(row.Payload))
	}
	row, err := table.Get(t.Context(), odd)
	require.NoError(t, err)
	require.False(t, row.Deleted)
	row, err = table.Get(t.Context(), "gone")
	require.NoError(t, err)
	require.True(t, row.Deleted)
}

func TestRoundInEveryQueryMode(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, mode := range []string{"cache_statement", "cache_describe", "describe_exec", "exec", "simple_protocol"} {
		t.Run(mode, func(t *testing.T) {
			dsn := withParameter(t, pgtest.DSN(t), "default_query_exec_mode", mode)
			newSite(t, dialect.Postgres(), "pgx", dsn).round(t)
		})
	}
}

// What a server, a database or a role sets for its sessions must not matter.
func TestRoundUnderAnySessionSettings(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, setting := range [][2]string{
		{"TimeZone", "Asia/Tokyo"},
		{"DateStyle", "SQL, DMY"},
		{"search_path", ""},
		{"search_path", "decoy"},
		{"default_transaction_isolation", "repeatable read"},
		{"default_transaction_isolation", "serializable"},
		{"default_transaction_deferrable", "on"},
		{"plan_cache_mode", "force_generic_plan"},
		{"lock_timeout", "1ms"},
		{"standard_conforming_strings", "off"},
		{"quote_all_identifiers", "on"},
		{"array_nulls", "off"},
		{"check_function_bodies", "off"},
	} {
		t.Run(setting[0]+" "+setting[1], func(t *testing.T) {
			dsn := pgtest.DSN(t)
			plain := pgtest.OpenDSN(t, dsn)
			_, err := plain.Exec(`CREATE SCHEMA decoy; CREATE TABLE decoy.outbox_entries (x int)`)
			require.NoError(t, err)
			s := &site{t: t, dialect: dialect.Postgres(), driver: "pgx", dsn: withParameter(t, dsn, setting[0], setting[1])}
			s.db = s.open()
			install(t, s.db, s.dialect)
			s.store = s.newStore(sqlstore.Options{})
			s.round(t)
		})
	}
}

// Relays on a server whose transactions are isolated higher by default neither
// publish twice nor fill the log, while callers stage at that level.
func TestG5HigherIsolationByDefault(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			const stagers, each = 3, 50
			dsn := withParameter(t, pgtest.DSN(t), "default_transaction_isolation", level)
			s := newSite(t, dialect.Postgres(), "pgx", dsn)
			fs, err := s.store.Findings(t.Context())
			require.NoError(t, err)
			require.Len(t, fs, 1+s.fsyncFindings())
			require.Contains(t, fs[0].Text, "default_transaction_isolation")
			var w witness
			book := new(logbook)
			stop := s.fleet(3, book, "", w.publish, outbox.PublishOptions{BatchSize: 5})
			l := s.latest("")
			var wg sync.WaitGroup
			for n := range stagers {
				wg.Go(func() {
					for i := range each {
						s.insist(t, func(tx *sql.Tx) error {
							_, err := l.Stage(t.Context(), tx, fmt.Sprintf("%d-%d", n, i), "x")
							if err == nil {
								_, err = l.Stage(t.Context(), tx, fmt.Sprintf("hot%d", i%3), "x")
							}
							return err
						})
					}
				})
			}
			wg.Wait()
			eventually(t, "all to be published and settled", s.empty)
			stop()
			require.Len(t, w.newest(), stagers*each+3)
			require.Empty(t, w.twice())
			require.Empty(t, book.noise())
		})
	}
}

// Where the server refuses the commit of a claim whose rows it has sent
// already, the claim is made again, and only what the second one holds counts.
func TestG5ClaimRefusedAtItsCommitIsForgotten(t *testing.T) {
	if testing.Short() {
		return
	}
	const limit, workers = 5, 4
	dsn := withParameter(t, pgtest.DSN(t), "default_transaction_isolation", "serializable")
	s := newSite(t, dialect.Postgres(), "pgx", dsn)
	l := s.latest("")
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	var wg sync.WaitGroup
	for n := range workers {
		wg.Go(func() {
			for i := 0; ctx.Err() == nil; i++ {
				s.insist(t, func(tx *sql.Tx) error {
					_, err := l.Stage(t.Context(), tx, fmt.Sprintf("%d-%d", n, i%50), "x")
					return err
				})
			}
		})
		wg.Go(func() {
			for ctx.Err() == nil {
				rows := s.claim("default", limit, time.Minute)
				if len(rows) > limit {
					t.Errorf("a claim of %d gave %d rows", limit, len(rows))
					cancel()
				}
				for _, r := range s.settle("default", outbox.OutcomeDone, 0, rows...) {
					if r == outbox.ResultStale {
						t.Error("a claim gave rows that are not held")
						cancel()
					}
				}
			}
		})
	}
	wg.Wait()
}

// fsyncFindings is how many warnings the server of the tests is worth.
func (s *site) fsyncFindings() int {
	var fsync string
	require.NoError(s.t, s.db.QueryRow(`SHOW fsync`).Scan(&fsync))
	if fsync == "off" {
		return 1
	}
	return 0
}

// insist runs a transaction again where the database asks for it.
func (s *site) insist(t *testing.T, f func(tx *sql.Tx) error) {
	for {
		err := s.store.Transact(t.Context(), nil, f)
		if err == nil || !s.store.Retryable(err) {
			if err != nil {
				t.Error(err)
			}
			return
		}
	}
}

// A pool of one connection is enough for everything, also where the publish
// function and the application use it too.
func TestG9PoolOfOneConnectionIsEnough(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		s.exec(`DELETE FROM app`)
		db := s.open()
		db.SetMaxOpenConns(1)
		one := *s
		one.db = db
		install(t, db, s.dialect)
		var err error
		one.store, err = sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		require.NoError(t, one.store.Check(t.Context()))
		l := one.latest("")
		one.stageMany(l, "k", 60)
		var w witness
		book := new(logbook)
		o := book.options()
		relay, err := outbox.NewRelay(o, l.Publisher(func(ctx context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			_, err := db.ExecContext(ctx, `INSERT INTO app (id, note) VALUES ($1, 'published')`, batch[0].Key)
			return err
		}, outbox.PublishOptions{BatchSize: 5, InFlight: 4}))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- relay.Run(ctx) }()
		for n := range 10 {
			one.stage(l, fmt.Sprintf("later%d", n), "x")
			_, err := relay.Stats(t.Context())
			require.NoError(t, err)
			_, err = l.List(t.Context(), "", 5)
			require.NoError(t, err)
			require.NoError(t, one.store.Pause(t.Context(), "other", time.Hour, "x"))
		}
		eventually(t, "all to be published and settled", one.empty)
		cancel()
		require.NoError(t, <-done)
		require.Len(t, w.all(), 70)
		require.Empty(t, book.noise())
		one.round(t)
	})
}
