package outbox

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

var errPlain = errors.New("plain")

// What a send says, and what becomes of the message, by policy.
func TestOutcomesOfSends(t *testing.T) {
	wait := func(ctx context.Context, _ *Record) (string, error) { <-ctx.Done(); return "", ctx.Err() }
	says := func(ref string, err error) SendFunc {
		return func(context.Context, *Record) (string, error) { return ref, err }
	}
	late := func(ref string, err error) SendFunc {
		return func(ctx context.Context, _ *Record) (string, error) { <-ctx.Done(); return ref, err }
	}
	for name, c := range map[string]struct {
		send         SendFunc
		resend, park State
		probed       bool // where a Probe is set
	}{
		"sent":                   {says("r", nil), StateSent, StateSent, false},
		"plain":                  {says("", errPlain), StateFailed, StateUnknown, true},
		"permanent":              {says("", Permanent(errPlain)), StateDead, StateDead, false},
		"retry after":            {says("", RetryAfter(time.Minute, errPlain)), StateFailed, StateFailed, false},
		"defer":                  {says("", Defer(time.Minute)), StatePending, StatePending, false},
		"unavailable":            {says("", Unavailable(errPlain)), StatePending, StatePending, false},
		"unknown":                {says("", Unknown(errPlain)), StateFailed, StateUnknown, true},
		"timeout":                {wait, StateFailed, StateUnknown, true},
		"nil after its time":     {late("", nil), StateFailed, StateUnknown, true},
		"ref after its time":     {late("r", nil), StateSent, StateSent, false},
		"refused after its time": {late("", Permanent(errPlain)), StateDead, StateDead, false},
		"panic":                  {func(context.Context, *Record) (string, error) { panic("x") }, StateFailed, StateUnknown, true},
		"goexit":                 {func(context.Context, *Record) (string, error) { runtime.Goexit(); return "", nil }, StateFailed, StateUnknown, true},
		"hang":                   {func(context.Context, *Record) (string, error) { time.Sleep(time.Hour); return "", nil }, StateFailed, StateUnknown, true},
		"error that panics":      {says("", evilError{}), StateFailed, StateUnknown, true},
	} {
		for _, p := range []Policy{Resend, Park} {
			for _, probe := range []Verdict{VerdictUnknown, VerdictSent, VerdictNotSent, 99} {
				t.Run(name, func(t *testing.T) {
					bubble(t, func(t *testing.T) {
						defer time.Sleep(2 * time.Hour) // until what hangs has returned
						asked := 0
						o := SendOptions{OnUnknown: p, AttemptTimeout: time.Second}
						if probe != 99 {
							o.Probe = func(ctx context.Context, r *Record) (Verdict, string, error) {
								asked++
								require.NoError(t, ctx.Err(), "the Probe has its own time")
								return probe, "probed", nil
							}
						}
						g := newJournalRig(t, o, c.send)
						g.put("k")
						g.runOnce()
						want := c.resend
						if p == Park {
							want = c.park
						}
						if probe == 99 || !c.probed {
							require.Zero(t, asked)
							g.is("k", want)
							return
						}
						require.Equal(t, 1, asked)
						switch probe {
						case VerdictSent:
							require.Equal(t, "probed", g.is("k", StateSent).Ref)
						case VerdictNotSent:
							if name == "hang" {
								g.is("k", want) // it may still be sent
								return
							}
							require.Contains(t, g.is("k", StateFailed).LastError, "not sent, says the probe")
						default:
							g.is("k", want)
						}
					})
				})
			}
		}
	}
}

type evilError struct{}

func (evilError) Error() string { panic("evil") }
func (evilError) Is(error) bool { panic("evil") }
func (evilError) As(any) bool   { panic("evil") }

func TestProbeThatFailsKnowsNothing(t *testing.T) {
	for name, probe := range map[string]ProbeFunc{
		"error":   func(context.Context, *Record) (Verdict, string, error) { return VerdictSent, "", errPlain },
		"panic":   func(context.Context, *Record) (Verdict, string, error) { panic("x") },
		"goexit":  func(context.Context, *Record) (Verdict, string, error) { runtime.Goexit(); return VerdictSent, "", nil },
		"timeout": func(ctx context.Context, _ *Record) (Verdict, string, error) { <-ctx.Done(); return 0, "", nil },
		"hang": func(context.Context, *Record) (Verdict, string, error) {
			time.Sleep(time.Minute)
			return VerdictSent, "", nil
		},
		"dead": func(context.Context, *Record) (Verdict, string, error) { return VerdictDead, "", nil },
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				o := SendOptions{OnUnknown: Park, Probe: probe, AttemptTimeout: time.Second}
				g := newJournalRig(t, o, func(context.Context, *Record) (string, error) { return "", Unknown(errPlain) })
				g.putGroup("g", "a", "b")
				pass := g.runOnce()
				require.Equal(t, Pass{Claimed: 2, Unknown: 1, Released: 1}, pass)
				require.Contains(t, g.is("a", StateUnknown).LastError, "probe")
				require.NotEmpty(t, g.seen(EventProbe))
				time.Sleep(time.Minute)
			})
		})
	}
}

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
				require.Zero(t, g.relay.channels[0].crew.unstarted)
				require.Zero(t, g.relay.channels[0].hungCount())
				require.NoError(t, g.stop())
			})
		})
	}
}

func TestAttemptsAreLimited(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		o    SendOptions
		want State
	}{
		"known":            {errPlain, SendOptions{}, StateDead},
		"retry after":      {RetryAfter(time.Hour, errPlain), SendOptions{}, StateDead},
		"unknown":          {Unknown(errPlain), SendOptions{}, StateUnknown},
		"defer":            {Defer(time.Hour), SendOptions{}, StateFailed},
		"no limit":         {errPlain, SendOptions{MaxAttempts: NoLimit}, StateFailed},
		"probed, not sent": {Unknown(errPlain), SendOptions{Probe: probeOf(VerdictNotSent)}, StateDead},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := newJournalRig(t, c.o, func(context.Context, *Record) (string, error) { return "", c.err })
				g.put("k")
				g.store.change("k", func(m *fakeMessage) { m.Attempt = 9 })
				g.runOnce()
				g.is("k", c.want)
			})
		})
	}
}

func probeOf(v Verdict) ProbeFunc {
	return func(context.Context, *Record) (Verdict, string, error) { return v, "probed", nil }
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
			asked := 0
			probe := func(_ context.Context, r *Record) (Verdict, string, error) {
				asked++
				return map[string]Verdict{"a": VerdictUnknown, "b": VerdictSent, "c": VerdictNotSent}[r.Key], "", nil
			}
			g := ambiguous(t, SendOptions{OnUnknown: Park, Probe: probe}, nil)
			require.Equal(t, Pass{Claimed: 3, Unknown: 1, Published: 1, Released: 1}, g.runOnce())
			require.Equal(t, 3, asked)
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
			require.Error(t, err)
			require.Equal(t, 1, pass.Published)
			require.Equal(t, 2, pass.Left, "they stay ambiguous")
			g.is("b", StateSending)
		})
	})
}

func TestUnknownIsLoggedAndCounted(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{OnUnknown: Park}, func(context.Context, *Record) (string, error) { return "", errPlain })
		g.put("k")
		require.Equal(t, Pass{Claimed: 1, Unknown: 1}, g.runOnce())
		require.Contains(t, g.logged(), `level=WARN msg="outbox: nobody knows whether the message was sent`)
		require.Contains(t, g.logged(), "channel=c key=k")
		require.Len(t, g.seen(EventUnknown), 1)
	})
}

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
		require.EqualValues(t, 1, most.Load())
		require.NoError(t, g.stop())
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
