package integration

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// fleet runs n relays, each with a pool of its own, and returns how to stop
// them.
func (s *site) fleet(n int, book *logbook, channel string, f outbox.PublishFunc[string], o outbox.PublishOptions) (stop func()) {
	s.t.Helper()
	var stops []func() error
	for range n {
		stops = append(stops, s.run(book.options(), latestOn(s.t, s.newStore(sqlstore.Options{}), channel).Publisher(f, o)))
	}
	return func() {
		for _, stop := range stops {
			require.NoError(s.t, stop())
		}
	}
}

// Where nothing fails, any number of relays publish each version exactly once.
func TestG5TenRelaysPublishEachVersionOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		rows := 10_000
		if !s.postgres() {
			rows = 500 // ten relays mostly wait for each other there
		}
		var w witness
		book := new(logbook)
		stop := s.fleet(10, book, "", w.publish, outbox.PublishOptions{})
		s.stageMany(s.latest(""), "k", rows)
		eventually(t, "all to be published and settled", func() bool { return w.len() >= rows && s.empty() })
		stop()
		require.Len(t, w.all(), rows)
		require.Len(t, w.newest(), rows)
		require.Empty(t, w.twice())
		require.Zero(t, book.count(outbox.EventLost)+book.count(outbox.EventLeft))
		require.True(t, !s.postgres() || len(book.noise()) == 0, "%q", book.noise())
	})
}

// Rows that failed together are due together when the whole fleet starts, and
// each is tried by one relay.
func TestG5FleetThatRestartsTriesEachFailedRowOnce(t *testing.T) {
	const rows = 100
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		s.stageMany(l, "k", rows)
		failing := func(context.Context, []*outbox.Entry[string]) error { return errors.New("down") }
		s.once(l, outbox.PublishOptions{BatchSize: rows, Backoff: constant(time.Millisecond)}, failing)

		var w witness
		book := new(logbook)
		stop := s.fleet(4, book, "", func(_ context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			time.Sleep(200 * time.Millisecond)
			return nil
		}, outbox.PublishOptions{BatchSize: 10})
		eventually(t, "all to be published and settled", s.empty)
		stop()
		require.Len(t, w.all(), rows)
		require.Empty(t, w.twice())
		for _, p := range w.all() {
			require.Equal(t, 2, p.attempt, "sends and recorded attempts agree")
		}
		require.Empty(t, book.noise())
	})
}

// A row that always fails is tried once per backoff, not once per backoff and
// relay, nor without pause.
func TestG5RowThatFailsIsTriedOncePerBackoffByTheWholeFleet(t *testing.T) {
	const backoff, watched = 300 * time.Millisecond, 3 * time.Second
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		var w witness
		stop := s.fleet(4, new(logbook), "", func(_ context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			return errors.New("refused")
		}, outbox.PublishOptions{Backoff: constant(backoff)})
		s.stage(l, "k", "x")
		time.Sleep(watched)
		stop()
		require.LessOrEqual(t, w.len(), int(watched/backoff)+1)
		require.GreaterOrEqual(t, w.len(), int(watched/backoff)/2)
		for i, p := range w.all() {
			require.Equal(t, i+1, p.attempt)
		}
		e, _ := entry(t, l, "k")
		require.Equal(t, w.len(), e.Attempt)
		require.Equal(t, "refused", e.LastError)
	})
}

// A row at the head that always fails, in whatever way, holds nobody up: alone
// in its batch, or with others that its error makes fail once.
func TestG3RowThatAlwaysFailsLetsOthersGoOut(t *testing.T) {
	for name, failure := range map[string]func() error{
		"cancelled":    func() error { return fmt.Errorf("call: %w", context.Canceled) },
		"deadline":     func() error { return context.DeadlineExceeded },
		"panic":        func() error { panic("boom") },
		"batch of ten": func() error { return errors.New("refused") },
		"lease lost":   func() error { return outbox.ErrLeaseLost },
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, s *site) {
				const good = 20
				l := s.latest("")
				s.stage(l, "bad", "x")
				s.stageMany(l, "good", good)
				size := 1
				if name == "batch of ten" {
					size = 10
				}
				var w witness
				s.run(new(logbook).options(), l.Publisher(func(_ context.Context, batch []*outbox.Entry[string]) error {
					for _, e := range batch {
						if e.Key == "bad" {
							return failure()
						}
					}
					w.saw(batch)
					return nil
				}, outbox.PublishOptions{BatchSize: size}))
				eventually(t, "the others to go out", func() bool { return w.len() == good })
				eventually(t, "them to be settled", func() bool { return s.count(`SELECT count(*) FROM {t:entries}`) == 1 })
				eventually(t, "the failure to be recorded", func() bool {
					e, ok := entry(t, l, "bad")
					require.True(t, ok, "the row is kept")
					return e.LastError != ""
				})
				require.Empty(t, w.twice())
			})
		})
	}
}

// A call that takes several leases keeps them.
func TestG5LeasesLastAsLongAsTheCall(t *testing.T) {
	const lease = 600 * time.Millisecond
	onBoth(t, func(t *testing.T, s *site) {
		var w witness
		book := new(logbook)
		stop := s.fleet(2, book, "", func(ctx context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			select {
			case <-ctx.Done():
				return ctx.Err()
			case <-time.After(4 * lease):
				return nil
			}
		}, outbox.PublishOptions{Lease: lease})
		s.stage(s.latest(""), "k", "x")
		eventually(t, "it to be settled", func() bool { return w.len() > 0 && s.empty() })
		stop()
		require.Len(t, w.all(), 1)
		require.Empty(t, book.noise())
	})
}

// Publications that take all connections of the pool starve the extension of
// their leases: they are cancelled before the leases end, and only then may
// others publish.
func TestG5StarvedPoolEndsPublicationsBeforeTheirLeases(t *testing.T) {
	const lease, connections = 1500 * time.Millisecond, 2
	onBoth(t, func(t *testing.T, s *site) {
		db := s.open()
		db.SetMaxOpenConns(connections)
		store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		s.stage(s.latest(""), "k", "x")
		var began, ended time.Time
		holding, over := make(chan struct{}), make(chan error, 1)
		var first atomic.Bool
		s.run(new(logbook).options(), latestOn(t, store, "").Publisher(func(ctx context.Context, _ []*outbox.Entry[string]) error {
			if !first.CompareAndSwap(false, true) {
				return nil
			}
			began = time.Now()
			for range connections {
				conn, err := db.Conn(context.Background())
				if err != nil {
					return err
				}
				defer conn.Close()
			}
			close(holding)
			<-ctx.Done()
			ended = time.Now()
			over <- context.Cause(ctx)
			return ctx.Err()
		}, outbox.PublishOptions{Lease: lease, InFlight: 1}))
		<-holding
		var other witness
		s.run(new(logbook).options(), s.latest("").Publisher(other.publish, outbox.PublishOptions{Lease: lease}))
		require.ErrorIs(t, <-over, outbox.ErrLeaseLost)
		require.Less(t, ended.Sub(began), lease)
		eventually(t, "the row to be settled", s.empty)
		if other.len() > 0 {
			require.True(t, other.all()[0].at.After(ended), "no two at a time")
		}
	})
}

// Passes, flushes, wakes and resumes by hand leave rows in flight alone.
func TestG5SweepsByHandSendNothingTwice(t *testing.T) {
	const rows = 300
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		s.stageMany(l, "k", rows)
		var w witness
		slow := func(_ context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			time.Sleep(20 * time.Millisecond)
			return nil
		}
		book := new(logbook)
		stop := s.fleet(1, book, "", slow, outbox.PublishOptions{BatchSize: 10, InFlight: 4})
		var done atomic.Bool
		var sweeps sync.WaitGroup
		for range 2 {
			byHand, err := outbox.NewRelay(book.options(), latestOn(t, s.newStore(sqlstore.Options{}), "").
				Publisher(slow, outbox.PublishOptions{BatchSize: 10}))
			require.NoError(t, err)
			sweeps.Go(func() {
				for !done.Load() {
					_, err := byHand.RunOnce(context.Background())
					_, err2 := byHand.Flush(context.Background())
					if err = errors.Join(err, err2, s.store.Pause(context.Background(), "default", 0, "")); err != nil {
						t.Error(err)
						return
					}
					s.store.Wake()
				}
			})
		}
		eventually(t, "all to be published and settled", func() bool { return w.len() >= rows && s.empty() })
		done.Store(true)
		sweeps.Wait()
		stop()
		require.Len(t, w.all(), rows)
		require.Empty(t, w.twice())
		require.Empty(t, book.noise())
	})
}

// A fleet never publishes a key twice at a time, and shows its versions in order.
func TestG5FleetPublishesAKeyInOrderAndOneAtATime(t *testing.T) {
	const keys, stages = 10, 200
	onBoth(t, func(t *testing.T, s *site) {
		var busy sync.Map // key to *atomic.Int32
		var overlaps atomic.Int32
		var w witness
		stop := s.fleet(4, new(logbook), "", func(_ context.Context, batch []*outbox.Entry[string]) error {
			for _, e := range batch {
				n, _ := busy.LoadOrStore(e.Key, new(atomic.Int32))
				if n.(*atomic.Int32).Add(1) > 1 {
					overlaps.Add(1)
				}
				defer n.(*atomic.Int32).Add(-1)
			}
			w.saw(batch)
			time.Sleep(rand.N(10 * time.Millisecond))
			return nil
		}, outbox.PublishOptions{BatchSize: 3})
		l := s.latest("")
		last := map[string]outbox.Version{}
		for range stages {
			key := fmt.Sprintf("k%d", rand.N(keys))
			last[key] = s.stage(l, key, "x")
		}
		eventually(t, "all to be settled", s.empty)
		stop()
		require.Zero(t, overlaps.Load())
		require.Empty(t, w.twice())
		high := map[string]outbox.Version{}
		for _, p := range w.all() {
			require.Greater(t, p.version, high[p.key], "versions of %s in order", p.key)
			high[p.key] = p.version
		}
		require.Equal(t, last, high)
	})
}
