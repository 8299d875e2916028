package outbox

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// putBegun puts a message that its caller is to send.
func (g *journalRig) putBegun(m Message) PutResult {
	g.t.Helper()
	rs, err := g.journal.put(context.Background(), committed{}, []Message{m}, 10*time.Second)
	require.NoError(g.t, err)
	return rs[0]
}

func TestDeliverSendsAndSettles(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		res := g.putBegun(Message{Key: "k", Group: "g", Payload: []byte("p"), Header: Header{"h": "1"}})
		r, err := g.journal.Deliver(t.Context(), res.Record, func(_ context.Context, r *Record) (string, error) {
			require.Equal(t, []byte("p"), r.Payload)
			require.Equal(t, Header{"h": "1"}, r.Header)
			time.Sleep(time.Minute / 2)
			return "ref", nil
		}, SendOptions{Lease: 3 * time.Second})
		require.NoError(t, err)
		require.Equal(t, StateSent, r.State)
		require.Equal(t, "ref", r.Ref)
		require.Zero(t, r.Lease)
		require.Equal(t, "ref", g.is("k", StateSent).Ref)
		require.Greater(t, g.store.count("extend"), 20, "while it runs")
		got, err := g.journal.Get(t.Context(), "k")
		require.NoError(t, err)
		require.True(t, got.CompletedAt.Equal(r.CompletedAt))
		got.CompletedAt, r.CompletedAt = time.Time{}, time.Time{}
		require.Equal(t, got, r, "the record is as it was settled")
	})
}

func TestDeliverReturnsWhatBecameOfTheMessage(t *testing.T) {
	for name, c := range map[string]struct {
		err   error
		o     SendOptions
		state State
		sent  bool
	}{
		"plain":       {errPlain, SendOptions{}, StateFailed, false},
		"permanent":   {WithCode("E", Permanent(errPlain)), SendOptions{}, StateDead, false},
		"park":        {errPlain, SendOptions{OnUnknown: Park}, StateUnknown, false},
		"probed":      {errPlain, SendOptions{Probe: probeOf(VerdictSent)}, StateSent, true},
		"deferred":    {Defer(time.Minute), SendOptions{}, StatePending, false},
		"unavailable": {Unavailable(errPlain), SendOptions{}, StatePending, false},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := bareJournalRig(t)
				r, err := g.journal.Deliver(t.Context(), g.putBegun(Message{Key: "k"}).Record, func(context.Context, *Record) (string, error) { return "", c.err }, c.o)
				if c.sent {
					require.NoError(t, err)
				} else {
					require.ErrorIs(t, err, c.err)
					require.ErrorContains(t, err, `deliver key "k" of channel "c"`)
				}
				require.Equal(t, c.state.String(), r.State.String())
				m := g.is("k", c.state)
				require.Equal(t, m.Attempt, r.Attempt)
				require.Equal(t, m.LastError, r.LastError)
				require.Equal(t, m.Code, r.Code)
				require.Equal(t, name == "unavailable", g.store.count("down") == 1)
			})
		})
	}
}

func TestDeliverWithoutALeaseIsRefused(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		called := false
		f := func(context.Context, *Record) (string, error) { called = true; return "", nil }
		g.putBegun(Message{Key: "k"})
		again := g.putBegun(Message{Key: "k"})
		require.False(t, again.Created)
		_, err := g.journal.Deliver(t.Context(), again.Record, f, SendOptions{})
		require.ErrorIs(t, err, ErrState)
		r, err := g.journal.Get(t.Context(), "k")
		require.NoError(t, err)
		_, err = g.journal.Deliver(t.Context(), r, f, SendOptions{})
		require.ErrorIs(t, err, ErrState)
		_, err = g.journal.Deliver(t.Context(), r, nil, SendOptions{})
		require.ErrorIs(t, err, ErrInvalid)
		_, err = g.journal.Deliver(t.Context(), r, f, SendOptions{Workers: -1})
		require.ErrorIs(t, err, ErrInvalid)

		lost := g.putBegun(Message{Key: "lost"})
		time.Sleep(11 * time.Second)
		_, err = g.journal.ClaimDue(t.Context(), 5, time.Minute)
		require.NoError(t, err)
		_, err = g.journal.Deliver(t.Context(), lost.Record, f, SendOptions{})
		require.ErrorIs(t, err, ErrLeaseLost)
		require.False(t, called)
	})
}

func TestDeliverWhoseContextEndsSettlesAllTheSame(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		r, err := g.journal.Deliver(ctx, g.putBegun(Message{Key: "k"}).Record, func(ctx context.Context, _ *Record) (string, error) {
			<-ctx.Done()
			return "", nil
		}, SendOptions{OnUnknown: Park})
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, StateUnknown, r.State)
		g.is("k", StateUnknown)

		_, err = g.journal.Deliver(ctx, g.putBegun(Message{Key: "late"}).Record, nil, SendOptions{})
		require.Error(t, err)
		g.is("late", StateSending)
	})
}

func TestDeliverLosesItsLease(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		_, err := g.journal.Deliver(t.Context(), g.putBegun(Message{Key: "k"}).Record, func(ctx context.Context, r *Record) (string, error) {
			_, err := g.journal.Discard(ctx, Filter{Key: "k"})
			require.NoError(t, err)
			<-ctx.Done()
			return "", ctx.Err()
		}, SendOptions{})
		require.ErrorIs(t, err, ErrLeaseLost)
	})
}

func TestDeliverThatCannotSettleSaysSo(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		g.store.setFault(func(op string, after bool) error {
			if op == "settle" {
				return errDown
			}
			return nil
		})
		_, err := g.journal.Deliver(t.Context(), g.putBegun(Message{Key: "k"}).Record, func(context.Context, *Record) (string, error) { return "", nil }, SendOptions{Lease: time.Second})
		require.ErrorIs(t, err, errDown)
		require.ErrorContains(t, err, "sent, but not settled")
	})
}

// A process that stood still until most of the lease had passed, and cannot
// extend it, does not send, and does not say that it has.
func TestDeliverThatCannotHoldItsLeaseDoesNotSend(t *testing.T) {
	for name, settles := range map[string]bool{"settled": true, "not settled": false} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := bareJournalRig(t)
				r := g.putBegun(Message{Key: "k"}).Record
				extends := 0
				g.store.setFault(func(op string, after bool) error {
					switch {
					case op == "extend" && !after:
						extends++
					case op == "extend" && extends == 1:
						time.Sleep(900 * time.Millisecond)
						return nil
					case op == "settle" && !settles:
						return errDown
					}
					if op == "extend" && extends > 1 {
						return errDown
					}
					return nil
				})
				got, err := g.journal.Deliver(t.Context(), r, g.recorded(nil), SendOptions{Lease: time.Second})
				require.ErrorIs(t, err, errUnsent)
				require.Empty(t, g.sent.keys())
				require.Equal(t, settles, got.State == StatePending)
			})
		})
	}
}

func TestDeliverWhileAPutHoldsTheGroup(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		res := g.putBegun(Message{Key: "k", Group: "g"})
		g.store.lockGroup("g", true)
		began := time.Now()
		r, err := g.journal.Deliver(t.Context(), res.Record, func(context.Context, *Record) (string, error) { return "", nil }, SendOptions{})
		require.NoError(t, err)
		require.Equal(t, StateSent, r.State)
		require.Less(t, time.Since(began), 4*time.Second)
	})
}

func TestDeliverOfASendThatSettlesItself(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		r, err := g.journal.Deliver(t.Context(), g.putBegun(Message{Key: "k"}).Record, func(ctx context.Context, r *Record) (string, error) {
			require.NoError(t, g.journal.In(committed{}).MarkSent(ctx, r.Lease, "mine"))
			return "", ErrSettled
		}, SendOptions{})
		require.NoError(t, err)
		require.Equal(t, "mine", r.Ref)
	})
}
