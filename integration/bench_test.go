package integration

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// The benchmarks run each variant in turn, round by round, on a server with
// fsync on, and report medians and the ratio to raw SQL that does the same
// work: one iteration is one round. `make bench` runs them.

// payload is about 200 bytes.
var payload = strings.Repeat("the quick brown fox ", 10)

// durable is a site on a server of the benchmark's own that loses nothing.
func durable(b *testing.B) *site {
	c := pgtest.Start(b, pgtest.Options{Durable: true})
	return newSite(b, dialect.Postgres(), "pgx", c.DSN())
}

// rounds measures variants in turn, b.N times, and reports what they reach in
// units a second and the median ratio of each to the first.
func rounds(b *testing.B, names []string, rate func(name string) float64) {
	rates := map[string][]float64{}
	for _, name := range names { // warm up
		rate(name)
	}
	for b.Loop() {
		for _, name := range names {
			rates[name] = append(rates[name], rate(name))
		}
	}
	for _, name := range names {
		b.ReportMetric(median(rates[name]), name+"/s")
		if name == names[0] {
			continue
		}
		ratios := make([]float64, len(rates[name]))
		for i, r := range rates[name] {
			ratios[i] = r / rates[names[0]][i]
		}
		b.ReportMetric(median(ratios), name+":"+names[0])
	}
	b.ReportMetric(0, "ns/op")
}

func median(x []float64) float64 {
	x = slices.Sorted(slices.Values(x))
	return x[len(x)/2]
}

// writers runs f from n goroutines for a while and returns calls a second.
func writers(b *testing.B, n int, f func(i int) error) float64 {
	const total = 4000
	start := time.Now()
	var wg sync.WaitGroup
	for w := range n {
		wg.Go(func() {
			for i := w; i < total; i += n {
				if err := f(i); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	return total / time.Since(start).Seconds()
}

// BenchmarkStage: a transaction with one insert, with and without staging, and
// with a bare insert into a table of the same columns and indexes.
func BenchmarkStage(b *testing.B) {
	for _, c := range []struct {
		name    string
		open    func(*testing.B) *site
		writers int
	}{
		{"postgres/1", durable, 1},
		{"postgres/16", durable, 16},
		{"sqlite-full/1", func(b *testing.B) *site { return onSQLite(b) }, 1},
		{"sqlite-normal/1", sqliteNormal, 1},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := c.open(b)
			require.NoError(b, s.store.Check(b.Context()))
			raw := rawTable(s)
			l := s.latest("bench")
			n := 0
			rounds(b, []string{"base", "stage", "rawinsert"}, func(name string) float64 {
				n++
				for _, table := range []string{"app", "raw", s.dialect.Render(`{t:entries}`)} {
					if s.postgres() {
						s.exec(`TRUNCATE ` + table)
					} else {
						s.exec(`DELETE FROM ` + table)
					}
				}
				return writers(b, c.writers, func(i int) error {
					return s.transact(func(tx *sql.Tx) error {
						key := fmt.Sprintf("%d-%d", n, i)
						if _, err := tx.ExecContext(b.Context(), `INSERT INTO app (id, note) VALUES ($1, 'a note of some length')`, key); err != nil {
							return err
						}
						switch name {
						case "stage":
							_, err := l.Stage(b.Context(), tx, key, payload)
							return err
						case "rawinsert":
							_, err := tx.ExecContext(b.Context(), raw, int64(n)<<32+int64(i), key, []byte(payload))
							return err
						}
						return nil
					})
				})
			})
		})
	}
}

func sqliteNormal(b *testing.B) *site {
	dsn := strings.Replace(dialect.SQLiteDSN(b.TempDir()+"/app.db"), "synchronous(FULL)", "synchronous(NORMAL)", 1)
	return newSite(b, dialect.SQLite(), "sqlite", dsn)
}

// rawTable makes a table like the outbox's and returns a bare insert into it.
func rawTable(s *site) string {
	if s.postgres() {
		s.exec(s.dialect.Render(`CREATE TABLE raw (LIKE {t:entries} INCLUDING ALL) WITH (fillfactor = 50)`))
		s.exec(`CREATE SEQUENCE rawseq`)
		return `INSERT INTO raw (version, token, due, staged_at, tombstone, channel, key, payload) VALUES ($1, 1, $1, $1, false, 'bench', $2, $3)`
	} else {
		s.exec(`CREATE TABLE raw (id INTEGER PRIMARY KEY, version INTEGER NOT NULL, due INTEGER NOT NULL, lease_until INTEGER NOT NULL DEFAULT 0,
			token INTEGER NOT NULL DEFAULT 0, staged_at INTEGER NOT NULL, attempt INTEGER NOT NULL DEFAULT 0, tombstone INTEGER NOT NULL,
			channel TEXT NOT NULL, key TEXT NOT NULL, headers TEXT NOT NULL DEFAULT '', last_error TEXT NOT NULL DEFAULT '', payload BLOB NOT NULL,
			UNIQUE (channel, key))`)
		s.exec(`CREATE INDEX raw_due ON raw (channel, due, id)`)
	}
	return `INSERT INTO raw (id, version, due, staged_at, tombstone, channel, key, payload) VALUES ($1, $1, $1, $1, false, 'bench', $2, $3)`
}

func (s *site) transact(f func(tx *sql.Tx) error) error {
	tx, err := s.db.BeginTx(s.t.Context(), nil)
	if err != nil {
		return err
	}
	defer tx.Rollback()
	if err := f(tx); err != nil {
		return err
	}
	return tx.Commit()
}

// BenchmarkStageMany: 20 transactions of 1,000 new keys each.
func BenchmarkStageMany(b *testing.B) {
	s := durable(b)
	rawTable(s)
	l := s.latest("bench")
	n := 0
	rounds(b, []string{"unnest", "stagemany"}, func(name string) float64 {
		n++
		s.exec(`TRUNCATE raw`)
		s.exec(s.dialect.Render(`TRUNCATE {t:entries}`))
		const batches, size = 20, 1000
		start := time.Now()
		for c := range batches {
			keys, payloads := make([]string, size), make([][]byte, size)
			items := make([]outbox.Item[string], size)
			for i := range size {
				keys[i], payloads[i] = fmt.Sprintf("%d-%06d", n, c*size+i), []byte(payload)
				items[i] = outbox.Item[string]{Key: keys[i], Value: payload}
			}
			require.NoError(b, s.transact(func(tx *sql.Tx) (err error) {
				if name == "stagemany" {
					_, err = l.StageMany(b.Context(), tx, items)
					return err
				}
				_, err = tx.ExecContext(b.Context(), `
					INSERT INTO raw (version, token, due, staged_at, tombstone, channel, key, payload)
					SELECT nextval('rawseq'), 1, 1, 1, false, 'bench', u.k, u.p FROM unnest($1::text[], $2::bytea[]) AS u (k, p)
					ON CONFLICT (channel, key) DO UPDATE SET version = excluded.version, payload = excluded.payload`, keys, payloads)
				return err
			}))
		}
		return batches * size / time.Since(start).Seconds()
	})
}

// fill stages n rows, 10,000 to a transaction.
func (s *site) fill(l *outbox.Latest[string], n int) {
	for from := 0; from < n; from += 10_000 {
		s.stageMany(l, fmt.Sprintf("%04d-", from/10_000), min(10_000, n-from))
	}
}

// drain publishes all to nowhere and returns rows a second.
func (s *site) drain(b *testing.B, l *outbox.Latest[string], n int) float64 {
	var mu sync.Mutex
	left := n
	done := make(chan struct{})
	stop := s.run(outbox.RelayOptions{}, l.Publisher(func(_ context.Context, batch []*outbox.Entry[string]) error {
		mu.Lock()
		defer mu.Unlock()
		if left -= len(batch); left == 0 {
			close(done)
		}
		return nil
	}, outbox.PublishOptions{BatchSize: 1000}))
	start := time.Now()
	<-done
	require.NoError(b, stop())
	return float64(n) / time.Since(start).Seconds()
}

// rawDrain claims and deletes with bare statements, two batches in flight.
func (s *site) rawDrain(b *testing.B, n int) float64 {
	claim := `
		UPDATE queue SET lease_until = 1000, token = 7, attempt = attempt + 1
		WHERE id = ANY (ARRAY(SELECT id FROM queue WHERE channel = 'bench' AND due <= 4e15::bigint AND lease_until < 1000
			ORDER BY due, id LIMIT 1000 FOR UPDATE SKIP LOCKED)) RETURNING id, key, payload`
	ack := `DELETE FROM queue WHERE id = ANY ($1::bigint[]) AND token = 7`
	if !s.postgres() {
		claim = s.dialect.Render(`
			UPDATE {t:entries} SET lease_until = 1000, token = 7, attempt = attempt + 1
			WHERE id IN (SELECT id FROM {t:entries} WHERE channel = 'bench' AND due <= 4e15 AND lease_until < 1000
				ORDER BY due, id LIMIT 1000) RETURNING id, key, payload`)
		ack = s.dialect.Render(`DELETE FROM {t:entries} WHERE id IN (SELECT value FROM json_each($1)) AND token = 7`)
	}
	start := time.Now()
	var claims sync.Mutex
	var wg sync.WaitGroup
	for range 2 {
		wg.Go(func() {
			for {
				claims.Lock()
				ids, err := rawClaim(s.db, claim)
				claims.Unlock()
				if err == nil && len(ids) > 0 {
					_, err = s.db.Exec(ack, s.ids(ids))
				}
				if err != nil {
					b.Error(err)
				}
				if err != nil || len(ids) == 0 {
					return
				}
			}
		})
	}
	wg.Wait()
	return float64(n) / time.Since(start).Seconds()
}

func (s *site) ids(ids []int64) any {
	if s.postgres() {
		return ids
	}
	return strings.Join(strings.Fields(fmt.Sprint(ids)), ",")
}

func rawClaim(db *sql.DB, claim string) (ids []int64, err error) {
	rows, err := db.Query(claim)
	if err != nil {
		return nil, err
	}
	defer rows.Close()
	for rows.Next() {
		var id int64
		var key string
		var payload []byte
		if err := rows.Scan(&id, &key, &payload); err != nil {
			return nil, err
		}
		ids = append(ids, id)
	}
	return ids, rows.Err()
}

// BenchmarkDrain: 100,000 rows (SQLite: 50,000), batches of 1,000, one relay.
func BenchmarkDrain(b *testing.B) {
	for _, c := range []struct {
		name string
		open func(*testing.B) *site
		n    int
	}{
		{"postgres", durable, 100_000},
		{"sqlite-full", func(b *testing.B) *site { return onSQLite(b) }, 50_000},
		{"sqlite-normal", sqliteNormal, 50_000},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := c.open(b)
			l := s.latest("bench")
			if s.postgres() { // a queue as raw SQL would have it
				s.exec(`CREATE TABLE queue (id bigserial PRIMARY KEY, due bigint NOT NULL, lease_until bigint NOT NULL DEFAULT 0,
					token bigint NOT NULL DEFAULT 0, attempt integer NOT NULL DEFAULT 0, channel text COLLATE "C" NOT NULL,
					key text COLLATE "C" NOT NULL, payload bytea NOT NULL, UNIQUE (channel, key)) WITH (fillfactor = 50)`)
				s.exec(`CREATE INDEX ON queue (channel, due, id)`)
			}
			rounds(b, []string{"raw", "relay"}, func(name string) float64 {
				if s.postgres() {
					s.exec(s.dialect.Render(`VACUUM (ANALYZE) {t:entries}, queue`))
				}
				if name == "raw" && s.postgres() {
					s.exec(fmt.Sprintf(`INSERT INTO queue (due, channel, key, payload)
						SELECT i, 'bench', to_char(i, 'FM00000000'), convert_to('%s', 'UTF8') FROM generate_series(1, %d) AS i`, payload, c.n))
					s.exec(`ANALYZE queue`) // raw SQL has nothing else against bad statistics
					return s.rawDrain(b, c.n)
				}
				s.fill(l, c.n)
				if name == "raw" {
					return s.rawDrain(b, c.n)
				}
				return s.drain(b, l, c.n)
			})
			if s.postgres() {
				var updated, hot int
				eventually(b, "statistics", func() bool {
					updated = s.count(`SELECT n_tup_upd FROM pg_stat_user_tables WHERE relid = '{t:entries}'::regclass`)
					hot = s.count(`SELECT n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = '{t:entries}'::regclass`)
					return updated > 0
				})
				b.ReportMetric(float64(hot)/float64(updated), "heap-only")
			}
		})
	}
}

// BenchmarkBacklog: a backlog of a million against one of ten thousand, the
// same rows drained from each.
func BenchmarkBacklog(b *testing.B) {
	s := durable(b)
	l := s.latest("bench")
	rounds(b, []string{"10k", "1M"}, func(name string) float64 {
		s.exec(s.dialect.Render(`TRUNCATE {t:entries}`))
		n := map[string]int{"10k": 10_000, "1M": 1_000_000}[name]
		s.fill(l, n)
		return s.drain(b, l, n)
	})
}

// BenchmarkHeldSnapshot: 200,000 rows flow while a snapshot is held open; the
// last 20,000 against the first.
func BenchmarkHeldSnapshot(b *testing.B) {
	s := durable(b)
	l := s.latest("bench")
	var hold *sql.Tx
	chunk := func() float64 {
		const n = 20_000
		s.fill(l, n)
		return s.drain(b, l, n)
	}
	rounds(b, []string{"first", "tenth"}, func(name string) float64 {
		if name == "tenth" {
			for range 8 {
				chunk()
			}
			defer hold.Rollback()
			return chunk()
		}
		s.exec(s.dialect.Render(`VACUUM {t:entries}`))
		var err error
		hold, err = s.db.BeginTx(b.Context(), &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
		require.NoError(b, err)
		_, err = hold.Exec(`SELECT count(*) FROM app`)
		require.NoError(b, err)
		return chunk()
	})
}

// BenchmarkLatency: from commit to the publish function, in one process, at
// 100 stages a second for five seconds a round.
func BenchmarkLatency(b *testing.B) {
	for name, open := range map[string]func(*testing.B) *site{
		"postgres": durable, "sqlite-full": func(b *testing.B) *site { return onSQLite(b) },
	} {
		b.Run(name, func(b *testing.B) {
			s := open(b)
			require.NoError(b, s.store.Check(b.Context()))
			l := s.latest("bench")
			var mu sync.Mutex
			committed, published := map[string]time.Time{}, map[string]time.Time{}
			looks := 0
			observe := func(e outbox.Event) {
				if e.Kind == outbox.EventClaim {
					mu.Lock()
					looks++
					mu.Unlock()
				}
			}
			stop := s.run(outbox.RelayOptions{Observe: observe}, l.Publisher(func(_ context.Context, batch []*outbox.Entry[string]) error {
				now := time.Now()
				mu.Lock()
				defer mu.Unlock()
				for _, e := range batch {
					published[e.Key] = now
				}
				return nil
			}, outbox.PublishOptions{}))
			n := 0
			for b.Loop() {
				tick := time.NewTicker(10 * time.Millisecond)
				for range 500 {
					<-tick.C
					n++
					key := fmt.Sprint(n)
					tx := s.begin()
					_, err := l.Stage(b.Context(), tx, key, payload)
					require.NoError(b, err)
					require.NoError(b, tx.Commit())
					mu.Lock()
					committed[key] = time.Now()
					mu.Unlock()
				}
				tick.Stop()
			}
			eventually(b, "the last publication", func() bool {
				mu.Lock()
				defer mu.Unlock()
				return len(published) == n
			})
			require.NoError(b, stop())
			var late []float64
			for key, at := range committed {
				late = append(late, float64(published[key].Sub(at).Microseconds()))
			}
			slices.Sort(late)
			b.ReportMetric(late[len(late)/2], "p50-µs")
			b.ReportMetric(late[len(late)*99/100], "p99-µs")
			b.ReportMetric(float64(looks)/float64(n), "claims/stage")
			b.ReportMetric(0, "ns/op")
		})
	}
}
