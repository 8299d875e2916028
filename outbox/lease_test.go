package outbox

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var errDown = errors.New("database is down")

// takes returns a publish function that takes d and obeys its context, and
// tells why its context ended.
func takes(d time.Duration, cause *error) PublishFunc[string] {
	return func(ctx context.Context, _ []*Entry[string]) error {
		select {
		case <-time.After(d):
			return nil
		case <-ctx.Done():
			*cause = context.Cause(ctx)
			return ctx.Err()
		}
	}
}

func failing(ops ...string) func(string, bool) error {
	return func(op string, after bool) error {
		for _, o := range ops {
			if o == op && !after {
				return errDown
			}
		}
		return nil
	}
}

func TestLeaseIsExtendedEveryThirdWhileAPublicationRuns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, takes(30*time.Second-1, &cause))
		g.stage("a", "b")
		g.start()
		for range 29 {
			time.Sleep(time.Second)
			synctest.Wait()
			row, _ := g.store.row("c", "a")
			require.Equal(t, 3*time.Second, time.Until(row.LeaseUntil))
		}
		time.Sleep(time.Second)
		require.Equal(t, 29, g.store.count("extend"))
		require.Len(t, g.published(), 1)
		require.Zero(t, g.store.size())
		require.NoError(t, g.stop())
		require.NoError(t, cause)
	})
}

func TestPublicationIsCancelledBeforeALeaseThatCannotBeExtendedEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		var ended time.Time
		publish := takes(time.Minute, &cause)
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second, Backoff: second}, func(ctx context.Context, batch []*Entry[string]) error {
			defer func() { ended = time.Now() }()
			return publish(ctx, batch)
		})
		g.stage("a")
		g.store.setFault(failing("extend"))
		start := time.Now()
		_, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, cause, ErrLeaseLost)
		require.Less(t, ended.Sub(start), 3*time.Second)
		require.Greater(t, ended.Sub(start), 2*time.Second, "as long as the lease surely lasts")
		require.Less(t, g.store.count("extend"), 20)
		row, _ := g.store.row("c", "a")
		require.Contains(t, row.LastError, "lease lost")
		require.Equal(t, 1, row.Attempt)
	})
}

func TestLeaseIsCountedFromBeforeTheClaimWasSent(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, takes(time.Minute, &cause))
		g.stage("a")
		g.store.setFault(func(op string, after bool) error {
			if op == "claim" && after {
				time.Sleep(2 * time.Second) // the answer takes its time
			}
			if op == "extend" && !after {
				return errDown
			}
			return nil
		})
		start := time.Now()
		_, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, cause, ErrLeaseLost)
		require.Less(t, time.Since(start), 3*time.Second)
	})
}

func TestExtensionIsRetriedUntilItWorks(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, takes(20*time.Second, &cause))
		g.stage("a")
		start := time.Now()
		g.store.setFault(func(op string, after bool) error {
			if d := time.Since(start); op == "extend" && !after && d > 5*time.Second && d < 6500*time.Millisecond {
				return errDown
			}
			return nil
		})
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.NoError(t, cause)
		require.Equal(t, Pass{Claimed: 1, Published: 1}, pass)
		require.NotEmpty(t, g.seen(EventTrouble))
		require.Len(t, g.seen(EventRecover), 1)
	})
}

func TestHangingExtensionDoesNotOutliveTheLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		publish := takes(time.Minute, &cause)
		var ended time.Time
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, func(ctx context.Context, batch []*Entry[string]) error {
			defer func() { ended = time.Now() }()
			return publish(ctx, batch)
		})
		g.stage("a")
		start := time.Now()
		g.store.fault = nil
		hang := &hangingStore{fakeStore: g.store}
		l, err := NewLatest(hang, LatestOptions[string]{Channel: "c"})
		require.NoError(t, err)
		g.relay = g.newRelay(RelayOptions{}, l.Publisher(func(ctx context.Context, batch []*Entry[string]) error {
			defer func() { ended = time.Now() }()
			return publish(ctx, batch)
		}, PublishOptions{Lease: 3 * time.Second}))
		_, err = g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, cause, ErrLeaseLost)
		require.Less(t, ended.Sub(start), 3*time.Second)
	})
}

// hangingStore answers no extension.
type hangingStore struct{ *fakeStore }

func (s *hangingStore) Extend(ctx context.Context, ch Channel, rows []Row, d time.Duration) ([]Result, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestLostRowIsReportedAloneAndHarmsNobody(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, takes(10*time.Second, &cause))
		vs := g.stage("a", "b", "c")
		time.AfterFunc(time.Second/2, func() {
			_ = g.latest.Discard(context.Background(), "b", vs[1])
		})
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.NoError(t, cause)
		require.Equal(t, Pass{Claimed: 3, Published: 2, LeaseLost: 1}, pass)
		lost := g.seen(EventLost)
		require.NotEmpty(t, lost)
		require.Equal(t, 1, lost[0].Rows)
		require.ErrorIs(t, lost[0].Err, ErrLeaseLost)
		for _, c := range g.store.callsOf("extend")[1:] {
			require.Equal(t, 2, c.rows, "lost rows are not extended again")
		}
	})
}

func TestPublicationIsCancelledWhenEveryRowIsLost(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, takes(time.Minute, &cause))
		g.stage("a", "b")
		time.AfterFunc(1500*time.Millisecond, func() {
			for _, k := range []string{"a", "b"} {
				g.store.edit("c", k, func(r *fakeRow) { r.Token = 99999 })
			}
		})
		start := time.Now()
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.ErrorIs(t, cause, ErrLeaseLost)
		require.Equal(t, 2*time.Second, time.Since(start))
		require.Equal(t, Pass{Claimed: 2, LeaseLost: 2}, pass)
	})
}

func TestLockedRowsAreExtendedSoonAndCancelNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, takes(20*time.Second, &cause))
		g.stage("a", "b")
		g.lockFor("b", 500*time.Millisecond, 2500*time.Millisecond)
		g.start()
		time.Sleep(2800 * time.Millisecond)
		b, _ := g.store.row("c", "b")
		require.Greater(t, time.Until(b.LeaseUntil), 2*time.Second, "held again soon after it is free")
		time.Sleep(18 * time.Second)
		require.NoError(t, cause)
		require.Len(t, g.published(), 1)
		require.Zero(t, g.store.size())
		require.NoError(t, g.stop())
	})
}

// lockFor has a transaction hold a key of channel c for a while.
func (g *rig) lockFor(key string, from, to time.Duration) {
	lock := func(locked bool) func() {
		return func() { g.store.edit("c", key, func(r *fakeRow) { r.locked = locked }) }
	}
	time.AfterFunc(from, lock(true))
	time.AfterFunc(to, lock(false))
}

func TestKeyWhoseLeaseLapsedUnderALockHasOneCallAtATime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, takes(20*time.Second, &cause))
		g.stage("a", "b")
		g.lockFor("b", 500*time.Millisecond, 8*time.Second)
		g.start()
		time.Sleep(time.Minute)
		require.NoError(t, cause)
		require.Equal(t, 1, g.times("a"))
		for _, c := range g.published()[1:] {
			require.Equal(t, []string{"b"}, c.keys)
			require.GreaterOrEqual(t, c.at.Sub(g.published()[0].at), 20*time.Second)
		}
		require.LessOrEqual(t, len(g.published()), 2)
		require.Zero(t, g.store.size())
		require.NoError(t, g.stop())
	})
}

func TestExtensionsStopWhenThePublicationIsGivenUp(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: time.Second, AttemptTimeout: 2 * time.Second}, func(context.Context, []*Entry[string]) error {
			<-release
			return nil
		})
		g.stage("a")
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 1, Retried: 1}, pass)
		n := g.store.count("extend")
		time.Sleep(time.Minute)
		require.Equal(t, n, g.store.count("extend"))
		close(release)
	})
}

func TestCallThatIsSlowToEndAfterLosingItsLeaseIsNotOverlapped(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var ended time.Time
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second, Backoff: second}, func(ctx context.Context, b []*Entry[string]) error {
			if ended.IsZero() {
				<-ctx.Done()
				time.Sleep(4 * time.Second)
				ended = time.Now()
			}
			return nil
		})
		g.stage("a")
		start := time.Now()
		g.store.setFault(func(op string, after bool) error {
			if op == "extend" && time.Since(start) < 4*time.Second {
				return errDown
			}
			return nil
		})
		g.start()
		time.Sleep(time.Minute)
		require.Len(t, g.published(), 2)
		require.False(t, g.published()[1].at.Before(ended))
		require.Zero(t, g.store.size())
		require.NoError(t, g.stop())
	})
}
