package outbox

import (
	"context"
	"errors"
	"runtime"
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
