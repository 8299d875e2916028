package integration

import (
	"context"
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// known says what a send's end tells.
type known int

const (
	knownSent    known = iota
	knownNothing       // nobody knows, whatever the policy
	knownPlain         // an error that may mean anything: failed, or nobody knows where somebody cares
	knownFailed        // it was not sent
	knownRefused       // and never will be
	knownUncalled
)

// sendEnds are the ways in which a send can end.
var sendEnds = map[string]struct {
	known known
	text  string // in the last error
	f     func(ctx context.Context) (string, error)
}{
	"sent":              {knownSent, "", func(context.Context) (string, error) { return "ref", nil }},
	"plain error":       {knownPlain, "refused", func(context.Context) (string, error) { return "", errDown }},
	"own cancellation":  {knownPlain, "context canceled", func(context.Context) (string, error) { return "", context.Canceled }},
	"ref and error":     {knownPlain, "refused", func(context.Context) (string, error) { return "ref", errDown }},
	"permanent":         {knownRefused, "permanent", func(context.Context) (string, error) { return "", outbox.Permanent(errDown) }},
	"permanent nil":     {knownRefused, "permanent", func(context.Context) (string, error) { return "", outbox.Permanent(nil) }},
	"retry after":       {knownFailed, "refused", func(context.Context) (string, error) { return "", outbox.RetryAfter(time.Hour, errDown) }},
	"deferred":          {knownUncalled, "deferred", func(context.Context) (string, error) { return "", outbox.Defer(time.Hour) }},
	"unknown":           {knownNothing, "unknown", func(context.Context) (string, error) { return "", outbox.Unknown(errDown) }},
	"unknown nil":       {knownNothing, "unknown", func(context.Context) (string, error) { return "", outbox.Unknown(nil) }},
	"panic":             {knownNothing, "boom", func(context.Context) (string, error) { panic("boom") }},
	"panic of an error": {knownNothing, "refused", func(context.Context) (string, error) { panic(errDown) }},
	"panic permanent":   {knownNothing, "refused", func(context.Context) (string, error) { panic(outbox.Permanent(errDown)) }},
	"panic odd":         {knownNothing, "panic", func(context.Context) (string, error) { panic(&oddPanic{"note"}) }},
	"goexit":            {knownNothing, "exited", func(context.Context) (string, error) { runtime.Goexit(); return "", nil }},
	"timeout":           {knownNothing, "timed out", func(ctx context.Context) (string, error) { <-ctx.Done(); return "", ctx.Err() }},
	"timeout swallowed": {knownNothing, "timed out", func(ctx context.Context) (string, error) { <-ctx.Done(); return "", nil }},
	"timeout wrapped": {knownNothing, "timed out", func(ctx context.Context) (string, error) {
		<-ctx.Done()
		return "", fmt.Errorf("post: %w", ctx.Err())
	}},
	"permanent after the timeout": {knownRefused, "permanent", func(ctx context.Context) (string, error) {
		<-ctx.Done()
		return "", outbox.Permanent(errDown)
	}},
}

// conduct is a policy, and what the Probe says.
type conduct struct {
	name    string
	park    bool
	verdict outbox.Verdict
	err     error
	probes  bool
	panics  bool
}

var conducts = []conduct{
	{name: "resend"},
	{name: "park", park: true},
	{name: "probe says sent", probes: true, verdict: outbox.VerdictSent},
	{name: "probe says not sent", probes: true, verdict: outbox.VerdictNotSent},
	{name: "probe does not know", probes: true},
	{name: "probe does not know, park", probes: true, park: true},
	{name: "probe says sent, park", probes: true, park: true, verdict: outbox.VerdictSent},
	{name: "probe says not sent, park", probes: true, park: true, verdict: outbox.VerdictNotSent},
	{name: "probe fails, park", probes: true, park: true, verdict: outbox.VerdictSent, err: errDown},
	{name: "probe panics", probes: true, panics: true},
}

// want is the state after one attempt, and after the last one.
func (c conduct) want(k known, last bool) outbox.State {
	if k == knownPlain {
		if k = knownFailed; c.park || c.probes {
			k = knownNothing
		}
	}
	if k == knownNothing && c.probes && c.err == nil && !c.panics {
		k = map[outbox.Verdict]known{outbox.VerdictSent: knownSent, outbox.VerdictNotSent: knownFailed, outbox.VerdictUnknown: knownNothing}[c.verdict]
	}
	switch {
	case k == knownSent:
		return outbox.StateSent
	case k == knownRefused, k == knownFailed && last:
		return outbox.StateDead
	case k == knownNothing && (c.park || last):
		return outbox.StateUnknown
	case k == knownUncalled:
		return outbox.StatePending
	}
	return outbox.StateFailed
}

// TestG8EveryEndOfASendUnderEveryPolicy: a send whose outcome nobody knows is
// never said to be sent or failed, unless the Probe says so.
func TestG8EveryEndOfASendUnderEveryPolicy(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		for _, last := range []bool{false, true} {
			for _, c := range conducts {
				j := s.journal(fmt.Sprint(c.name, last))
				for name := range sendEnds {
					s.post(j, name)
				}
				asked := new(receiver)
				o := outbox.SendOptions{AttemptTimeout: 50 * time.Millisecond, Workers: 30, MaxAttempts: 10, Backoff: constant(time.Hour)}
				if last {
					o.MaxAttempts = 1
				}
				if c.park {
					o.OnUnknown = outbox.Park
				}
				if c.probes {
					o.Probe = func(ctx context.Context, m *outbox.Record) (outbox.Verdict, string, error) {
						asked.took(m)
						if c.panics {
							panic("in the probe")
						}
						return c.verdict, "found ref", c.err
					}
				}
				pass := s.sendOnce(j, func(ctx context.Context, m *outbox.Record) (string, error) { return sendEnds[m.Key].f(ctx) }, o)
				require.Equal(t, len(sendEnds), pass.Claimed)
				times := asked.times()
				for _, r := range s.records(j) {
					end := sendEnds[r.Key]
					name := fmt.Sprintf("%s, %s, last: %t", r.Key, c.name, last)
					require.Equal(t, c.want(end.known, last), r.State, name)
					switch {
					case r.State == outbox.StateSent && end.known != knownSent:
						require.Equal(t, "found ref", r.Ref, name)
					case end.known == knownUncalled:
						require.Zero(t, r.Attempt, name)
					case end.known != knownSent:
						require.Contains(t, r.LastError, end.text, name)
						require.Equal(t, 1, r.Attempt, name)
					}
					wanted := 0
					if c.probes && (end.known == knownNothing || end.known == knownPlain) {
						wanted = 1
					}
					require.Equal(t, wanted, times[r.Key], "asked: %s", name)
				}
			}
		}
	})
}

// TestG8BatchThatEndsBadlyIsUnknownAsAWhole, but for what was marked before.
func TestG8BatchThatEndsBadlyIsUnknownAsAWhole(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		for name, end := range sendEnds {
			if end.known != knownNothing {
				continue
			}
			j := s.journal(name)
			s.post(j, "marked sent", "marked refused", "unmarked")
			s.pass(j.BatchSender(func(ctx context.Context, batch []*outbox.Delivery) error {
				for _, d := range batch {
					switch d.Key {
					case "marked sent":
						d.Sent("ref")
					case "marked refused":
						d.Fail(outbox.Permanent(errDown))
					}
				}
				_, err := end.f(ctx)
				return err
			}, outbox.SendOptions{AttemptTimeout: 50 * time.Millisecond, OnUnknown: outbox.Park}))
			require.Equal(t, map[string]outbox.State{
				"marked sent": outbox.StateSent, "marked refused": outbox.StateDead, "unmarked": outbox.StateUnknown,
			}, s.states(j), name)
		}
	})
}
