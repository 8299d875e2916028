package outbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// sink is a destination that can be down.
type sink struct {
	mu  sync.Mutex
	err error // nil: it is up
}

func (s *sink) publish(context.Context, []*Entry[string]) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

func (s *sink) comeBack() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.err = nil
}

func TestUnavailableDestinationPausesTheChannelAndSpendsNoAttempts(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sink{err: Unavailable(errSink)}
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 8, InFlight: 1}, s.publish)
		g.stage(keys(100)...)
		g.start()
		require.Len(t, g.published(), 1)
		for range 60 * 10 { // stages and wakes do not hammer it
			time.Sleep(time.Second)
			g.stage("k00050")
			g.store.hint(Hint{})
		}
		calls := g.published()
		require.Less(t, len(calls), 14, "ten minutes at growing pauses")
		for _, c := range calls[1:] {
			require.Len(t, c.keys, 1, "a probe is one row")
		}
		for _, k := range keys(100) {
			row, ok := g.store.row("c", k)
			require.True(t, ok)
			require.Zero(t, row.Attempt)
		}

		s.comeBack()
		time.Sleep(5 * time.Minute)
		synctest.Wait()
		require.Zero(t, g.store.size())
		var sizes []int
		for _, c := range g.published()[len(calls):] {
			sizes = append(sizes, len(c.keys))
		}
		require.Equal(t, []int{1, 2, 4, 8, 8}, sizes[:5], "no stampede")
		require.Equal(t, 1, g.store.count("up"))
		require.NotEmpty(t, g.seen(EventOutage))
		require.NotEmpty(t, g.seen(EventResume))
		require.NoError(t, g.stop())
	})
}

func TestProbeThatFailsOtherwise(t *testing.T) {
	for name, c := range map[string]struct {
		publish PublishFunc[string]
		up      int
		down    int // after the first
	}{
		"plainly": {func(context.Context, []*Entry[string]) error { return errSink }, 1, 0},
		"by a mark": {func(_ context.Context, b []*Entry[string]) error {
			b[0].Fail(Permanent(errSink))
			return nil
		}, 1, 0},
		"by a panic":       {func(context.Context, []*Entry[string]) error { panic("x") }, 0, 1},
		"by its time":      {func(ctx context.Context, _ []*Entry[string]) error { <-ctx.Done(); return ctx.Err() }, 0, 1},
		"unknown":          {func(context.Context, []*Entry[string]) error { return Unknown(errSink) }, 0, 1},
		"still down":       {func(context.Context, []*Entry[string]) error { return Unavailable(errSink) }, 0, 1},
		"deferred":         {func(context.Context, []*Entry[string]) error { return Defer(time.Minute) }, 0, 0},
		"down by one mark": {func(_ context.Context, b []*Entry[string]) error { b[0].Fail(Unavailable(errSink)); return nil }, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				publish := PublishFunc[string](func(context.Context, []*Entry[string]) error { return Unavailable(errSink) })
				g := newRig(t, RelayOptions{}, PublishOptions{AttemptTimeout: time.Second}, func(ctx context.Context, b []*Entry[string]) error {
					return publish(ctx, b)
				})
				g.stage("a", "b")
				_, err := g.relay.RunOnce(t.Context())
				require.NoError(t, err)
				pass, err := g.relay.RunOnce(t.Context())
				require.NoError(t, err)
				require.Zero(t, pass, "the store's pause is honoured")
				time.Sleep(time.Second)
				publish = c.publish
				pass, err = g.relay.RunOnce(t.Context())
				require.NoError(t, err)
				require.Equal(t, 1, pass.Claimed)
				require.Equal(t, c.up, g.store.count("up"))
				require.Equal(t, 1+c.down, g.store.count("down"))
			})
		})
	}
}

func TestUnavailableByOneMarkAcknowledgesTheOthers(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, func(_ context.Context, b []*Entry[string]) error {
			b[2].Fail(Unavailable(errSink))
			return nil
		})
		g.stage("a", "b", "c", "d")
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 4, Published: 3, Released: 1}, pass)
		require.Equal(t, 1, g.store.count("down"))
	})
}

func TestOutageIsRecordedBeforeItsRowsAreGivenBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, (&sink{err: Unavailable(errSink)}).publish)
		g.stage("a")
		fails := 2
		g.store.setFault(func(op string, after bool) error {
			if op == "down" && !after && fails > 0 {
				fails--
				return errDown
			}
			return nil
		})
		_, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		var ops []string
		for _, c := range g.store.calls {
			ops = append(ops, c.op)
		}
		require.Equal(t, []string{"stage", "claim", "down", "down", "down", "settle"}, ops)
	})
}

func TestOutageThatCannotBeRecordedSlowsThisRelay(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: time.Second}, (&sink{err: Unavailable(errSink)}).publish)
		g.store.setFault(failing("down"))
		g.start()
		for range 300 {
			g.stage("a")
			time.Sleep(time.Second)
		}
		require.Less(t, len(g.published()), 20)
		require.NoError(t, g.stop())
	})
}

func TestShutdownIsNoOutage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{ShutdownTimeout: time.Second}, PublishOptions{}, func(ctx context.Context, _ []*Entry[string]) error {
			<-ctx.Done()
			return Unavailable(ctx.Err())
		})
		g.stage("a")
		g.start()
		require.Error(t, g.stop())
		require.Zero(t, g.store.count("down"))
		row, _ := g.store.row("c", "a")
		require.Equal(t, 1, row.Attempt)
	})
}

func TestRelayThatSeesAnOutageComesBackGently(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 4}, nil)
		g.store.mu.Lock()
		c := g.store.channel(Channel{SystemLatest, "c"})
		c.level, c.outage = 1, time.Now().Add(10*time.Second)
		g.store.mu.Unlock()
		g.start()
		time.Sleep(5 * time.Second)
		g.stage(keys(20)...)
		g.store.mu.Lock()
		*c = fakeChannel{} // another relay's probe got through
		g.store.mu.Unlock()
		time.Sleep(2 * time.Second)
		require.Zero(t, g.store.size())
		require.Len(t, g.published()[0].keys, 1)
		require.NoError(t, g.stop())
	})
}

func TestPausedChannelIsNotClaimedAndResumesOnAWake(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.store.mu.Lock()
		g.store.channel(Channel{SystemLatest, "c"}).paused = time.Now().Add(time.Hour)
		g.store.mu.Unlock()
		g.start()
		for range 100 {
			g.stage("a")
			time.Sleep(time.Second)
		}
		require.Empty(t, g.published())
		require.Zero(t, g.store.count("claim"))
		g.store.mu.Lock()
		g.store.channel(Channel{SystemLatest, "c"}).paused = time.Time{}
		g.store.mu.Unlock()
		g.store.hint(Hint{})
		synctest.Wait()
		require.Len(t, g.published(), 1)
		require.NoError(t, g.stop())
	})
}

func TestThreeFailedBatchesSlowTheChannel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sink{err: errSink}
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 8, InFlight: 1}, s.publish)
		g.start()
		for range 60 * 10 {
			g.stage(keys(20)...) // anew, with fresh attempts, due at once
			time.Sleep(time.Second)
		}
		calls := g.published()
		require.Less(t, len(calls), 16)
		for _, c := range calls[3:] {
			require.Len(t, c.keys, 1, "a trial is one row")
		}
		require.NotEmpty(t, g.seen(EventSlow))
		require.Contains(t, g.logged(), "channel slowed")

		s.comeBack()
		time.Sleep(5 * time.Minute)
		require.Zero(t, g.store.size())
		var sizes []int
		for _, c := range g.published()[len(calls):] {
			sizes = append(sizes, len(c.keys))
		}
		require.Equal(t, []int{1, 2, 4, 8}, sizes[:4])
		require.Len(t, g.seen(EventResume), 1)

		before := len(g.published())
		g.stage(keys(8)...)
		time.Sleep(time.Second)
		require.Len(t, g.published(), before+1, "at full size again")
		require.NoError(t, g.stop())
	})
}

// Field case S31: one key that fails for ever must not slow the others.
func TestKeyThatAlwaysFailsDoesNotSlowTheOthers(t *testing.T) {
	for name, err := range map[string]error{
		"plain": errSink, "canceled": context.Canceled, "deadline": context.DeadlineExceeded,
		"nil cause": Permanent(nil), "panic": nil, "joined": errors.Join(errSink, context.Canceled),
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 1}, func(_ context.Context, b []*Entry[string]) error {
					if b[0].Key != "bad" {
						return nil
					}
					if err == nil {
						panic("bad")
					}
					return err
				})
				g.stage("bad")
				g.start()
				time.Sleep(10 * time.Minute)
				require.Less(t, g.times("bad"), 20)
				require.Empty(t, g.seen(EventSlow))
				g.stage(keys(100)...)
				time.Sleep(10 * time.Millisecond)
				for _, k := range keys(100) {
					require.Equal(t, 1, g.times(k))
				}
				require.NoError(t, g.stop())
			})
		})
	}
}

func TestRowsRefusedForGoodDoNotSlowTheChannel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 1}, (&sink{err: Permanent(errSink)}).publish)
		g.stage(keys(100)...)
		g.start()
		require.Len(t, g.published(), 100)
		require.Empty(t, g.seen(EventSlow))
		require.NoError(t, g.stop())
	})
}

// Field case S29: a row that is always given back does not spin.
func TestDeferringForNoTimeDoesNotSpin(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, func(_ context.Context, b []*Entry[string]) error {
			return Defer(0)
		})
		g.stage("a")
		g.start()
		time.Sleep(10 * time.Minute)
		require.Less(t, len(g.published()), 20)
		row, _ := g.store.row("c", "a")
		require.Zero(t, row.Attempt)
		require.NoError(t, g.stop())
	})
}

func TestDeferringForLongDoesNotSlow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 1}, func(_ context.Context, b []*Entry[string]) error {
			if b[0].Key < "k00050" {
				return Defer(time.Hour)
			}
			return nil
		})
		g.stage(keys(100)...)
		g.start()
		synctest.Wait()
		require.Equal(t, 50, g.store.size())
		require.Len(t, g.published(), 100)
		require.NoError(t, g.stop())
	})
}

func TestPassIgnoresTheRelaysOwnSlowing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		s := &sink{err: errSink}
		g := newRig(t, RelayOptions{}, PublishOptions{}, s.publish)
		for i := range 10 {
			g.stage(fmt.Sprint(i))
			pass, err := g.relay.RunOnce(t.Context())
			require.NoError(t, err)
			require.Equal(t, Pass{Claimed: 1, Retried: 1}, pass)
		}
	})
}
