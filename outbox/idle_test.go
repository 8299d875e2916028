package outbox

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestIdleRelayAsksOncePerPollInterval(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{PollInterval: 2 * time.Second}, PublishOptions{}, nil)
		var as []Attachment
		for _, k := range keys(20) {
			as = append(as, g.channel(k).Publisher(g.record(nil), PublishOptions{}))
		}
		g.relay = g.newRelay(RelayOptions{PollInterval: 2 * time.Second}, as...)
		g.start()
		require.Equal(t, 1, g.store.count("look"), "one at the start")
		time.Sleep(100*time.Second + 1)
		require.Equal(t, 1+50, g.store.count("look"))
		require.Equal(t, 51+1, g.store.count(""), "and nothing else but the check")
		require.NoError(t, g.stop())
	})
}

func TestRowThatFallsDueSoonerThanThePollIsClaimedThen(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{PollInterval: 10 * time.Second}, PublishOptions{}, nil)
		g.stage("a")
		g.store.edit("c", "a", func(r *fakeRow) { r.Due = time.Now().Add(3 * time.Second) })
		start := time.Now()
		g.start()
		time.Sleep(4 * time.Second)
		require.Len(t, g.published(), 1)
		require.Equal(t, 3*time.Second, g.published()[0].at.Sub(start))
		require.Equal(t, 1, g.store.count("claim"))
		require.NoError(t, g.stop())
	})
}

func TestRetriesAreClaimedWhenTheyFallDue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, func(_ context.Context, batch []*Entry[string]) error {
			if batch[0].Attempt < 3 {
				batch[0].Retry(100 * time.Millisecond)
			}
			return nil
		})
		g.stage("a")
		g.start()
		time.Sleep(300 * time.Millisecond)
		require.Len(t, g.published(), 3)
		require.NoError(t, g.stop())
	})
}

func TestWhatOthersStageIsFoundByPolling(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.start()
		time.Sleep(500 * time.Millisecond)
		g.store.mu.Lock()
		g.store.put("c", StageRow{Key: "a", Payload: []byte(`""`)}, 77, 0)
		g.store.mu.Unlock()
		time.Sleep(time.Second)
		require.Len(t, g.published(), 1)
		require.NoError(t, g.stop())
	})
}

func TestBacklogIsClaimedWithoutWaiting(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 10}, nil)
		g.stage(keys(1000)...)
		start := time.Now()
		g.start()
		require.Zero(t, g.store.size())
		require.Zero(t, time.Since(start))
		require.Len(t, g.published(), 100)
		require.NoError(t, g.stop())
	})
}

func TestHintLooksSoonForACommitThatCannotBeSeen(t *testing.T) {
	for _, commit := range []time.Duration{0, 200 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, 50 * time.Millisecond, 900 * time.Millisecond} {
		bubble(t, func(t *testing.T) {
			g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
			g.start()
			time.Sleep(10 * time.Millisecond)
			tx := g.store.begin()
			_, err := g.latest.StageIn(t.Context(), tx, Item[string]{Key: "a"})
			require.NoError(t, err)
			time.Sleep(commit)
			tx.commit()
			committed := time.Now()
			time.Sleep(time.Second)
			calls := g.published()
			require.Len(t, calls, 1)
			require.LessOrEqual(t, calls[0].at.Sub(committed), firstLook+commit/2)
			require.LessOrEqual(t, g.store.count("claim"), maxLooks+1, "the poll may find it too")
			n := g.store.count("claim")
			time.Sleep(10 * time.Second)
			require.Equal(t, n, g.store.count("claim"), "the hint is gone")
			require.NoError(t, g.stop())
		})
	}
}

func TestRolledBackStageCostsAtMostTwentyLooks(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.start()
		_, err := g.latest.StageIn(t.Context(), g.store.begin(), Item[string]{Key: "a"})
		require.NoError(t, err)
		time.Sleep(time.Minute)
		n := g.store.count("claim")
		require.True(t, n > 10 && n <= maxLooks, n)
		require.NoError(t, g.stop())
	})
}

func TestHintOutlivesTheClaimOfAnotherRow(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{PollInterval: 10 * time.Second}, PublishOptions{}, nil)
		g.start()
		time.Sleep(10 * time.Millisecond)
		tx := g.store.begin()
		_, err := g.latest.StageIn(t.Context(), tx, Item[string]{Key: "slow"})
		require.NoError(t, err)
		g.stage("fast")
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, 1, g.times("fast"))
		tx.commit()
		time.Sleep(100 * time.Millisecond)
		require.Equal(t, 1, g.times("slow"), "found long before the poll")
		require.NoError(t, g.stop())
	})
}

func TestSteadyStagingCostsFewLooks(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.start()
		const n = 1000
		for _, k := range keys(n) {
			tx := g.store.begin()
			_, err := g.latest.StageIn(t.Context(), tx, Item[string]{Key: k})
			require.NoError(t, err)
			time.Sleep(500 * time.Microsecond)
			tx.commit()
			time.Sleep(9500 * time.Microsecond)
		}
		synctest.Wait()
		require.Zero(t, g.store.size())
		require.LessOrEqual(t, g.store.count("claim"), 4*n)
		require.NoError(t, g.stop())
	})
}

func TestWakeLooksAtEveryChannelAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		d := g.channel("d")
		g.relay = g.newRelay(RelayOptions{}, g.latest.Publisher(g.record(nil), PublishOptions{}), d.Publisher(g.record(nil), PublishOptions{}))
		g.start()
		time.Sleep(500 * time.Millisecond)
		g.store.mu.Lock()
		g.store.put("c", StageRow{Key: "a", Payload: []byte(`""`)}, 77, 0)
		g.store.put("d", StageRow{Key: "a", Payload: []byte(`""`)}, 78, 0)
		g.store.mu.Unlock()
		g.store.hint(Hint{})
		synctest.Wait()
		require.Len(t, g.published(), 2)
		require.Equal(t, 2, g.store.count("claim"))
		require.Equal(t, 2, g.store.count("look"), "one for both")
		require.NoError(t, g.stop())
	})
}

func TestWakeClaimsAtOnceWhereSomethingWasStaged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		as := []Attachment{g.latest.Publisher(g.record(nil), PublishOptions{})}
		for _, k := range keys(50) {
			as = append(as, g.channel(k).Publisher(g.record(nil), PublishOptions{}))
		}
		g.relay = g.newRelay(RelayOptions{}, as...)
		g.start()
		for i := range 100 {
			time.Sleep(100 * time.Microsecond) // close together: no early looks
			tx := g.store.begin()
			_, err := g.latest.StageIn(t.Context(), tx, Item[string]{Key: fmt.Sprint(i)})
			require.NoError(t, err)
			tx.commit()
			g.store.hint(Hint{})
			synctest.Wait()
			require.Equal(t, 1, g.times(fmt.Sprint(i)))
		}
		require.LessOrEqual(t, g.store.count("claim"), 100+earlyLooks)
		require.LessOrEqual(t, g.store.count("look"), 3, "wakes share looks")
		require.NoError(t, g.stop())
	})
}

func TestHintsOfUnattachedChannelsCostNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		other := g.channel("other")
		g.start()
		for range 100 {
			_, err := other.StageIn(t.Context(), committed{}, Item[string]{Key: "a"})
			require.NoError(t, err)
		}
		time.Sleep(10 * time.Second)
		require.Zero(t, g.store.count("claim"))
		require.Len(t, g.relay.channels, 1)
		require.NoError(t, g.stop())
	})
}

func TestNoHintReachesARelayThatHasStopped(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.start()
		require.NoError(t, g.stop())
		require.Empty(t, g.store.hooks)
	})
}
