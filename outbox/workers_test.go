package outbox

import (
	"context"
	"runtime"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestNoMoreCallsThanWorkersAtATime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var now, most atomic.Int32
		g := newJournalRig(t, SendOptions{Workers: 5, BatchSize: 20}, func(context.Context, *Record) (string, error) {
			if n := now.Add(1); n > most.Load() {
				most.Store(n)
			}
			time.Sleep(time.Second)
			now.Add(-1)
			return "", nil
		})
		g.put(numbered("k", 100)...)
		g.start()
		time.Sleep(21 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 5, most.Load())
		require.Equal(t, 100, g.count(StateSent), "the workers were never idle")
		require.NoError(t, g.stop())
	})
}

func TestRelayClaimsNoMoreThanKeepsItsWorkersBusy(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{Workers: 4, BatchSize: 10}, func(context.Context, *Record) (string, error) {
			time.Sleep(time.Minute / 2)
			return "", nil
		})
		g.put(numbered("k", 100)...)
		g.start()
		time.Sleep(time.Second)
		require.Equal(t, 10, g.count(StateSending))
		time.Sleep(time.Minute / 2)
		require.Equal(t, 16, g.count(StateSending), "two of the first batch waited, so another was claimed")
		require.NoError(t, g.stop())
		require.Zero(t, g.count(StateSending))
	})
}

func TestSlowMessageHoldsUpNeitherItsBatchNorItsChannel(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{Workers: 2, BatchSize: 10}, func(ctx context.Context, r *Record) (string, error) {
			if r.Key == "k000" {
				time.Sleep(50 * time.Second)
			}
			return "", nil
		})
		g.put(numbered("k", 100)...)
		g.start()
		time.Sleep(time.Second)
		synctest.Wait()
		require.Equal(t, 99, g.count(StateSent))
		g.is("k000", StateSending)
		time.Sleep(50 * time.Second)
		synctest.Wait()
		g.is("k000", StateSent)
		require.Equal(t, 1, g.sent.times("k000"), "its lease was extended meanwhile")
		for _, c := range g.store.callsOf("extend") {
			require.Equal(t, 1, c.rows, "only of what is still out")
		}
		require.NoError(t, g.stop())
	})
}

func TestHungSendKeepsItsWorkerAndHarmsNobody(t *testing.T) {
	bubble(t, func(t *testing.T) {
		let := make(chan struct{})
		g := newJournalRig(t, SendOptions{Workers: 2, BatchSize: 10, AttemptTimeout: 10 * time.Second}, func(_ context.Context, r *Record) (string, error) {
			if r.Key == "k000" {
				<-let
			}
			return "", nil
		})
		g.put(numbered("k", 30)...)
		g.start()
		time.Sleep(5 * time.Second)
		require.Equal(t, 29, g.count(StateSent))
		time.Sleep(11 * time.Second)
		m := g.is("k000", StateFailed)
		require.Contains(t, m.LastError, "send function ignores its cancelled context: attempt timed out after 10s")
		require.Equal(t, 1, g.relay.channels[0].hungCount())
		require.Len(t, g.seen(EventHung), 1)
		require.Contains(t, g.logged(), "its worker stays taken")

		time.Sleep(time.Hour)
		require.Equal(t, 1, g.sent.times("k000"), "it is not sent again by this relay while it hangs")
		g.put("more")
		time.Sleep(time.Second)
		g.is("more", StateSent)
		close(let)
		time.Sleep(time.Minute)
		require.Zero(t, g.relay.channels[0].hungCount())
		require.Len(t, g.seen(EventReturned), 1)
		g.is("k000", StateSent)
		require.Zero(t, len(g.relay.channels[0].crew.slots))
		require.NoError(t, g.stop())
	})
}

func TestMessagesAreGivenBackWhenEveryWorkerHangs(t *testing.T) {
	bubble(t, func(t *testing.T) {
		let := make(chan struct{})
		g := newJournalRig(t, SendOptions{Workers: 2, BatchSize: 10, AttemptTimeout: time.Second}, func(context.Context, *Record) (string, error) {
			<-let
			return "", nil
		})
		g.put(numbered("k", 30)...)
		g.start()
		time.Sleep(3 * time.Second)
		require.Zero(t, g.count(StateSending), "others may send them")
		claims := g.store.count("claim")
		time.Sleep(time.Minute)
		require.Equal(t, claims, g.store.count("claim"))
		close(let)
		time.Sleep(time.Minute)
		require.Equal(t, 30, g.count(StateSent))
		require.NoError(t, g.stop())
	})
}

func TestHungMessageOfAGroupHoldsTheGroup(t *testing.T) {
	bubble(t, func(t *testing.T) {
		let := make(chan struct{})
		g := newJournalRig(t, SendOptions{AttemptTimeout: time.Second}, func(_ context.Context, r *Record) (string, error) {
			if r.Key == "g001" {
				<-let
			}
			return "", nil
		})
		g.putGroup("g", numbered("g", 4)...)
		g.start()
		time.Sleep(time.Minute)
		require.Equal(t, []string{"g000", "g001"}, g.sent.keys())
		close(let)
		time.Sleep(time.Minute)
		require.Equal(t, []string{"g000", "g001", "g001", "g002", "g003"}, g.sent.keys())
		require.NoError(t, g.stop())
	})
}

func TestGoexitAndPanicHarmNobody(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, func(_ context.Context, r *Record) (string, error) {
			switch r.Key {
			case "k001":
				runtime.Goexit()
			case "k002":
				panic("boom")
			}
			return "", nil
		})
		g.put(numbered("k", 20)...)
		require.Equal(t, Pass{Claimed: 20, Published: 18, Retried: 2}, g.runOnce())
		require.Contains(t, g.is("k001", StateFailed).LastError, "send function exited its goroutine")
		require.Contains(t, g.is("k002", StateFailed).LastError, "panic: boom")
		require.Contains(t, g.logged(), "stack=")
	})
}

func TestLostLeaseEndsTheSendOfThatMessageOnly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cause := make(chan error, 1)
		g := newJournalRig(t, SendOptions{Lease: 3 * time.Second}, func(ctx context.Context, r *Record) (string, error) {
			if r.Key == "fast" {
				return "", nil
			}
			select {
			case <-ctx.Done():
				cause <- context.Cause(ctx)
				return "", ctx.Err()
			case <-time.After(10 * time.Second):
				return "", nil
			}
		})
		g.put("lost", "kept", "fast")
		g.start()
		g.store.change("lost", func(m *fakeMessage) { m.Token = 1_000_000; m.LeaseUntil = time.Now().Add(time.Hour) })
		time.Sleep(5 * time.Second)
		require.ErrorIs(t, <-cause, ErrLeaseLost)
		time.Sleep(6 * time.Second)
		g.is("lost", StateSending)
		g.is("kept", StateSent)
		require.Contains(t, g.logged(), "leases lost")
		require.Len(t, g.seen(EventLost), 1)
		require.NoError(t, g.stop())
	})
}

func TestStoreOutOfReachCutsSendsBeforeTheirLeasesEnd(t *testing.T) {
	bubble(t, func(t *testing.T) {
		cut := make(chan time.Duration, 1)
		began := time.Now()
		g := newJournalRig(t, SendOptions{Workers: 1, Lease: 3 * time.Second}, func(ctx context.Context, r *Record) (string, error) {
			<-ctx.Done()
			cut <- time.Since(began)
			return "", ctx.Err()
		})
		g.put("a", "b")
		g.start()
		g.store.setFault(func(op string, _ bool) error {
			if op == "extend" {
				return errDown
			}
			return nil
		})
		require.Less(t, <-cut, 3*time.Second)
		time.Sleep(time.Second / 2)
		require.Equal(t, []string{"a"}, g.sent.keys(), "what had not begun was given back")
		require.NoError(t, g.stop())
	})
}
