package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// postings is an application that puts messages without pause, whatever
// happens: each with a business row of its key, some in groups.
type postings struct {
	s    *site
	stop atomic.Bool
	wg   sync.WaitGroup

	mu      sync.Mutex
	answers map[string]error // of the transaction of each key; nil: it took effect
	commits int
}

func (s *site) postings(writers int) *postings {
	p := &postings{s: s, answers: map[string]error{}}
	j := s.journal("mail")
	for w := range writers {
		p.wg.Go(func() {
			for n := 0; !p.stop.Load(); n++ {
				p.write(j, outbox.Message{Key: fmt.Sprintf("%d-%d", w, n), Group: []string{"", "hot", fmt.Sprint("g", w)}[n%3]})
			}
		})
	}
	s.t.Cleanup(p.end)
	return p
}

func (p *postings) write(j *outbox.Journal, m outbox.Message) {
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	err := p.s.store.Transact(ctx, nil, func(tx *sql.Tx) error {
		_, err := tx.ExecContext(ctx, `INSERT INTO app (id, note) VALUES ($1, 'x')`, m.Key)
		if err == nil {
			_, err = j.Put(ctx, tx, m)
		}
		return err
	})
	p.mu.Lock()
	if p.answers[m.Key] = err; err == nil {
		p.commits++
	}
	p.mu.Unlock()
	if err != nil {
		time.Sleep(10 * time.Millisecond) // the server is away
	}
}

func (p *postings) end() {
	p.stop.Store(true)
	p.wg.Wait()
}

func (p *postings) acknowledged() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.commits
}

// check compares what was acknowledged, what is in the database, and what was
// received: all tell of the same transactions, and groups are in order.
func (p *postings) check(r *receiver) {
	t := p.s.t
	t.Helper()
	p.end()
	p.s.db = p.s.open() // the old pool's connections were cut
	eventually(t, "all to be sent", func() bool { return p.s.unfinished() == 0 })
	got := r.times()
	rows, err := p.s.db.Query(`SELECT id FROM app`)
	require.NoError(t, err)
	defer rows.Close()
	written := map[string]bool{}
	for rows.Next() {
		var id string
		require.NoError(t, rows.Scan(&id))
		written[id] = true
		require.Positive(t, got[id], "%s committed, so it is sent", id)
	}
	require.NoError(t, rows.Err())
	require.Len(t, got, len(written), "nothing was sent that did not commit")
	for key, answer := range p.answers {
		if !errors.Is(answer, outbox.ErrCommit) {
			require.Equal(t, answer == nil, written[key], "the answer %v of %s", answer, key)
		}
	}
	high := map[string]int64{}
	for _, m := range r.all() {
		if m.group == "" {
			continue
		}
		if m.seq < high[m.group] {
			require.True(t, m.ambiguous || m.attempt > 1, "%s of %s went out after a later one", m.key, m.group)
		}
		high[m.group] = max(high[m.group], m.seq)
	}
	t.Logf("%d commits, %d sends", p.commits, r.len())
}

// TestG7DatabaseKilledUnderLoadLosesNoMessage: as by a power cut, again and again.
func TestG7DatabaseKilledUnderLoadLosesNoMessage(t *testing.T) {
	if testing.Short() {
		return
	}
	cluster := pgtest.Start(t, pgtest.Options{Durable: true})
	s := newSite(t, dialect.Postgres(), "pgx", cluster.DSN())
	var r receiver
	book := new(logbook)
	stop := s.run(book.options(), s.journal("mail").Sender(r.send, outbox.SendOptions{Lease: 2 * time.Second}))
	p := s.postings(4)
	for range 2 {
		before := p.acknowledged()
		eventually(t, "traffic, and the relay at work", func() bool { return p.acknowledged() > before+50 && r.len() > 0 })
		require.NoError(t, cluster.Kill())
		require.NoError(t, cluster.Start())
	}
	before, sent := p.acknowledged(), r.len()
	eventually(t, "all to work again", func() bool { return p.acknowledged() > before+50 && r.len() > sent+50 })
	p.check(&r)
	eventually(t, "the relay to say that all is well", func() bool { return book.count(outbox.EventRecover) > 0 })
	require.NoError(t, stop())
	require.Empty(t, book.grep("level=ERROR"))
}

// TestG7ConnectionsTerminatedUnderLoadLoseNoMessage, nor do they show a settled
// one as unknown.
func TestG7ConnectionsTerminatedUnderLoadLoseNoMessage(t *testing.T) {
	if testing.Short() {
		return
	}
	s := onPostgres(t)
	var r receiver
	stop := s.run(new(logbook).options(), s.journal("mail").Sender(r.send, outbox.SendOptions{Lease: 2 * time.Second}))
	p := s.postings(4)
	admin := s.open()
	for range 15 {
		before := p.acknowledged()
		eventually(t, "traffic", func() bool { return p.acknowledged() > before+5 })
		_, err := admin.Exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity
			WHERE datname = current_database() AND pid <> pg_backend_pid()`)
		require.NoError(t, err)
	}
	p.check(&r)
	require.NoError(t, stop())
}

// TestG7DeploymentsBurnNoAttempts: relays that are stopped and started twenty
// times over a backlog lose nothing, and what was not begun was not counted.
func TestG7DeploymentsBurnNoAttempts(t *testing.T) {
	const deployments, n = 20, 300
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		ms := append(letters("plain ", n/2, 0), letters("grouped ", n/2, 10)...)
		s.put(j, ms...)
		var r receiver
		send := func(ctx context.Context, m *outbox.Record) (string, error) {
			time.Sleep(rand.N(4 * time.Millisecond))
			return r.send(ctx, m)
		}
		for range deployments {
			before := r.len()
			stop := s.run(new(logbook).options(), j.Sender(send, outbox.SendOptions{BatchSize: 10, Workers: 3}))
			eventually(t, "work", func() bool { return r.len() > before+rand.N(5) || s.unfinished() == 0 })
			require.NoError(t, stop())
			require.Zero(t, s.count(`SELECT count(*) FROM {t:messages} WHERE lease_until > 0`), "what was not begun is given back")
			require.Zero(t, s.count(`SELECT count(*) FROM {t:messages} WHERE outcome = 0 AND attempt > 0`), "an attempt was burned")
			require.Equal(t, r.len(), s.count(`SELECT count(*) FROM {t:messages} WHERE outcome = 1`), "what was sent is settled")
		}
		require.Less(t, r.len(), n, "a backlog was left to the last")
		s.run(new(logbook).options(), j.Sender(send, outbox.SendOptions{}))
		eventually(t, "all to be sent", func() bool { return s.unfinished() == 0 })
		require.Equal(t, each(1, keysOf(ms)...), r.times())
		for _, m := range r.all() {
			require.Equal(t, 1, m.attempt)
		}
	})
}

// TestG8DeploymentsThatCutSendsShort: what is cut is of unknown fate, so Park
// keeps it and sends it no more, and nothing else is touched.
func TestG8DeploymentsThatCutSendsShort(t *testing.T) {
	const deployments, n = 10, 150
	onBoth(t, func(t *testing.T, s *site) {
		for _, p := range []policy{resend, park} {
			j := s.journal(string(p))
			ms := letters(string(p), n, 0)
			s.put(j, ms...)
			var r receiver
			send := func(ctx context.Context, m *outbox.Record) (string, error) {
				r.took(m)
				select {
				case <-ctx.Done():
					return "", ctx.Err()
				case <-time.After(rand.N(20 * time.Millisecond)):
					return "", nil
				}
			}
			so := p.options(inbox{})
			so.Workers = 4
			for range deployments {
				o := new(logbook).options()
				o.ShutdownTimeout = time.Nanosecond
				before := r.len()
				stop := s.run(o, j.Sender(send, so))
				eventually(t, "work", func() bool { return r.len() > before+2 })
				_ = stop() // says what it cut
				require.Zero(t, s.count(`SELECT count(*) FROM {t:messages} WHERE lease_until > 0`))
			}
			s.run(new(logbook).options(), j.Sender(send, so))
			eventually(t, "all to end", func() bool { return s.unfinished() == 0 })
			times, cut := r.times(), 0
			for _, rec := range s.records(j) {
				switch {
				case p == resend:
					require.Equal(t, outbox.StateSent, rec.State)
					require.Equal(t, rec.Attempt, times[rec.Key], "each send was an attempt")
					cut += times[rec.Key] - 1
				case rec.State == outbox.StateUnknown:
					require.Contains(t, rec.LastError, "stopping")
					cut++
					fallthrough
				default:
					require.Equal(t, 1, times[rec.Key], rec.Key)
				}
			}
			require.Len(t, times, n, "none vanished")
			require.NotZero(t, cut)
		}
	})
}
