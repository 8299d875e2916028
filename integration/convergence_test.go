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

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

var errDown = errors.New("the destination refused it")

func failing(context.Context, []*outbox.Entry[string]) error { return errDown }

// onClock gives the site a store whose time is the test's.
func (s *site) onClock() *outboxtest.Clock {
	clock := outboxtest.NewClock(time.Time{})
	s.store = s.newStore(sqlstore.Options{Clock: clock.Now})
	return clock
}

func TestG3RestageIsDueAtOnceWithFreshAttempts(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		l := s.latest("orders")
		s.stage(l, "k", "old")
		for range 5 {
			pass := s.once(l, outbox.PublishOptions{Backoff: constant(time.Hour)}, failing)
			require.Equal(t, outbox.Pass{Claimed: 1, Retried: 1}, pass)
			require.Zero(t, s.once(l, outbox.PublishOptions{}, failing), "in backoff")
			clock.Advance(time.Hour)
		}
		clock.Advance(-time.Hour) // in backoff again
		info, ok := entry(t, l, "k")
		require.True(t, ok)
		require.Equal(t, 5, info.Attempt)
		require.Equal(t, errDown.Error(), info.LastError)

		s.stage(l, "k", "new")
		var got *outbox.Entry[string]
		pass := s.once(l, outbox.PublishOptions{}, func(_ context.Context, batch []*outbox.Entry[string]) error {
			got = batch[0]
			return nil
		})
		require.Equal(t, outbox.Pass{Claimed: 1, Published: 1}, pass)
		require.Equal(t, "new", got.Value)
		require.Equal(t, 1, got.Attempt)
		require.Empty(t, got.LastError)
	})
}

// TestG3RestageNeverPostponesAFirstPublication: a key staged more often than
// its BatchDelay is published once per window all the same.
func TestG3RestageNeverPostponesAFirstPublication(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock() // noon: a multiple of every delay here
		const window = time.Minute
		l, err := outbox.NewLatest(s.store, outbox.LatestOptions[string]{Channel: "orders", BatchDelay: window})
		require.NoError(t, err)
		noon := clock.Now()
		dueIn := func() time.Duration {
			t.Helper()
			info, ok := entry(t, l, "k")
			require.True(t, ok)
			return info.Due.Sub(noon)
		}
		clock.Advance(time.Microsecond)
		s.stage(l, "k", "first")
		require.Equal(t, window, dueIn())
		for range 9 {
			clock.Advance(20 * time.Second) // past the end of the window, unclaimed
			s.stage(l, "k", "again")
			require.Equal(t, window, dueIn(), "postponed at %s", clock.Now().Sub(noon))
		}

		// Claimed, the present version is not the newest any more: BatchDelay counts anew.
		held := s.claim("orders", 1, time.Hour)
		require.Len(t, held, 1)
		s.stage(l, "k", "while it is published")
		require.Equal(t, 4*window, dueIn())
		require.Equal(t, []outbox.Result{outbox.ResultSuperseded}, s.settle("orders", outbox.OutcomeDone, 0, held...))
		require.Equal(t, 4*window, dueIn())
		require.Empty(t, s.claim("orders", 1, time.Hour), "BatchDelay was defeated")
		clock.Advance(window - 1*time.Microsecond)
		require.Len(t, s.claim("orders", 1, time.Hour), 1)
	})
}

func TestG3BatchDelayRoundsUpToTheNextWindow(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		for _, c := range []struct{ delay, at, due time.Duration }{
			{time.Second, 0, 0}, // on a boundary: due at once
			{time.Second, time.Microsecond, time.Second},
			{time.Second, time.Second - time.Microsecond, time.Second},
			{time.Second, time.Second, time.Second},
			{time.Hour, time.Minute, time.Hour},
			{24 * time.Hour, 0, 12 * time.Hour}, // it is noon; windows are counted from the epoch
			{time.Microsecond, 7 * time.Microsecond, 7 * time.Microsecond},
			{time.Nanosecond, 7 * time.Microsecond, 7 * time.Microsecond},
			{3 * time.Microsecond, time.Microsecond, 3 * time.Microsecond},
		} {
			start := clock.Now()
			name := fmt.Sprint(c.delay, " at ", c.at)
			l, err := outbox.NewLatest(s.store, outbox.LatestOptions[string]{Channel: name, BatchDelay: c.delay})
			require.NoError(t, err)
			clock.Advance(c.at)
			s.stage(l, "k", "value")
			info, ok := entry(t, l, "k")
			require.True(t, ok)
			require.Equal(t, c.due, info.Due.Sub(start), name)
			require.Equal(t, c.at, info.StagedAt.Sub(start), name)
			clock.Advance(-c.at)
		}
	})
}

// TestG3RestagesDoNotHammerADestinationThatIsDown: each restage is due at once,
// but batches that keep failing slow the channel.
func TestG3RestagesDoNotHammerADestinationThatIsDown(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		for name, end := range map[string]error{"plain": errDown, "unavailable": outbox.Unavailable(errDown)} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				l := s.latest(name)
				var calls atomic.Int64
				var up atomic.Bool
				m := newMirror()
				publish := func(ctx context.Context, batch []*outbox.Entry[string]) error {
					if up.Load() {
						return m.publish(ctx, batch)
					}
					calls.Add(1)
					return end
				}
				for range 2 {
					s.run(outbox.RelayOptions{PollInterval: 50 * time.Millisecond, Logger: quiet}, l.Publisher(publish, outbox.PublishOptions{}))
				}
				last := outbox.Version(0)
				restages := 0
				for until := time.Now().Add(2500 * time.Millisecond); time.Now().Before(until); restages++ {
					last = s.stage(l, fmt.Sprint("k", restages%5), "value")
					time.Sleep(5 * time.Millisecond)
				}
				// Of each relay: two in flight, three failures, then a trial
				// at 0.5 s at the earliest, and at 1.5 s.
				require.Less(t, calls.Load(), int64(16), "%d restages", restages)
				require.Greater(t, restages, 30)
				up.Store(true)
				eventually(t, "the channel to go on", func() bool {
					m.mu.Lock()
					defer m.mu.Unlock()
					return len(m.high) == 5 && m.high[fmt.Sprint("k", (restages-1)%5)].version == last
				})
			})
		}
	})
}

// TestG3DestinationConvergesOnWhatWasCommittedLast: many stagers, two relays,
// and a destination that fails in every way.
func TestG3DestinationConvergesOnWhatWasCommittedLast(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const keys, stagers, stages = 15, 4, 25
		l := s.latest("orders")
		m, book := newMirror(), newLedger()
		var calm atomic.Bool
		publish := func(ctx context.Context, batch []*outbox.Entry[string]) error {
			for _, e := range batch {
				if !calm.Load() && rand.N(8) == 0 {
					e.Fail(errDown)
					continue
				}
				m.note(e)
			}
			switch rand.N(12) {
			case 0:
				if !calm.Load() {
					return errDown
				}
			case 1:
				if !calm.Load() {
					panic("in the middle of it")
				}
			case 2:
				if !calm.Load() {
					<-ctx.Done() // past the AttemptTimeout
				}
			}
			return nil
		}
		o := outbox.PublishOptions{
			BatchSize: 4, Backoff: constant(5 * time.Millisecond),
			AttemptTimeout: 30 * time.Millisecond, Lease: 400 * time.Millisecond,
		}
		for range 2 {
			other := latestOn(t, s.newStore(sqlstore.Options{}), "orders")
			s.run(outbox.RelayOptions{PollInterval: 20 * time.Millisecond, Logger: quiet}, other.Publisher(publish, o))
		}
		c := contest{s: s, store: s.store, writers: stagers, keys: keys, bulk: true, levels: []sql.IsolationLevel{sql.LevelDefault}}
		var wg sync.WaitGroup
		for i := range stagers {
			wg.Go(func() {
				for n := range stages {
					if err := c.write(l, book, i, n); err != nil && !s.store.Retryable(err) {
						t.Errorf("stager %d: %v", i, err)
					}
					time.Sleep(upTo(15 * time.Millisecond))
				}
			})
		}
		wg.Wait()
		calm.Store(true)
		eventually(t, "everything to be published", s.empty)
		book.inCommitOrder(t)
		for key, c := range book.last {
			require.Equal(t, c.value, `"`+m.value(key)+`"`, key)
		}
	})
}

// TestG3ChannelThatNobodyServesKeepsItsRows, shows in the stats, and costs the
// others nothing.
func TestG3ChannelThatNobodyServesKeepsItsRows(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		s.stageMany(s.latest("nobody's"), "k", 2000)
		l := s.latest("ours")
		m := newMirror()
		r, err := outbox.NewRelay(outbox.RelayOptions{PollInterval: 20 * time.Millisecond, Logger: quiet}, l.Publisher(m.publish, outbox.PublishOptions{}))
		require.NoError(t, err)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error, 1)
		go func() { done <- r.Run(ctx) }()
		for range 10 {
			s.stage(l, "k0000001", "the same key is another key here")
			time.Sleep(10 * time.Millisecond)
		}
		eventually(t, "our channel to be empty", func() bool { return s.count(`SELECT count(*) FROM {t:entries} WHERE channel = 'ours'`) == 0 })
		stats, err := r.Stats(t.Context())
		require.NoError(t, err)
		cancel()
		require.NoError(t, <-done)
		require.Len(t, stats, 2)
		nobodys, ours := stats[0], stats[1]
		require.Equal(t, latestChannel("nobody's"), nobodys.Channel)
		require.False(t, nobodys.Attached)
		require.Equal(t, 2000, nobodys.Due)
		require.Positive(t, nobodys.OldestDue)
		require.Zero(t, nobodys.Attempt)
		require.Equal(t, outbox.ChannelStats{Channel: latestChannel("ours"), Attached: true}, ours)
		require.Equal(t, 2000, s.count(`SELECT count(*) FROM {t:entries} WHERE attempt = 0 AND lease_until = 0`))
	})
}
