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

func TestSendOptionsAreChecked(t *testing.T) {
	g := bareJournalRig(t)
	for name, o := range map[string]SendOptions{
		"workers": {Workers: 1001}, "negative workers": {Workers: -1}, "batch size": {BatchSize: 10_001},
		"attempts": {MaxAttempts: -2}, "timeout": {AttemptTimeout: time.Microsecond}, "lease": {Lease: time.Millisecond},
		"retention": {Retention: time.Millisecond}, "negative retention": {Retention: -2}, "long retention": {Retention: maxRetention + 1},
		"policy": {OnUnknown: 2}, "order": {Order: 2},
	} {
		_, err := NewRelay(RelayOptions{}, g.journal.Sender(g.recorded(nil), o))
		require.ErrorIs(t, err, ErrInvalid, name)
		require.ErrorContains(t, err, `channel "c"`, name)
	}
	o, err := SendOptions{}.withDefaults()
	require.NoError(t, err)
	require.Equal(t, SendOptions{Workers: 8, BatchSize: 100, MaxAttempts: 10, AttemptTimeout: time.Minute, Lease: 15 * time.Second, Retention: 24 * time.Hour}, o)
	for _, o := range []SendOptions{{MaxAttempts: NoLimit, Retention: DeleteOnSent, OnUnknown: Park, Order: Skip}, {Workers: 1000, BatchSize: 10_000, Retention: time.Second}} {
		_, err := o.withDefaults()
		require.NoError(t, err)
	}
	_, err = NewRelay(RelayOptions{}, g.journal.Sender(nil, SendOptions{}))
	require.ErrorIs(t, err, ErrInvalid)
	_, err = NewRelay(RelayOptions{}, g.journal.BatchSender(nil, SendOptions{}))
	require.ErrorIs(t, err, ErrInvalid)
	_, err = NewRelay(RelayOptions{}, (&Journal{}).Sender(g.recorded(nil), SendOptions{}))
	require.ErrorIs(t, err, ErrInvalid)
}

func TestRelayRefusesAChannelOfBothSystemsOrTwice(t *testing.T) {
	g := bareJournalRig(t)
	l, err := NewLatest(LatestStore(g.store), LatestOptions[string]{Channel: "c"})
	require.NoError(t, err)
	send := g.journal.Sender(g.recorded(nil), SendOptions{})
	publish := l.Publisher(func(context.Context, []*Entry[string]) error { return nil }, PublishOptions{})
	_, err = NewRelay(RelayOptions{}, send, publish)
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "attached as journal and as latest")
	_, err = NewRelay(RelayOptions{}, send, g.journal.BatchSender(func(context.Context, []*Delivery) error { return nil }, SendOptions{}))
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorContains(t, err, "twice")
}

func TestSenderSendsEachMessageAndSettlesThemTogether(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, nil)
		g.put(keys(100)...)
		require.Equal(t, Pass{Claimed: 100, Published: 100}, g.runOnce())
		require.Equal(t, keys(100), sorted(g.sent.keys()))
		require.Equal(t, 1, g.store.count("claim"))
		require.Equal(t, 1, g.store.count("settle"), "one statement for the batch")
		m := g.is("k00007", StateSent)
		require.Equal(t, "ref-k00007", m.Ref)
		require.NotZero(t, m.CompletedAt)
	})
}

func TestSenderIsGivenTheMessage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, func(_ context.Context, r *Record) (string, error) {
			require.Equal(t, "c", r.Channel)
			require.Equal(t, []byte("k"), r.Payload)
			require.Equal(t, StateSending, r.State)
			require.Equal(t, 1, r.Attempt)
			require.NotZero(t, r.Lease.Token)
			return "", nil
		})
		g.put("k")
		require.Equal(t, 1, g.runOnce().Published)
	})
}

func TestDeleteOnSentDeletes(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{Retention: DeleteOnSent}, nil)
		g.put("k")
		require.Equal(t, 1, g.runOnce().Published)
		_, ok := g.store.message("k")
		require.False(t, ok)
	})
}

func TestMessagesOfAGroupAreSentInOrderOneAfterAnother(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var mu sync.Mutex
		running := map[string]bool{}
		g := newJournalRig(t, SendOptions{}, func(_ context.Context, r *Record) (string, error) {
			mu.Lock()
			require.False(t, running[r.Group], "two of a group at a time")
			running[r.Group] = true
			mu.Unlock()
			time.Sleep(10 * time.Millisecond)
			mu.Lock()
			running[r.Group] = false
			mu.Unlock()
			return "", nil
		})
		for i := range 30 {
			for _, group := range []string{"a", "b", "c"} {
				g.putGroup(group, fmt.Sprintf("%s%02d", group, i))
			}
		}
		g.start()
		time.Sleep(5 * time.Second)
		require.Equal(t, 90, g.count(StateSent))
		next := map[byte]int{}
		for _, k := range g.sent.keys() {
			require.Equal(t, fmt.Sprintf("%c%02d", k[0], next[k[0]]), k)
			next[k[0]]++
		}
		require.NoError(t, g.stop())
	})
}

func TestRestOfARunIsGivenBackWhenOneIsNotSent(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		state State
	}{
		"failed": {errSink, StateFailed}, "dead": {Permanent(errSink), StateDead}, "deferred": {Defer(time.Minute), StatePending},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := newJournalRig(t, SendOptions{}, func(_ context.Context, r *Record) (string, error) {
					if r.Key == "g001" {
						return "", c.err
					}
					return "", nil
				})
				g.putGroup("g", numbered("g", 5)...)
				g.put("other")
				pass := g.runOnce()
				require.Equal(t, 2, pass.Published)
				require.Equal(t, []string{"g000", "g001", "other"}, sorted(g.sent.keys()))
				g.is("g000", StateSent)
				g.is("g001", c.state)
				for _, k := range []string{"g002", "g003", "g004"} {
					require.Zero(t, g.is(k, StatePending).Attempt)
				}
			})
		})
	}
}

func TestGroupGoesOnWithoutBeingPolled(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{BatchSize: 10}, nil)
		g.putGroup("g", numbered("g", 95)...)
		g.start()
		synctest.Wait()
		require.Equal(t, 95, g.count(StateSent), "run after run")
		require.NoError(t, g.stop())
	})
}

func TestErrSettledSettlesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var g *journalRig
		g = newJournalRig(t, SendOptions{}, func(ctx context.Context, r *Record) (string, error) {
			require.NoError(t, g.journal.In(committed{}).MarkSent(ctx, r.Lease, "mine"))
			return "", fmt.Errorf("done: %w", ErrSettled)
		})
		g.putGroup("g", "a", "b")
		require.Equal(t, Pass{Claimed: 2, Published: 2}, g.runOnce())
		require.Equal(t, "mine", g.is("b", StateSent).Ref)
		require.Equal(t, 2, g.store.count("settle"), "those of the sends")
	})
}

func TestBrokenMessageIsDeadWithItsReason(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, nil)
		g.put("a", "b")
		g.store.change("a", func(m *fakeMessage) { m.Broken = errors.New("headers: malformed") })
		require.Equal(t, Pass{Claimed: 2, Published: 1, Dead: 1}, g.runOnce())
		require.Equal(t, "read stored row: headers: malformed", g.is("a", StateDead).LastError)
		require.Equal(t, []string{"b"}, g.sent.keys())
	})
}

func TestCodeAndErrorAreStorable(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, func(context.Context, *Record) (string, error) {
			return "", WithCode("E\x00\xff", Permanent(errors.New("bad \x00 text\xff")))
		})
		g.put("a")
		require.Equal(t, 1, g.runOnce().Dead)
		m := g.is("a", StateDead)
		require.Equal(t, "E\uFFFD\uFFFD", m.Code)
		require.Contains(t, m.LastError, "bad \uFFFD text\uFFFD")
		require.Contains(t, g.logged(), `level=ERROR msg="outbox: message is dead`)
		require.Contains(t, g.logged(), "key=a")
		require.Len(t, g.seen(EventDead), 1)
	})
}

func TestTraceIsRestoredForEachMessage(t *testing.T) {
	bubble(t, func(t *testing.T) {
		type trace struct{}
		got := map[string]any{}
		var mu sync.Mutex
		restore := func(ctx context.Context, h Header) context.Context {
			return context.WithValue(ctx, trace{}, h["trace"])
		}
		g := bareJournalRig(t)
		g.relay = g.newRelay(RelayOptions{Context: restore}, g.journal.Sender(func(ctx context.Context, r *Record) (string, error) {
			mu.Lock()
			defer mu.Unlock()
			got[r.Key] = ctx.Value(trace{})
			return "", nil
		}, SendOptions{}))
		_, err := g.journal.PutIn(t.Context(), committed{}, Message{Key: "a", Header: Header{"trace": "1"}}, Message{Key: "b", Header: Header{"trace": "2"}}, Message{Key: "c"})
		require.NoError(t, err)
		g.runOnce()
		require.Equal(t, map[string]any{"a": "1", "b": "2", "c": nil}, got)
	})
}

func TestMessageWhoseGroupAPutHoldsIsSettledLater(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, nil)
		g.putGroup("g", "g1")
		g.start0(func() { g.store.lockGroup("g", true) })
		g.is("g1", StateSent)
		g.put(numbered("k", 300)...)
		time.Sleep(5 * time.Second)
		require.Equal(t, 301, g.count(StateSent), "nothing waits for it")
		require.NotZero(t, g.store.group("c", "g").until)
		g.store.lockGroup("g", false)
		g.putGroup("g", "g2")
		time.Sleep(300 * time.Millisecond)
		g.is("g2", StateSent)
		require.NoError(t, g.stop())
	})
}

// start0 starts the relay and does f once the first send has begun.
func (g *journalRig) start0(f func()) {
	var once sync.Once
	g.store.setFault(func(op string, after bool) error {
		if op == "settle" && !after {
			once.Do(f)
		}
		return nil
	})
	g.start()
}

func TestStopIsNotHeldUpByAPutThatHoldsAGroup(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, nil)
		g.putGroup("g", "g1")
		g.start0(func() { g.store.lockGroup("g", true) })
		time.Sleep(time.Second)
		began := time.Now()
		require.NoError(t, g.stop())
		require.Less(t, time.Since(began), time.Second)
	})
}

func TestRunOnceReturnsWhenAPutHoldsAGroup(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, func(context.Context, *Record) (string, error) { return "", nil })
		g.putGroup("g", "g1")
		g.store.setFault(func(op string, after bool) error {
			if op == "settle" && !after {
				g.store.lockGroup("g", true)
			}
			return nil
		})
		began := time.Now()
		require.Equal(t, Pass{Claimed: 1, Published: 1}, g.runOnce())
		require.Less(t, time.Since(began), 2*time.Second)
	})
}

func TestSettlementThatFailsIsTriedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, nil)
		g.put("a", "b")
		fails := 4
		g.store.setFault(func(op string, after bool) error {
			if op == "settle" && fails > 0 && after == (fails%2 == 0) {
				fails--
				return errDown
			}
			return nil
		})
		require.Equal(t, Pass{Claimed: 2, Published: 2}, g.runOnce())
		require.Equal(t, 2, g.count(StateSent))
	})
}

func TestFlushSendsEverythingOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{BatchSize: 7}, func(_ context.Context, r *Record) (string, error) {
			if r.Key == "g003" || r.Key == "k004" {
				return "", RetryAfter(time.Nanosecond, errSink)
			}
			return "", nil
		})
		g.put(numbered("k", 40)...)
		g.putGroup("g", numbered("g", 20)...)
		pass, err := g.relay.Flush(t.Context())
		require.NoError(t, err)
		require.Equal(t, 39+3, pass.Published)
	})
}
