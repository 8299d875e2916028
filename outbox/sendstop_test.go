package outbox

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestShutdownGivesBackWhatHasNotBegunAndCutsWhatHas(t *testing.T) {
	for name, c := range map[string]struct {
		o    SendOptions
		want State
	}{
		"resend":      {SendOptions{Workers: 2}, StateFailed},
		"unavailable": {SendOptions{Workers: 2}, StateFailed}, // so our own cutting it short may look
		"park":        {SendOptions{Workers: 2, OnUnknown: Park}, StateUnknown},
		"probe": {SendOptions{Workers: 2, OnUnknown: Park, Probe: func(ctx context.Context, _ *Record) (Verdict, string, error) {
			return VerdictSent, "", ctx.Err()
		}}, StateSent},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := bareJournalRig(t)
				g.relay = g.newRelay(RelayOptions{ShutdownTimeout: 5 * time.Second}, g.journal.Sender(func(ctx context.Context, r *Record) (string, error) {
					g.sent.add(r)
					<-ctx.Done()
					if name == "unavailable" {
						return "", Unavailable(ctx.Err())
					}
					return "", ctx.Err()
				}, c.o))
				g.put(numbered("k", 10)...)
				g.start()
				time.Sleep(time.Second)
				began := time.Now()
				err := g.stop()
				require.Less(t, time.Since(began), 6*time.Second)
				require.Len(t, g.sent.keys(), 2)
				require.Zero(t, g.store.count("down"))
				require.Equal(t, 8, g.count(StatePending))
				for _, k := range g.sent.keys() {
					m := g.is(k, c.want)
					if c.want == StateFailed {
						require.Equal(t, 1, m.Attempt)
						require.False(t, m.Due.After(time.Now()), "again at once")
						require.ErrorContains(t, err, "left 2 entries")
					}
				}
			})
		})
	}
}

func TestStopDuringAClaimSendsNothing(t *testing.T) {
	for range 10 {
		bubble(t, func(t *testing.T) {
			g := newJournalRig(t, SendOptions{}, nil)
			g.put("k")
			ctx, cancel := context.WithCancel(t.Context())
			g.store.setFault(func(op string, _ bool) error {
				if op == "claim" {
					cancel()
				}
				return nil
			})
			pass, err := g.relay.RunOnce(ctx)
			require.NoError(t, err)
			require.Equal(t, Pass{Claimed: 1, Released: 1}, pass)
			require.Empty(t, g.sent.keys())
		})
	}
}

func TestCleanStopLetsSendsFinish(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{Workers: 2}, func(ctx context.Context, r *Record) (string, error) {
			time.Sleep(10 * time.Second)
			return "", ctx.Err()
		})
		g.putGroup("g", "g1", "g2")
		g.put(numbered("k", 10)...)
		g.start()
		time.Sleep(time.Second)
		require.NoError(t, g.stop())
		require.Equal(t, 2, g.count(StateSent))
		require.Equal(t, 10, g.count(StatePending), "no attempt was burned")
	})
}

func TestUnavailableGivesBackAndPauses(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var up atomic.Bool
		g := newJournalRig(t, SendOptions{Workers: 4}, func(context.Context, *Record) (string, error) {
			time.Sleep(time.Millisecond)
			if !up.Load() {
				return "", Unavailable(errSink)
			}
			return "", nil
		})
		g.put(numbered("k", 100)...)
		g.start()
		time.Sleep(time.Hour)
		require.LessOrEqual(t, len(g.sent.keys()), 4+24, "what waited was given back, then one probe at growing intervals")
		require.Equal(t, 100, g.count(StatePending), "nobody's attempts are spent")
		up.Store(true)
		time.Sleep(6 * time.Minute)
		require.Equal(t, 100, g.count(StateSent))
		require.Equal(t, 1, g.store.count("up"))
		require.NoError(t, g.stop())
	})
}

func TestOutageProbeOfAMessage(t *testing.T) {
	for name, c := range map[string]struct {
		err      error
		o        SendOptions
		up, down int
	}{
		"sent":              {nil, SendOptions{}, 1, 0},
		"plainly":           {errPlain, SendOptions{}, 1, 0},
		"plainly, parked":   {errPlain, SendOptions{OnUnknown: Park}, 1, 0},
		"refused":           {Permanent(errPlain), SendOptions{}, 1, 0},
		"unknown":           {Unknown(errPlain), SendOptions{}, 0, 1},
		"unknown, parked":   {Unknown(errPlain), SendOptions{OnUnknown: Park}, 0, 1},
		"still down":        {Unavailable(errPlain), SendOptions{}, 0, 1},
		"deferred":          {Defer(time.Minute), SendOptions{}, 0, 0},
		"settled by itself": {ErrSettled, SendOptions{}, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				err := Unavailable(errSink)
				g := newJournalRig(t, c.o, func(context.Context, *Record) (string, error) { return "", err })
				g.put("a", "b")
				g.runOnce()
				require.Zero(t, g.runOnce(), "the store's pause is honoured")
				time.Sleep(time.Second)
				err = c.err
				require.Equal(t, 1, g.runOnce().Claimed)
				require.Equal(t, c.up, g.store.count("up"))
				require.Equal(t, 1+c.down, g.store.count("down"))
			})
		})
	}
}

func TestOutageProbeThatSendsNothingTellsNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{OnUnknown: Park}, func(context.Context, *Record) (string, error) { return "", Unavailable(errSink) })
		g.put("a", "b")
		g.runOnce()
		g.lapse("a")
		require.Equal(t, Pass{Claimed: 1, Unknown: 1}, g.runOnce())
		require.Equal(t, 1, g.store.count("down"))
		require.Zero(t, g.store.count("up"))
	})
}

func TestOutageOfMessagesIsRecordedBeforeTheyAreGivenBack(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{}, func(context.Context, *Record) (string, error) { return "", Unavailable(errSink) })
		g.put("a")
		g.runOnce()
		var ops []string
		for _, c := range g.store.calls {
			ops = append(ops, c.op)
		}
		require.Equal(t, []string{"put", "claim", "down", "settle"}, ops)
	})
}

func TestChannelWhoseBatchesKeepFailingIsSlowed(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{BatchSize: 10, OnUnknown: Park}, func(context.Context, *Record) (string, error) { return "", errPlain })
		g.put(numbered("k", 500)...)
		g.start()
		time.Sleep(time.Minute)
		require.Less(t, g.count(StateUnknown), 100, "a sink that is down does not make a backlog unknown")
		require.NotEmpty(t, g.seen(EventSlow))
		require.NoError(t, g.stop())
	})
}
