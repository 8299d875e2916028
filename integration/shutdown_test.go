package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// A destination that accepts before it answers must not be asked twice because
// of a stop in between.
func TestStopLetsACallFinishThatWasUnderWay(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		s.stage(l, "k", "x")
		var w witness
		accepted, answer := make(chan struct{}), make(chan struct{})
		book := new(logbook)
		stop := s.run(book.options(), l.Publisher(func(ctx context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			close(accepted)
			<-answer
			return ctx.Err() // nil: a clean stop cancels nothing
		}, outbox.PublishOptions{}))
		<-accepted
		stopped := make(chan error)
		go func() { stopped <- stop() }()
		time.Sleep(50 * time.Millisecond)
		close(answer)
		require.NoError(t, <-stopped)
		require.True(t, s.empty())
		require.Empty(t, book.noise())
	})
}

// Without time to finish, the outcome is unknown: the value goes out again at
// once, by whoever comes next, and the stop says what it left.
func TestStopThatCutsACallPublishesAgainAtOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		s.stage(l, "k", "x")
		var w witness
		accepted := make(chan struct{})
		o := new(logbook).options()
		o.ShutdownTimeout = time.Nanosecond
		stop := s.run(o, l.Publisher(func(ctx context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			close(accepted)
			<-ctx.Done()
			return nil // it lies, and is not believed
		}, outbox.PublishOptions{}))
		<-accepted
		require.ErrorContains(t, stop(), `1 entries of channel "default"`)
		e, ok := entry(t, l, "k")
		require.True(t, ok)
		require.Contains(t, e.LastError, "stopping")
		pass := s.once(l, outbox.PublishOptions{}, w.publish)
		require.Equal(t, 1, pass.Published, "due at once")
		require.Equal(t, 2, w.len())
	})
}

// A context cancelled at any moment, with many calls under way: what finished
// is settled, so nothing goes out twice, and nobody panics or complains.
func TestStopAtAnyMomentSettlesWhatFinished(t *testing.T) {
	const rounds, each = 100, 5
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		var w witness
		book := new(logbook)
		relay, err := outbox.NewRelay(book.options(), l.Publisher(func(ctx context.Context, batch []*outbox.Entry[string]) error {
			time.Sleep(rand.N(2 * time.Millisecond))
			w.saw(batch)
			return ctx.Err()
		}, outbox.PublishOptions{BatchSize: 2, InFlight: 8}))
		require.NoError(t, err)
		for round := range rounds {
			s.stageMany(l, fmt.Sprintf("%d-", round), each)
			ctx, cancel := context.WithCancel(t.Context())
			after := w.len() + rand.N(each)
			done := make(chan error)
			go func() { done <- relay.Run(ctx) }()
			for began := time.Now(); w.len() < after && time.Since(began) < time.Second; {
				time.Sleep(200 * time.Microsecond)
			}
			cancel()
			require.NoError(t, <-done)
			require.Equal(t, (round+1)*each-w.len(), s.count(`SELECT count(*) FROM {t:entries}`), "what was published is settled")
			require.Zero(t, s.count(`SELECT count(*) FROM {t:entries} WHERE lease_until > 0`), "what was not is given back")
		}
		require.Empty(t, w.twice())
		for _, p := range w.all() {
			require.Equal(t, 1, p.attempt, "what was not begun was not counted")
		}
		require.Empty(t, book.noise())
	})
}

// Clean stops, at any moment of starting and of being idle, are no errors.
func TestCleanStopsLogNoError(t *testing.T) {
	const stops = 200
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		var w witness
		book := new(logbook)
		relay, err := outbox.NewRelay(book.options(), l.Publisher(w.publish, outbox.PublishOptions{}))
		require.NoError(t, err)
		for n := range stops {
			ctx, cancel := context.WithCancel(t.Context())
			done := make(chan error)
			go func() { done <- relay.Run(ctx) }()
			time.AfterFunc(rand.N(3*time.Millisecond), cancel)
			err := s.store.Transact(ctx, nil, func(tx *sql.Tx) error {
				_, err := l.Stage(ctx, tx, fmt.Sprint(n), "x")
				return err
			})
			require.True(t, err == nil || errors.Is(err, context.Canceled), "%v", err)
			<-ctx.Done()
			require.NoError(t, <-done)
			if _, err := relay.RunOnce(ctx); err != nil {
				require.ErrorIs(t, err, context.Canceled)
			}
		}
		require.Empty(t, book.noise())
	})
}

// A publish function that ignores its context delays the stop by no more than
// was allowed; the stop says so, others take the row over after its lease, and
// what the function says at last changes nothing.
func TestStopDoesNotWaitForACallThatIgnoresItsContext(t *testing.T) {
	const timeout, lease = 200 * time.Millisecond, 700 * time.Millisecond
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		v := s.stage(l, "k", "x")
		started, release := make(chan struct{}), make(chan struct{})
		o := new(logbook).options()
		o.ShutdownTimeout = timeout
		stop := s.run(o, l.Publisher(func(context.Context, []*outbox.Entry[string]) error {
			close(started)
			<-release
			return nil
		}, outbox.PublishOptions{Lease: lease}))
		<-started
		began := time.Now()
		require.ErrorContains(t, stop(), "ignores its cancelled context")
		require.Less(t, time.Since(began), timeout+2*time.Second)

		var w witness
		stopOther := s.run(new(logbook).options(), l.Publisher(w.publish, outbox.PublishOptions{Lease: lease}))
		eventually(t, "another relay to publish", func() bool { return w.len() == 1 && s.empty() })
		require.NoError(t, stopOther())
		require.Equal(t, v, w.all()[0].version)
		again := s.stage(l, "k", "y")
		close(release)
		time.Sleep(50 * time.Millisecond)
		e, ok := entry(t, l, "k")
		require.True(t, ok)
		require.Equal(t, again, e.Version)
	})
}

// Whatever order a relay is started and stopped in, each call has a defined end.
func TestRelayCanBeRunAndStoppedInAnyOrder(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		ctx, cancel := context.WithCancel(t.Context())
		var w witness
		var relay *outbox.Relay
		var err error
		inside := make(chan error, 2)
		relay, err = outbox.NewRelay(new(logbook).options(), l.Publisher(func(_ context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			inside <- relay.Run(ctx) // while it runs
			_, err := relay.RunOnce(ctx)
			inside <- err
			cancel() // stops itself
			return nil
		}, outbox.PublishOptions{}))
		require.NoError(t, err)
		s.stage(l, "k", "x")
		require.NoError(t, relay.Run(ctx))
		require.ErrorIs(t, <-inside, outbox.ErrState)
		require.ErrorIs(t, <-inside, outbox.ErrState)
		require.True(t, s.empty(), "what stopped it is settled")
		require.NoError(t, relay.Run(ctx), "a context that has ended already")

		ctx, cancel = context.WithCancel(t.Context())
		s.stage(l, "k", "y")
		require.NoError(t, relay.Run(ctx), "run again")
		require.Equal(t, 2, w.len())
		cancel()
	})
}

// When Run has returned, nothing of the library is left, so the database may
// be closed; and one that is closed too early is not asked in a loop.
func TestNothingIsLeftRunningAfterAStop(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		db := s.open()
		store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		l := latestOn(t, store, "")
		var w witness
		book := new(logbook)
		stop := s.run(book.options(), l.Publisher(w.publish, outbox.PublishOptions{}))
		s.stageMany(s.latest(""), "k", 200)
		eventually(t, "some work", func() bool { return w.len() > 100 })
		require.NoError(t, stop())
		require.NoError(t, db.Close())
		require.Empty(t, libraryGoroutines())
		require.Empty(t, book.grep("closed"))

		db = s.open()
		store, err = sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		stop = s.run(book.options(), latestOn(t, store, "").Publisher(w.publish, outbox.PublishOptions{}))
		eventually(t, "more work", s.empty)
		require.NoError(t, db.Close())
		time.Sleep(time.Second)
		require.NotZero(t, book.count(outbox.EventTrouble))
		require.Less(t, book.count(outbox.EventTrouble), 15)
		require.NoError(t, stop())
		require.Empty(t, libraryGoroutines())
	})
}

// libraryGoroutines returns the stacks of goroutines that this library started.
func libraryGoroutines() (stacks []string) {
	text := make([]byte, 16<<20)
	text = text[:runtime.Stack(text, true)]
	for _, stack := range strings.Split(string(text), "\n\n") {
		if strings.Contains(stack, "created by github.com/seed-2b36b211/sqloutbox/outbox.") {
			stacks = append(stacks, stack)
		}
	}
	return stacks
}

// Deployments in a row over a backlog, some of which cut calls short, lose
// nothing and leave no row waiting for a backoff.
func TestG3DeploymentsInARowDelayNothing(t *testing.T) {
	const deployments, rows = 20, 100
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		s.stageMany(l, "k", rows)
		var w witness
		var cuts atomic.Int32
		publish := func(ctx context.Context, batch []*outbox.Entry[string]) error {
			w.saw(batch)
			select {
			case <-ctx.Done():
				cuts.Add(1)
				return ctx.Err()
			case <-time.After(rand.N(40 * time.Millisecond)):
				return nil
			}
		}
		for n := range deployments {
			o := new(logbook).options()
			if n%2 == 0 {
				o.ShutdownTimeout = time.Nanosecond
			}
			before := w.len()
			stop := s.run(o, l.Publisher(publish, outbox.PublishOptions{BatchSize: 2, Lease: time.Second}))
			eventually(t, "work", func() bool { return w.len() > before || s.empty() })
			_ = stop() // says what it cut
			require.Zero(t, s.scheduled(l), "nothing in backoff")
		}
		require.NotZero(t, cuts.Load())
		s.run(new(logbook).options(), l.Publisher(w.publish, outbox.PublishOptions{}))
		eventually(t, "all to be settled", s.empty)
		require.Len(t, w.newest(), rows)
	})
}

// scheduled counts the rows of the default channel that are due later.
func (s *site) scheduled(l *outbox.Latest[string]) (n int) {
	relay, err := outbox.NewRelay(outbox.RelayOptions{}, l.Publisher(new(witness).publish, outbox.PublishOptions{}))
	require.NoError(s.t, err)
	stats, err := relay.Stats(s.t.Context())
	require.NoError(s.t, err)
	for _, c := range stats {
		n += c.Scheduled
	}
	return n
}
