package outbox

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// A call that hangs keeps its worker; what is still to be done about its
// message and its group waits for another.
func TestWorkerThatAHungCallKeepsIsNotUsedTwice(t *testing.T) {
	for name, workers := range map[string]int{"another is free": 2, "none is free": 1} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				let := make(chan struct{})
				var now, most atomic.Int32
				probe := func(_ context.Context, r *Record) (Verdict, string, error) {
					if r.Ambiguous {
						<-let // before it is sent again
					}
					return VerdictSent, "", nil
				}
				g := newJournalRig(t, SendOptions{Workers: workers, AttemptTimeout: time.Second, Probe: probe}, func(_ context.Context, r *Record) (string, error) {
					if n := now.Add(1); n > most.Load() {
						most.Store(n)
					}
					defer now.Add(-1)
					if r.Key == "h0" {
						<-let
					}
					return "", nil
				})
				g.putGroup("g", "g0", "g1")
				g.lapse("g0")
				g.start()
				time.Sleep(10 * time.Second)
				if workers == 1 {
					require.Empty(t, g.sent.keys())
					require.Zero(t, g.count(StateSending), "others may send them")
				} else {
					require.Equal(t, []string{"g0", "g1"}, g.sent.keys())
				}
				require.Equal(t, 1, len(g.relay.channels[0].crew.slots))
				if workers == 2 {
					g.putGroup("h", "h0", "h1") // all workers hang; the Probe knows that h0 was sent
					time.Sleep(10 * time.Second)
					g.is("h0", StateSent)
					require.Zero(t, g.is("h1", StatePending).Attempt)
				}
				close(let)
				time.Sleep(time.Minute)
				require.Zero(t, len(g.relay.channels[0].crew.slots))
				require.Zero(t, g.relay.channels[0].hungCount())
				require.NoError(t, g.stop())
				require.Zero(t, g.relay.channels[0].crew.unstarted)
			})
		})
	}
}

// A message that is claimed after its lease had lapsed may have been sent.
func TestAmbiguousMessages(t *testing.T) {
	for name, c := range map[string]struct {
		o       SendOptions
		attempt int
		sent    bool
		want    State
	}{
		"resend":                      {SendOptions{}, 1, true, StateSent},
		"resend, tenth attempt":       {SendOptions{}, 10, true, StateSent},
		"resend, attempts used up":    {SendOptions{}, 11, false, StateUnknown},
		"no limit":                    {SendOptions{MaxAttempts: NoLimit}, 1000, true, StateSent},
		"park":                        {SendOptions{OnUnknown: Park}, 1, false, StateUnknown},
		"probe: sent":                 {SendOptions{OnUnknown: Park, Probe: probeOf(VerdictSent)}, 1, false, StateSent},
		"probe: not sent":             {SendOptions{OnUnknown: Park, Probe: probeOf(VerdictNotSent)}, 1, true, StateSent},
		"probe: not sent, used up":    {SendOptions{Probe: probeOf(VerdictNotSent)}, 11, false, StateDead},
		"probe: unknown, park":        {SendOptions{OnUnknown: Park, Probe: probeOf(VerdictUnknown)}, 1, false, StateUnknown},
		"probe: unknown, resend":      {SendOptions{Probe: probeOf(VerdictUnknown)}, 1, true, StateSent},
		"probe: unknown, and used up": {SendOptions{Probe: probeOf(VerdictUnknown)}, 11, false, StateUnknown},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := newJournalRig(t, c.o, nil)
				g.put("k")
				g.lapse("k")
				g.store.change("k", func(m *fakeMessage) { m.Attempt = c.attempt })
				g.runOnce()
				g.is("k", c.want)
				require.Equal(t, c.sent, g.sent.times("k") == 1)
			})
		})
	}
}

// A run whose holder died is ambiguous as a whole: what is given back unsent
// must not lose that.
func TestAmbiguousRunUnderParkIsNeverSentTwice(t *testing.T) {
	ambiguous := func(t *testing.T, o SendOptions, f SendFunc) *journalRig {
		g := newJournalRig(t, o, f)
		g.putGroup("g", "a", "b", "c")
		_, err := g.journal.ClaimDue(t.Context(), 10, time.Second)
		require.NoError(t, err)
		time.Sleep(2 * time.Second)
		return g
	}
	t.Run("without a probe", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			g := ambiguous(t, SendOptions{OnUnknown: Park}, nil)
			require.Equal(t, Pass{Claimed: 3, Unknown: 3}, g.runOnce())
			require.Empty(t, g.sent.keys())
		})
	})
	t.Run("with a probe", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			var asked atomic.Int32
			probe := func(_ context.Context, r *Record) (Verdict, string, error) {
				asked.Add(1)
				return map[string]Verdict{"a": VerdictUnknown, "b": VerdictSent, "c": VerdictNotSent}[r.Key], "", nil
			}
			g := ambiguous(t, SendOptions{OnUnknown: Park, Probe: probe}, nil)
			require.Equal(t, Pass{Claimed: 3, Unknown: 1, Published: 1, Released: 1}, g.runOnce())
			require.EqualValues(t, 3, asked.Load())
			require.Empty(t, g.sent.keys(), "its head is unknown")
			g.is("b", StateSent)
			g.is("c", StatePending)
		})
	})
	t.Run("and the relay stops", func(t *testing.T) {
		bubble(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			probe := func(context.Context, *Record) (Verdict, string, error) { cancel(); return VerdictSent, "", nil }
			g := ambiguous(t, SendOptions{OnUnknown: Park, Probe: probe}, nil)
			pass, err := g.relay.RunOnce(ctx)
			require.NoError(t, err, "all is settled")
			require.Equal(t, 1, pass.Published)
			require.Equal(t, 2, pass.Released)
			for _, k := range []string{"b", "c"} {
				require.True(t, g.is(k, StatePending).Ambiguous, "nobody was asked about it")
			}
		})
	})
}

// What the Probe could not tell it is asked again, whatever has happened to the
// message since: another attempt that was put off tells nothing about the one
// before.
func TestProbeIsAskedUntilItKnows(t *testing.T) {
	const unknown, sent, not = VerdictUnknown, VerdictSent, VerdictNotSent
	for name, c := range map[string]struct {
		lapsed   bool
		says     []Verdict // in turn
		sends    []error   // in turn
		attempts int       // sends
	}{
		"lapsed, then deferred":            {true, []Verdict{unknown, sent}, []error{Defer(time.Second)}, 1},
		"lapsed, then down":                {true, []Verdict{unknown, sent}, []error{Unavailable(errPlain)}, 1},
		"lapsed, then later":               {true, []Verdict{unknown, sent}, []error{RetryAfter(time.Second, errPlain)}, 1},
		"lapsed, thrice later":             {true, []Verdict{unknown, unknown, unknown, sent}, slices.Repeat([]error{RetryAfter(time.Second, errPlain)}, 3), 3},
		"nobody knows":                     {false, []Verdict{unknown, sent}, []error{Unknown(errPlain)}, 1},
		"nobody knows, then deferred":      {false, []Verdict{unknown, unknown, sent}, []error{Unknown(errPlain), Defer(time.Second)}, 2},
		"lapsed, not sent, then later":     {true, []Verdict{not}, []error{RetryAfter(time.Second, errPlain), nil}, 2},
		"nobody knows, not sent, deferred": {false, []Verdict{not}, []error{Unknown(errPlain), Defer(time.Second), nil}, 3},
		"not sent, but then nobody knows":  {true, []Verdict{not, unknown, sent}, []error{Unknown(errPlain)}, 1},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				asked, attempts := 0, 0
				probe := func(context.Context, *Record) (Verdict, string, error) {
					asked++
					require.LessOrEqual(t, asked, len(c.says), "asked although it has told")
					return c.says[asked-1], "", nil
				}
				g := newJournalRig(t, SendOptions{Probe: probe}, func(context.Context, *Record) (string, error) {
					attempts++
					require.LessOrEqual(t, attempts, c.attempts, "sent again although it was sent")
					return "", c.sends[attempts-1]
				})
				g.put("k")
				if c.lapsed {
					g.lapse("k")
				}
				g.start()
				time.Sleep(10 * time.Minute)
				require.NoError(t, g.stop())
				g.is("k", StateSent)
				require.Equal(t, []int{len(c.says), c.attempts}, []int{asked, attempts})
			})
		})
	}
}

// What came alone because its holders died may be what killed them.
func TestMessageThatMayKillItsHolderIsOutAlone(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		var now, most atomic.Int32
		g.relay = g.newRelay(RelayOptions{PollInterval: time.Hour}, g.journal.Sender(func(_ context.Context, r *Record) (string, error) {
			n := now.Add(1)
			defer now.Add(-1)
			g.sent.add(r)
			if r.Ambiguous && n > most.Load() {
				most.Store(n)
			}
			time.Sleep(time.Second)
			return "", nil
		}, SendOptions{BatchSize: 4}))
		g.put("p1", "p2")
		for range 2 {
			rs, err := g.journal.ClaimDue(t.Context(), 10, time.Second)
			require.NoError(t, err)
			require.NotEmpty(t, rs)
			time.Sleep(2 * time.Second)
		}
		g.put(numbered("k", 8)...)
		g.start()
		time.Sleep(20 * time.Second)
		require.Equal(t, 10, g.count(StateSent), "and what is behind them is not left to polling")

		g.put("before") // is out when the next one is claimed
		g.put("p3")
		g.store.change("p3", func(m *fakeMessage) { m.State, m.LeaseUntil, m.lapses = StateSending, time.Now().Add(time.Second/2), 1 })
		time.Sleep(time.Second / 2)
		g.is("before", StateSending)
		g.store.hint(Hint{})
		time.Sleep(20 * time.Second)
		g.is("p3", StateSent)
		require.EqualValues(t, 1, most.Load())
		require.NoError(t, g.stop())
	})
}
