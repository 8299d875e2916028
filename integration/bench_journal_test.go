package integration

import (
	"context"
	"database/sql"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func (s *site) bench(b *testing.B) *outbox.Journal {
	require.NoError(b, s.store.Check(b.Context()))
	j, err := outbox.NewJournal(s.store, outbox.JournalOptions{Channel: "bench"})
	require.NoError(b, err)
	return j
}

func (s *site) clear(tables ...string) {
	for _, table := range tables {
		if s.postgres() {
			s.exec(s.dialect.Render(`TRUNCATE ` + table))
		} else {
			s.exec(s.dialect.Render(`DELETE FROM ` + table))
		}
	}
}

// BenchmarkPut: a transaction with one insert, with and without putting a
// message, and with a bare insert into a table of the same columns and indexes.
func BenchmarkPut(b *testing.B) {
	for _, c := range []struct {
		name    string
		open    func(*testing.B) *site
		writers int
	}{
		{"postgres/16", durable, 16},
		{"sqlite-full/1", func(b *testing.B) *site { return onSQLite(b) }, 1},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := c.open(b)
			j := s.bench(b)
			names := []string{"base", "put", "grouped"}
			tables := []string{`app`, `{t:messages}`, `{t:groups}`}
			const raw = `INSERT INTO raw (seq, due, created_at, channel, key, payload) VALUES ($1, $1, $1, 'bench', $2, $3)`
			if s.postgres() {
				s.exec(s.dialect.Render(`CREATE TABLE raw (LIKE {t:messages} INCLUDING ALL) WITH (fillfactor = 50)`))
				names, tables = append(names, "rawinsert"), append(tables, `raw`)
			}
			n := 0
			rounds(b, names, func(name string) float64 {
				n++
				s.clear(tables...)
				return writers(b, c.writers, func(i int) error {
					return s.transact(func(tx *sql.Tx) error {
						key := fmt.Sprintf("%d-%d", n, i)
						_, err := tx.ExecContext(b.Context(), `INSERT INTO app (id, note) VALUES ($1, 'a note of some length')`, key)
						m := outbox.Message{Key: key, Payload: []byte(payload)}
						switch {
						case err != nil || name == "base":
							return err
						case name == "rawinsert":
							_, err = tx.ExecContext(b.Context(), raw, int64(n)<<32+int64(i), key, []byte(payload))
							return err
						case name == "grouped":
							m.Group = fmt.Sprint("g", i%1000)
						}
						_, err = j.Put(b.Context(), tx, m)
						return err
					})
				})
			})
		})
	}
}

// BenchmarkPutMany: 20 transactions of 1,000 new messages each, against an
// unnest insert into a table of the same columns and indexes.
func BenchmarkPutMany(b *testing.B) {
	s := durable(b)
	j := s.bench(b)
	s.exec(s.dialect.Render(`CREATE TABLE raw (LIKE {t:messages} INCLUDING ALL) WITH (fillfactor = 50)`))
	s.exec(`CREATE SEQUENCE rawseq`)
	n := 0
	rounds(b, []string{"unnest", "putmany", "grouped"}, func(name string) float64 {
		n++
		s.clear(`raw`, `{t:messages}`, `{t:groups}`)
		const batches, size = 20, 1000
		start := time.Now()
		for c := range batches {
			keys, payloads := make([]string, size), make([][]byte, size)
			ms := make([]outbox.Message, size)
			for i := range size {
				keys[i], payloads[i] = fmt.Sprintf("%d-%06d", n, c*size+i), []byte(payload)
				ms[i] = outbox.Message{Key: keys[i], Payload: payloads[i]}
				if name == "grouped" {
					ms[i].Group = fmt.Sprint("g", i)
				}
			}
			require.NoError(b, s.transact(func(tx *sql.Tx) (err error) {
				if name != "unnest" {
					_, err = j.PutMany(b.Context(), tx, ms)
					return err
				}
				_, err = tx.ExecContext(b.Context(), `
					INSERT INTO raw (seq, due, created_at, channel, key, payload)
					SELECT nextval('rawseq'), 1, 1, 'bench', u.k, u.p FROM unnest($1::text[], $2::bytea[]) AS u (k, p)`, keys, payloads)
				return err
			}))
		}
		return batches * size / time.Since(start).Seconds()
	})
}

// fillMessages puts n messages, 10,000 to a transaction, in so many groups (0:
// none), due after delay.
func (s *site) fillMessages(b *testing.B, j *outbox.Journal, prefix string, n, groups int, delay time.Duration) {
	for from := 0; from < n; from += 10_000 {
		ms := make([]outbox.Message, min(10_000, n-from))
		for i := range ms {
			ms[i] = outbox.Message{Key: fmt.Sprintf("%s%08d", prefix, from+i), Payload: []byte(payload), Delay: delay}
			if groups > 0 {
				ms[i].Group = fmt.Sprintf("g%06d", (from+i)%groups)
			}
		}
		require.NoError(b, s.transact(func(tx *sql.Tx) error {
			_, err := j.PutMany(b.Context(), tx, ms)
			return err
		}))
	}
}

// deliver runs one relay until n messages were sent to nowhere, and returns
// messages a second.
func (s *site) deliver(b *testing.B, n int, attach func(count func(int)) outbox.Attachment) float64 {
	var sent atomic.Int64
	done := make(chan struct{})
	stop := s.run(outbox.RelayOptions{}, attach(func(k int) {
		if sent.Add(int64(k)) == int64(n) {
			close(done)
		}
	}))
	start := time.Now()
	select {
	case <-done:
	case <-time.After(5 * time.Minute):
		b.Errorf("%d of %d messages sent in five minutes", sent.Load(), n)
	}
	require.NoError(b, stop())
	return float64(n) / time.Since(start).Seconds()
}

func single(j *outbox.Journal, o outbox.SendOptions) func(func(int)) outbox.Attachment {
	return func(count func(int)) outbox.Attachment {
		return j.Sender(func(context.Context, *outbox.Record) (string, error) { count(1); return "", nil }, o)
	}
}

func batched(j *outbox.Journal, o outbox.SendOptions) func(func(int)) outbox.Attachment {
	return func(count func(int)) outbox.Attachment {
		return j.BatchSender(func(_ context.Context, batch []*outbox.Delivery) error { count(len(batch)); return nil }, o)
	}
}

// BenchmarkDeliver: 100,000 messages (SQLite: 50,000) to a no-op sender, one relay.
func BenchmarkDeliver(b *testing.B) {
	for _, c := range []struct {
		name string
		open func(*testing.B) *site
		n    int
	}{
		{"postgres", durable, 100_000},
		{"sqlite-full", func(b *testing.B) *site { return onSQLite(b) }, 50_000},
	} {
		b.Run(c.name, func(b *testing.B) {
			s := c.open(b)
			j := s.bench(b)
			rounds(b, []string{"single", "batch1000", "retention", "groups", "groups1000"}, func(name string) float64 {
				s.clear(`{t:messages}`, `{t:groups}`)
				groups := 0
				if name == "groups" || name == "groups1000" {
					groups = 10_000
				}
				s.fillMessages(b, j, "m", c.n, groups, 0)
				o := outbox.SendOptions{Retention: outbox.DeleteOnSent}
				switch name {
				case "batch1000", "groups1000":
					o.BatchSize = 1000
					return s.deliver(b, c.n, batched(j, o))
				case "retention":
					o.Retention = 0
				}
				return s.deliver(b, c.n, single(j, o))
			})
		})
	}
}

// BenchmarkJournalBacklog: 50,000 messages among what must not matter.
func BenchmarkJournalBacklog(b *testing.B) {
	const n, many = 50_000, 1_000_000
	s := durable(b)
	j := s.bench(b)
	rounds(b, []string{"alone", "1M-scheduled", "100k-dead", "10k-blocked", "1M-backlog"}, func(name string) float64 {
		s.clear(`{t:messages}`, `{t:groups}`)
		switch name {
		case "1M-scheduled":
			s.fillMessages(b, j, "later", many, 0, 24*time.Hour)
		case "100k-dead":
			s.fillMessages(b, j, "dead", 100_000, 0, 0)
			s.exec(s.dialect.Render(`UPDATE {t:messages} SET outcome = 4, completed_at = 1, lease_until = -4`))
		case "10k-blocked":
			s.fillMessages(b, j, "first", 10_000, 10_000, 0)
			s.exec(s.dialect.Render(`UPDATE {t:messages} SET outcome = 4, completed_at = 1, lease_until = -4`))
			s.fillMessages(b, j, "behind", 10_000, 10_000, 0)
		case "1M-backlog":
			s.fillMessages(b, j, "m", many, 0, 0)
			return s.deliver(b, many, batched(j, outbox.SendOptions{Retention: outbox.DeleteOnSent, BatchSize: 1000}))
		}
		s.fillMessages(b, j, "m", n, 0, 0)
		return s.deliver(b, n, batched(j, outbox.SendOptions{Retention: outbox.DeleteOnSent, BatchSize: 1000}))
	})
}

// BenchmarkJournalLatency: from commit to the send function, in one process, at
// 100 messages a second for five seconds a round.
func BenchmarkJournalLatency(b *testing.B) {
	for name, open := range map[string]func(*testing.B) *site{
		"postgres": durable, "sqlite-full": func(b *testing.B) *site { return onSQLite(b) },
	} {
		b.Run(name, func(b *testing.B) {
			s := open(b)
			j := s.bench(b)
			var mu sync.Mutex
			committed, sent := map[string]time.Time{}, map[string]time.Time{}
			stop := s.run(outbox.RelayOptions{}, j.Sender(func(_ context.Context, r *outbox.Record) (string, error) {
				now := time.Now()
				mu.Lock()
				defer mu.Unlock()
				sent[r.Key] = now
				return "", nil
			}, outbox.SendOptions{}))
			n := 0
			for b.Loop() {
				tick := time.NewTicker(10 * time.Millisecond)
				for range 500 {
					<-tick.C
					n++
					key := fmt.Sprint(n)
					tx := s.begin()
					_, err := j.Put(b.Context(), tx, outbox.Message{Key: key, Payload: []byte(payload)})
					require.NoError(b, err)
					require.NoError(b, tx.Commit())
					mu.Lock()
					committed[key] = time.Now()
					mu.Unlock()
				}
				tick.Stop()
			}
			eventually(b, "the last message", func() bool {
				mu.Lock()
				defer mu.Unlock()
				return len(sent) == n
			})
			require.NoError(b, stop())
			var late []float64
			for key, at := range committed {
				late = append(late, float64(sent[key].Sub(at).Microseconds()))
			}
			slices.Sort(late)
			b.ReportMetric(late[len(late)/2], "p50-µs")
			b.ReportMetric(late[len(late)*99/100], "p99-µs")
			b.ReportMetric(0, "ns/op")
		})
	}
}
