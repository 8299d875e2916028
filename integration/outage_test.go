package integration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// destination can be down, and remembers each call.
type destination struct {
	witness
	down  atomic.Bool
	fault error

	mu    sync.Mutex
	calls []call
}

type call struct {
	relay, rows int
	at          time.Time
	failed      bool
}

func (d *destination) publisher(relay int) outbox.PublishFunc[string] {
	return func(_ context.Context, batch []*outbox.Entry[string]) error {
		down := d.down.Load()
		d.mu.Lock()
		d.calls = append(d.calls, call{relay, len(batch), time.Now(), down})
		d.mu.Unlock()
		if down {
			return d.fault
		}
		time.Sleep(5 * time.Millisecond)
		d.saw(batch)
		return nil
	}
}

func (d *destination) made() []call {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.calls)
}

// While a destination says that it is down, the fleet as a whole asks with one
// row at growing intervals, no attempt is spent, and its return is no stampede.
func TestOutageIsProbedByOneRelayAndEndsWithoutAStampede(t *testing.T) {
	t.Parallel()
	const relays, rows = 3, 300
	onBoth(t, func(t *testing.T, s *site) {
		d := &destination{fault: outbox.Unavailable(errors.New("connection refused"))}
		d.down.Store(true)
		book := new(logbook)
		s.stageMany(s.latest(""), "k", rows)
		for n := range relays {
			s.run(book.options(), latestOn(t, s.newStore(sqlstore.Options{}), "").Publisher(d.publisher(n), outbox.PublishOptions{}))
		}
		eventually(t, "the outage", func() bool { return book.count(outbox.EventOutage) > 0 })
		time.Sleep(500 * time.Millisecond) // for the batches that were in flight when it was told
		inFlight := len(d.made())
		require.LessOrEqual(t, inFlight, 2*relays)
		for restaged := range 10 { // fresh values are no reason to ask
			s.stage(s.latest(""), fmt.Sprintf("k%07d", restaged), "y")
		}
		eventually(t, "a probe", func() bool { return len(d.made()) > inFlight })
		time.Sleep(100 * time.Millisecond)
		require.Zero(t, s.count(`SELECT max(attempt) FROM {t:entries}`), "no attempt is spent")
		d.down.Store(false)
		eventually(t, "all to be published and settled", func() bool { return s.empty() })

		calls := d.made()
		probes := slices.DeleteFunc(calls[inFlight:], func(c call) bool { return !c.failed })
		require.Len(t, probes, 1, "before the one that got through")
		requireRamp(t, d.made()[inFlight+1:])
		first, second := d.made()[inFlight], d.made()[inFlight+1]
		require.Equal(t, 1, first.rows)
		require.Equal(t, 1, second.rows)
		require.Greater(t, second.at.Sub(first.at), 1900*time.Millisecond, "the second pause is longer")
		for _, p := range d.all() {
			require.Equal(t, 1, p.attempt)
		}
		require.Empty(t, d.twice())
	})
}

// requireRamp requires of each relay's calls that batches grow from one row.
func requireRamp(t *testing.T, calls []call) {
	t.Helper()
	allowed := map[int]int{}
	for _, c := range calls {
		if allowed[c.relay] == 0 {
			allowed[c.relay] = 1
		}
		require.LessOrEqual(t, c.rows, allowed[c.relay], "calls of relay %d", c.relay)
		allowed[c.relay] *= 2
	}
}

// A destination that is down without saying so is slowed down for, although
// values staged anew are due at once with fresh attempts.
func TestDestinationThatJustFailsIsNotHammered(t *testing.T) {
	t.Parallel()
	const watched = 3 * time.Second
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		d := &destination{fault: errors.New("connection refused")}
		d.down.Store(true)
		book := new(logbook)
		s.run(book.options(), l.Publisher(d.publisher(0), outbox.PublishOptions{}))
		last := map[string]outbox.Version{}
		for n, until := 0, time.Now().Add(watched); time.Now().Before(until); n++ {
			key := fmt.Sprintf("k%d", n%20)
			last[key] = s.stage(l, key, "x")
			time.Sleep(5 * time.Millisecond)
		}
		require.NotZero(t, book.count(outbox.EventSlow))
		require.Less(t, len(d.made()), 15, "calls in %s", watched)
		require.LessOrEqual(t, len(book.grep("publishing failed")), 4, "lines in %s", watched)
		d.down.Store(false)
		eventually(t, "all to be published and settled", s.empty)
		require.Equal(t, last, d.newest())
		require.NotZero(t, book.count(outbox.EventResume))
	})
}

// An operator's pause and resume, from any process, hold in every relay.
func TestPauseHoldsInEveryReplica(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		var w witness
		stop := s.fleet(3, new(logbook), "", w.publish, outbox.PublishOptions{})
		operator := s.newStore(sqlstore.Options{})
		require.NoError(t, operator.Pause(t.Context(), "default", time.Hour, "maintenance"))
		l := s.latest("")
		s.stageMany(l, "k", 100)
		s.store.Wake()
		time.Sleep(300 * time.Millisecond)
		require.Zero(t, w.len())
		stats, err := operator.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, "maintenance", stats[0].Reason)
		require.InDelta(t, time.Hour, stats[0].Paused, float64(time.Minute))
		require.Equal(t, 100, stats[0].Due)

		require.NoError(t, operator.Pause(t.Context(), "default", 200*time.Millisecond, "shorter"))
		eventually(t, "the pause to end by itself", s.empty)
		require.NoError(t, operator.Pause(t.Context(), "default", time.Hour, "again"))
		s.stage(l, "k", "x")
		require.NoError(t, operator.Pause(t.Context(), "default", 0, ""))
		eventually(t, "the resume", s.empty)
		stop()
		require.Empty(t, w.twice())
	})
}

// What is staged in a relay's own process goes out soon after its commit,
// though nobody told the relay of that.
func TestCommitsOfTheProcessGoOutSoon(t *testing.T) {
	const samples = 31
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		published := make(chan time.Time, 1)
		s.run(outbox.RelayOptions{}, l.Publisher(func(context.Context, []*outbox.Entry[string]) error {
			published <- time.Now()
			return nil
		}, outbox.PublishOptions{}))
		var took []time.Duration
		for n := range samples {
			s.stage(l, fmt.Sprint(n), "x")
			committed := time.Now()
			took = append(took, (<-published).Sub(committed))
		}
		slices.Sort(took)
		t.Logf("median %s, at most %s", took[samples/2], took[samples-1])
		require.Less(t, took[samples/2], 100*time.Millisecond, "polling alone takes half a second")
	})
}
