package outbox

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestSettlementIsRepeatedUntilItWorksAndSaysSo(t *testing.T) {
	for name, effect := range map[string]bool{"without effect": false, "with effect": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
				g.stage("a", "b")
				fails := 3
				g.store.setFault(func(op string, after bool) error {
					if op == "settle" && after == effect && fails > 0 {
						fails--
						return errDown
					}
					return nil
				})
				pass, err := g.relay.RunOnce(t.Context())
				require.NoError(t, err)
				require.Equal(t, Pass{Claimed: 2, Published: 2}, pass, "a settlement that fails is no failed publication")
				calls := g.store.callsOf("settle")
				require.Len(t, calls, 4)
				for i, c := range calls {
					for _, s := range c.ss {
						require.Equal(t, i > 0, s.Again)
						require.Equal(t, OutcomeDone, s.Outcome)
					}
				}
				require.Len(t, g.published(), 1)
				require.Empty(t, g.seen(EventRetry))
			})
		})
	}
}

func TestRowsThatCannotBeSettledAreLeftWhenTheirLeaseEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 3 * time.Second}, nil)
		g.stage("a", "b")
		g.store.setFault(failing("settle"))
		start := time.Now()
		pass, err := g.relay.RunOnce(t.Context())
		require.ErrorIs(t, err, errDown)
		require.Equal(t, Pass{Claimed: 2, Left: 2}, pass)
		require.LessOrEqual(t, time.Since(start), 3*time.Second)
		require.Less(t, g.store.count("settle"), 20)
		require.Len(t, g.seen(EventLeft), 1)
		require.Empty(t, g.seen(EventRetry), "never recorded as a failed publication")

		g.store.setFault(nil)
		time.Sleep(3 * time.Second)
		pass, err = g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 2, Published: 2}, pass)
	})
}

func TestLockedRowsAreSettledBehindTheSlot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{InFlight: 1}, func(context.Context, []*Entry[string]) error {
			return nil
		})
		g.stage("a", "b")
		g.store.setFault(func(op string, after bool) error {
			if op == "claim" && after {
				g.store.edit("c", "a", func(r *fakeRow) {
					if r != nil {
						r.locked = true
					}
				})
			}
			return nil
		})
		g.start()
		synctest.Wait()
		require.Equal(t, 1, g.store.size(), "its batch is settled")
		time.Sleep(10 * time.Second)
		tries := len(g.store.callsOf("settle")) - 1
		require.True(t, tries >= 20 && tries < 60, "soon, then every half second: %d", tries)

		g.store.setFault(nil)
		g.stage("other")
		time.Sleep(time.Second)
		require.Equal(t, 1, g.times("other"), "the slot is free")

		g.store.edit("c", "a", func(r *fakeRow) { r.locked = false })
		time.Sleep(time.Second)
		require.Zero(t, g.store.size())
		require.Equal(t, 1, g.times("a"), "it was published once")
		require.NoError(t, g.stop())
	})
}

func TestRowLockedForLongerThanItsLeaseIsTriedUntilItIsFree(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.stage("a")
		g.store.setFault(func(op string, after bool) error {
			if op == "claim" && after && len(g.published()) == 0 {
				g.store.edit("c", "a", func(r *fakeRow) { r.locked = true })
			}
			return nil
		})
		g.start()
		time.Sleep(10 * time.Minute)
		require.Equal(t, 1, g.times("a"), "nobody can claim it meanwhile")
		require.Equal(t, 1, g.store.size())
		g.store.edit("c", "a", func(r *fakeRow) { r.locked = false })
		time.Sleep(2 * time.Second)
		require.Zero(t, g.store.size())
		require.LessOrEqual(t, g.times("a"), 2, "once more if it was claimed anew before it was settled")
		require.NoError(t, g.stop())
	})
}

func TestManyBatchesWithLockedRowsAreBounded(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 1}, nil)
		ks := keys(100)
		g.stage(ks...)
		g.store.setFault(func(op string, after bool) error {
			if op != "settle" || after {
				return nil
			}
			for _, k := range ks {
				g.store.edit("c", k, func(r *fakeRow) {
					if r != nil {
						r.locked = true
					}
				})
			}
			return nil
		})
		g.start()
		time.Sleep(time.Second)
		require.LessOrEqual(t, len(g.published()), maxLate+2+2)
		g.store.setFault(nil)
		for _, k := range ks {
			g.store.edit("c", k, func(r *fakeRow) { r.locked = false })
		}
		time.Sleep(10 * time.Second)
		require.Zero(t, g.store.size())
		require.Len(t, g.published(), 100)
		require.NoError(t, g.stop())
	})
}

func TestPassWaitsForLockedRowsUntilTheirLeasesLapse(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{Lease: 5 * time.Second}, nil)
		lock := func(op string, after bool) error {
			if op == "claim" && after {
				g.store.edit("c", "a", func(r *fakeRow) { r.locked = true })
			}
			return nil
		}
		g.stage("a")
		g.store.setFault(lock)
		start := time.Now()
		pass, err := g.relay.RunOnce(t.Context())
		require.ErrorIs(t, err, ErrBusy)
		require.Equal(t, Pass{Claimed: 1, Left: 1}, pass)
		require.Equal(t, 5*time.Second, time.Since(start))

		g.store.edit("c", "a", func(r *fakeRow) { r.locked = false })
		time.AfterFunc(2*time.Second, func() { g.store.edit("c", "a", func(r *fakeRow) { r.locked = false }) })
		pass, err = g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 1, Published: 1}, pass)
	})
}

func TestSupersededRowIsClaimedAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var g *rig
		g = newRig(t, RelayOptions{}, PublishOptions{}, func(_ context.Context, batch []*Entry[string]) error {
			if len(g.published()) == 1 {
				// Staged by another process: no hint comes here.
				g.store.mu.Lock()
				g.store.last++
				g.store.put("c", StageRow{Key: "a", Payload: []byte(`"new"`)}, Version(g.store.last), 0)
				g.store.mu.Unlock()
				time.Sleep(10 * time.Millisecond)
			}
			return nil
		})
		g.stage("a")
		g.start()
		time.Sleep(20 * time.Millisecond)
		calls := g.published()
		require.Len(t, calls, 2)
		require.Equal(t, 10*time.Millisecond, calls[1].at.Sub(calls[0].at))
		require.Greater(t, calls[1].vs[0], calls[0].vs[0])
		require.Zero(t, g.store.size())
		require.NoError(t, g.stop())
	})
}

func TestStoreThatAnswersForTooFewRowsIsNotBelieved(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		short := &shortStore{g.store}
		l, err := NewLatest(short, LatestOptions[string]{Channel: "c"})
		require.NoError(t, err)
		g.stage("a")
		r := g.newRelay(RelayOptions{}, l.Publisher(g.record(nil), PublishOptions{Lease: time.Second}))
		pass, err := r.RunOnce(t.Context())
		require.ErrorContains(t, err, "store returned 0 results for 1 settlements")
		require.Equal(t, 1, pass.Left)
	})
}

type shortStore struct{ *fakeStore }

func (s *shortStore) Settle(context.Context, Channel, []Settlement) ([]Result, error) {
	return nil, nil
}
