package outbox

import (
	"context"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestBatchSenderMarksItsElements(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newBatchRig(t, SendOptions{}, func(_ context.Context, batch []*Delivery) error {
			batch[0].Sent("r0")
			batch[1].Fail(errPlain)
			batch[2].Fail(Permanent(errPlain))
			batch[3].Fail(Unknown(errPlain))
			batch[4].Fail(nil)
			batch[5].Fail(ErrSettled)
			return nil
		})
		g.put(numbered("k", 8)...)
		require.Equal(t, Pass{Claimed: 8, Published: 4, Retried: 3, Dead: 1}, g.runOnce())
		require.Equal(t, "r0", g.is("k000", StateSent).Ref)
		require.Contains(t, g.is("k004", StateFailed).LastError, "without a reason")
		require.Empty(t, g.is("k007", StateSent).Ref)
		require.Equal(t, 1, g.store.count("settle"))
	})
}

func TestErrorOfABatchIsThatOfTheUnmarked(t *testing.T) {
	for name, c := range map[string]struct {
		end  func(ctx context.Context) error
		o    SendOptions
		want Pass
	}{
		"plain":         {func(context.Context) error { return errPlain }, SendOptions{}, Pass{Claimed: 4, Published: 1, Retried: 2, Dead: 1}},
		"plain, park":   {func(context.Context) error { return errPlain }, SendOptions{OnUnknown: Park}, Pass{Claimed: 4, Published: 1, Unknown: 2, Dead: 1}},
		"permanent":     {func(context.Context) error { return Permanent(errPlain) }, SendOptions{}, Pass{Claimed: 4, Published: 1, Dead: 3}},
		"panic":         {func(context.Context) error { panic("x") }, SendOptions{OnUnknown: Park}, Pass{Claimed: 4, Published: 1, Unknown: 2, Dead: 1}},
		"timeout":       {func(ctx context.Context) error { <-ctx.Done(); return nil }, SendOptions{OnUnknown: Park}, Pass{Claimed: 4, Published: 1, Unknown: 2, Dead: 1}},
		"hang":          {func(context.Context) error { time.Sleep(time.Hour); return nil }, SendOptions{OnUnknown: Park}, Pass{Claimed: 4, Published: 1, Unknown: 2, Dead: 1}},
		"probed":        {func(context.Context) error { return errPlain }, SendOptions{Probe: probeOf(VerdictSent)}, Pass{Claimed: 4, Published: 3, Dead: 1}},
		"settled":       {func(context.Context) error { return ErrSettled }, SendOptions{}, Pass{Claimed: 4, Published: 3, Dead: 1}},
		"unavailable":   {func(context.Context) error { return Unavailable(errPlain) }, SendOptions{}, Pass{Claimed: 4, Published: 1, Released: 2, Dead: 1}},
		"nil, no error": {func(context.Context) error { return nil }, SendOptions{}, Pass{Claimed: 4, Published: 3, Dead: 1}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				defer time.Sleep(2 * time.Hour)
				c.o.AttemptTimeout = time.Second
				g := newBatchRig(t, c.o, func(ctx context.Context, batch []*Delivery) error {
					batch[0].Sent("")
					batch[1].Fail(Permanent(errPlain))
					return c.end(ctx)
				})
				g.put(numbered("k", 4)...)
				require.Equal(t, c.want, g.runOnce())
			})
		})
	}
}

func TestUnmarkedAfterAFailedOneOfItsGroupWereNotSent(t *testing.T) {
	for name, c := range map[string]struct {
		fail, end error
		o         SendOptions
		states    []State // of g000 to g003
	}{
		"marked":         {errPlain, nil, SendOptions{}, []State{StateSent, StateFailed, StatePending, StateSent}},
		"error":          {nil, errPlain, SendOptions{}, []State{StateFailed, StatePending, StatePending, StateSent}},
		"error, park":    {nil, errPlain, SendOptions{OnUnknown: Park}, []State{StateUnknown, StateUnknown, StateUnknown, StateSent}},
		"marked unknown": {Unknown(errPlain), nil, SendOptions{OnUnknown: Park}, []State{StateSent, StateUnknown, StatePending, StateSent}},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := newBatchRig(t, c.o, func(_ context.Context, batch []*Delivery) error {
					for _, d := range batch {
						switch {
						case d.Key == "g001" && c.fail != nil:
							d.Fail(c.fail)
						case d.Key == "g003":
							d.Sent("said so")
						}
					}
					return c.end
				})
				g.putGroup("g", numbered("g", 4)...)
				g.put("other")
				g.runOnce()
				for i, s := range c.states {
					g.is(numbered("g", 4)[i], s)
				}
				if c.end == nil {
					g.is("other", StateSent)
				}
			})
		})
	}
}

func TestAmbiguousMessagesOfABatchAreProbedFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		probe := func(_ context.Context, r *Record) (Verdict, string, error) {
			time.Sleep(time.Second)
			return map[string]Verdict{"k000": VerdictSent, "k001": VerdictNotSent, "g001": VerdictNotSent}[r.Key], "", nil
		}
		g := newBatchRig(t, SendOptions{OnUnknown: Park, Probe: probe}, func(context.Context, []*Delivery) error { return nil })
		g.put(numbered("k", 3)...)
		g.putGroup("g", "g000", "g001")
		_, err := g.journal.ClaimDue(t.Context(), 10, time.Second)
		require.NoError(t, err)
		time.Sleep(2 * time.Second)
		g.put("new")
		began := time.Now()
		require.Equal(t, Pass{Claimed: 6, Published: 3, Unknown: 2, Released: 1}, g.runOnce())
		require.Less(t, time.Since(began), 2*time.Second, "they are asked about together")
		require.Equal(t, []string{"k001", "new"}, sorted(g.sent.keys()))
		g.is("g000", StateUnknown)
		require.Zero(t, g.is("g001", StatePending).Attempt, "its head is unknown")
	})
}

func TestBatchesAreSentByWorkersAtATime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var now, most atomic.Int32
		g := newBatchRig(t, SendOptions{Workers: 3, BatchSize: 10}, func(context.Context, []*Delivery) error {
			if n := now.Add(1); n > most.Load() {
				most.Store(n)
			}
			time.Sleep(time.Second)
			now.Add(-1)
			return nil
		})
		g.put(numbered("k", 120)...)
		g.start()
		time.Sleep(time.Second / 2)
		require.Equal(t, 40, g.count(StateSending), "one batch waits, no more")
		time.Sleep(4 * time.Second)
		synctest.Wait()
		require.EqualValues(t, 3, most.Load())
		require.Equal(t, 120, g.count(StateSent))
		require.NoError(t, g.stop())
	})
}

func TestMarksOfABatchThatWasGivenUpAreIgnored(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newBatchRig(t, SendOptions{OnUnknown: Park, AttemptTimeout: time.Second}, func(_ context.Context, batch []*Delivery) error {
			time.Sleep(time.Minute)
			batch[0].Sent("too late")
			return nil
		})
		g.put("k")
		require.Equal(t, 1, g.runOnce().Unknown)
		time.Sleep(time.Hour)
		require.Empty(t, g.is("k", StateUnknown).Ref)
	})
}

func TestTraceOfABatchIsWhatAllHave(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var got []Header
		restore := func(ctx context.Context, h Header) context.Context { got = append(got, h); return ctx }
		g := bareJournalRig(t)
		g.relay = g.newRelay(RelayOptions{Context: restore}, g.journal.BatchSender(func(context.Context, []*Delivery) error { return nil }, SendOptions{}))
		_, err := g.journal.PutIn(t.Context(), committed{}, Message{Key: "a", Header: Header{"t": "1", "x": "1"}}, Message{Key: "b", Header: Header{"t": "1", "x": "2"}})
		require.NoError(t, err)
		g.runOnce()
		require.Equal(t, []Header{{"t": "1"}}, got)
	})
}
