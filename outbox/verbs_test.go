package outbox

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// begun puts a message and begins it.
func (g *journalRig) begun(key string) Record {
	g.t.Helper()
	g.put(key)
	r, err := g.journal.Begin(context.Background(), key, time.Minute)
	require.NoError(g.t, err)
	return r
}

func TestVerbsRefuseBadInput(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx, j := t.Context(), g.journal
		l := g.begun("k").Lease
		calls := g.store.count("")
		refuses := func(err error) {
			t.Helper()
			require.ErrorIs(t, err, ErrInvalid)
			require.NotContains(t, err.Error(), "\n")
		}
		_, err := j.Begin(ctx, "", time.Second)
		refuses(err)
		_, err = j.Begin(ctx, "k", time.Millisecond)
		refuses(err)
		_, err = j.ClaimDue(ctx, 0, time.Second)
		refuses(err)
		_, err = j.ClaimDue(ctx, 1, 2*time.Hour)
		refuses(err)
		_, err = j.Extend(ctx, l, 0)
		refuses(err)
		_, err = j.Extend(ctx, Lease{Channel: "c", Key: "k"}, time.Second)
		refuses(err)
		refuses(j.MarkSent(ctx, Lease{Channel: "other", Key: "k", Token: 1}, ""))
		refuses(j.MarkSent(ctx, l, "\xff"))
		refuses(j.MarkSent(ctx, l, strings.Repeat("r", maxRefBytes+1)))
		refuses(j.MarkFailed(ctx, l, nil))
		refuses(j.ResolveAmbiguous(ctx, l, StateSent))
		refuses(j.ResolveUnknown(ctx, "k", VerdictUnknown, ""))
		refuses(j.ResolveUnknown(ctx, "k", VerdictDead, "ref"))
		refuses(j.ResolveUnknown(ctx, "k", Verdict(7), ""))
		_, err = j.Get(ctx, "")
		refuses(err)
		for _, f := range []Filter{{Limit: -1}, {Limit: maxListLimit + 1}, {After: "?"}, {After: "-1"}, {States: []State{9}}, {Key: "\xff"}, {Group: "\xff"}, {Code: "\xff"}} {
			_, _, err = j.List(ctx, f)
			refuses(err)
		}
		for _, f := range []Filter{{}, {Payload: true}, {Limit: 3}, {All: true, After: "1"}, {Key: "k", Limit: -1}} {
			_, err = j.Retry(ctx, f)
			refuses(err)
			_, err = j.Discard(ctx, f)
			refuses(err)
		}
		_, err = j.Purge(ctx, time.Time{})
		refuses(err)
		require.Equal(t, calls, g.store.count(""), "nothing was asked of the store")
	})
}

func TestVerbsInsideNoTransactionAreErrTx(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx, v := t.Context(), g.journal.In(nil)
		l := g.begun("k").Lease
		_, err := v.Begin(ctx, "k", time.Second)
		require.ErrorIs(t, err, ErrTx)
		_, err = v.ClaimDue(ctx, 1, time.Second)
		require.ErrorIs(t, err, ErrTx)
		_, err = v.Extend(ctx, l, time.Second)
		require.ErrorIs(t, err, ErrTx)
		require.ErrorIs(t, v.MarkSent(ctx, l, ""), ErrTx)
		require.ErrorIs(t, v.MarkFailed(ctx, l, errSink), ErrTx)
		require.ErrorIs(t, v.ResolveUnknown(ctx, "k", VerdictSent, ""), ErrTx)
		_, err = v.Get(ctx, "k")
		require.ErrorIs(t, err, ErrTx)
		_, _, err = v.List(ctx, Filter{})
		require.ErrorIs(t, err, ErrTx)
		_, err = v.Retry(ctx, Filter{All: true})
		require.ErrorIs(t, err, ErrTx)
		_, err = g.journal.In(committed{}).Purge(ctx, time.Now())
		require.ErrorIs(t, err, ErrTx, "a purge has transactions of its own")
	})
}

func TestBeginSaysWhyNot(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx := t.Context()
		_, err := g.journal.Begin(ctx, "none", time.Second)
		require.ErrorIs(t, err, ErrNotFound)
		r := g.begun("k")
		require.Equal(t, StateSending, r.State)
		require.Equal(t, 1, r.Attempt)
		require.Equal(t, []byte("k"), r.Payload)
		require.NotZero(t, r.Lease.Token)
		_, err = g.journal.Begin(ctx, "k", time.Second)
		require.ErrorIs(t, err, ErrState)
		g.putGroup("g", "g1", "g2")
		_, err = g.journal.Begin(ctx, "g2", time.Second)
		require.ErrorIs(t, err, ErrBlocked)
	})
}

func TestMarkFailedFollowsTheClassOfTheError(t *testing.T) {
	plain := errors.New("plain")
	for name, c := range map[string]struct {
		err      error
		attempts int
		state    State
		attempt  int
		min, max time.Duration
	}{
		"plain":                 {plain, 1, StateFailed, 1, time.Second / 2, time.Second},
		"plain, later":          {plain, 4, StateFailed, 4, 4 * time.Second, 8 * time.Second},
		"plain, tenth attempt":  {plain, 10, StateDead, 10, 0, 0},
		"retry after":           {RetryAfter(time.Hour, plain), 1, StateFailed, 1, time.Hour, time.Hour},
		"retry after, tenth":    {RetryAfter(time.Hour, plain), 10, StateDead, 10, 0, 0},
		"retry after 0":         {RetryAfter(0, plain), 1, StateFailed, 1, time.Second / 2, time.Second},
		"permanent":             {Permanent(plain), 1, StateDead, 1, 0, 0},
		"defer":                 {Defer(time.Minute), 1, StatePending, 0, time.Minute, time.Minute},
		"defer, tenth attempt":  {Defer(time.Minute), 10, StateFailed, 9, time.Minute, time.Minute},
		"unavailable":           {Unavailable(plain), 1, StatePending, 0, 0, 0},
		"unknown":               {Unknown(plain), 1, StateUnknown, 1, 0, 0},
		"timeout of the caller": {context.DeadlineExceeded, 1, StateFailed, 1, time.Second / 2, time.Second},
		"with a code":           {WithCode("E1", Permanent(plain)), 1, StateDead, 1, 0, 0},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := bareJournalRig(t)
				l := g.begun("k").Lease
				g.store.change("k", func(m *fakeMessage) { m.Attempt = c.attempts })
				require.NoError(t, g.journal.MarkFailed(t.Context(), l, c.err))
				m := g.is("k", c.state)
				require.Equal(t, c.attempt, m.Attempt)
				require.Equal(t, c.err.Error(), m.LastError)
				require.Equal(t, Code(c.err), m.Code)
				if m.open() {
					wait := time.Until(m.Due)
					require.GreaterOrEqual(t, wait, c.min)
					require.LessOrEqual(t, wait, c.max)
				}
				require.NoError(t, g.journal.MarkFailed(t.Context(), l, c.err), "the same again")
				require.ErrorIs(t, g.journal.MarkSent(t.Context(), l, ""), ErrLeaseLost)
			})
		})
	}
}

func TestMarkSentIsIdempotentAndFenced(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx := t.Context()
		l := g.begun("k").Lease
		stale := l
		stale.Token--
		require.ErrorIs(t, g.journal.MarkSent(ctx, stale, ""), ErrLeaseLost)
		require.NoError(t, g.journal.MarkSent(ctx, l, "ref"))
		require.NoError(t, g.journal.MarkSent(ctx, l, "ref"))
		require.Equal(t, "ref", g.is("k", StateSent).Ref)
		require.ErrorIs(t, g.journal.MarkFailed(ctx, l, errSink), ErrLeaseLost)
		require.ErrorIs(t, g.journal.MarkFailed(ctx, Lease{Channel: "c", Key: "gone", Token: 5}, errSink), ErrLeaseLost)
	})
}

func TestVerbsOfALockedMessageAreBusyAndThoseOfALockedGroupAreNot(t *testing.T) {
	for name, inside := range map[string]bool{"alone": false, "in a transaction": true} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := bareJournalRig(t)
				ctx, v := t.Context(), g.journal.Verbs
				if inside {
					v = g.journal.In(committed{})
				}
				began := time.Now()
				l := g.begun("k").Lease
				g.store.change("k", func(m *fakeMessage) { m.locked = true })
				require.ErrorIs(t, v.MarkSent(ctx, l, ""), ErrBusy)
				_, err := v.Extend(ctx, l, time.Second)
				require.ErrorIs(t, err, ErrBusy)
				g.is("k", StateSending)

				g.putGroup("g", "g1")
				r, err := g.journal.Begin(ctx, "g1", time.Minute)
				require.NoError(t, err)
				g.store.lockGroup("g", true)
				require.NoError(t, v.MarkSent(ctx, r.Lease, ""))
				g.is("g1", StateSent)
				require.Less(t, time.Since(began), 4*time.Second)
				if inside {
					require.Zero(t, time.Since(began), "a transaction's locks are not held for waiting")
				}
			})
		})
	}
}

func TestLockedMessageIsTriedAgainForAShortWhile(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		l := g.begun("k").Lease
		g.store.change("k", func(m *fakeMessage) { m.locked = true })
		time.AfterFunc(100*time.Millisecond, func() { g.store.change("k", func(m *fakeMessage) { m.locked = false }) })
		require.NoError(t, g.journal.MarkSent(t.Context(), l, ""))
		g.is("k", StateSent)
	})
}

func TestExtendTellsWhenTheLeaseEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		l := g.begun("k").Lease
		longer, err := g.journal.Extend(t.Context(), l, time.Hour)
		require.NoError(t, err)
		require.Equal(t, time.Now().Add(time.Hour).UTC(), longer.Until)
		require.Equal(t, l.Token, longer.Token)
		require.NoError(t, g.journal.MarkSent(t.Context(), longer, ""))
		_, err = g.journal.Extend(t.Context(), longer, time.Hour)
		require.ErrorIs(t, err, ErrLeaseLost)
	})
}

func TestClaimDueAndResolveAmbiguous(t *testing.T) {
	for to, want := range map[State]State{StateUnknown: StateUnknown, StatePending: StatePending} {
		t.Run(to.String(), func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := bareJournalRig(t)
				g.put("k")
				rs, err := g.journal.ClaimDue(t.Context(), 10, time.Second)
				require.NoError(t, err)
				require.Len(t, rs, 1)
				require.False(t, rs[0].Ambiguous)
				time.Sleep(2 * time.Second)
				again, err := g.journal.ClaimDue(t.Context(), 10, time.Second)
				require.NoError(t, err)
				require.Len(t, again, 1)
				require.True(t, again[0].Ambiguous)
				require.ErrorIs(t, g.journal.ResolveAmbiguous(t.Context(), rs[0].Lease, to), ErrLeaseLost)
				require.NoError(t, g.journal.ResolveAmbiguous(t.Context(), again[0].Lease, to))
				g.is("k", want)
			})
		})
	}
}

func TestResolveUnknownIsAPersonsAnswer(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx := t.Context()
		for key, c := range map[string]struct {
			verdict Verdict
			state   State
		}{"s": {VerdictSent, StateSent}, "n": {VerdictNotSent, StateFailed}, "d": {VerdictDead, StateDead}} {
			l := g.begun(key).Lease
			require.ErrorIs(t, g.journal.ResolveUnknown(ctx, key, c.verdict, ""), ErrState)
			require.NoError(t, g.journal.MarkFailed(ctx, l, Unknown(errSink)))
			g.store.change(key, func(m *fakeMessage) { m.locked = true })
			require.ErrorIs(t, g.journal.ResolveUnknown(ctx, key, c.verdict, ""), ErrBusy)
			g.store.change(key, func(m *fakeMessage) { m.locked = false })
			ref := ""
			if c.verdict == VerdictSent {
				ref = "r"
			}
			require.NoError(t, g.journal.ResolveUnknown(ctx, key, c.verdict, ref))
			require.Equal(t, ref, g.is(key, c.state).Ref)
		}
		require.ErrorIs(t, g.journal.ResolveUnknown(ctx, "none", VerdictSent, ""), ErrNotFound)
	})
}

func TestListPagesOldestFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx := t.Context()
		g.put(numbered("k", 250)...)
		g.putGroup("g", "g1")
		var got []string
		var pages []int
		for after := ""; ; {
			rs, next, err := g.journal.List(ctx, Filter{After: after})
			require.NoError(t, err)
			pages = append(pages, len(rs))
			for _, r := range rs {
				require.Nil(t, r.Payload)
				got = append(got, r.Key)
			}
			if after = next; next == "" {
				break
			}
		}
		require.Equal(t, append(numbered("k", 250), "g1"), got)
		require.Equal(t, []int{100, 100, 51}, pages)
		rs, after, err := g.journal.List(ctx, Filter{Group: "g", Payload: true, States: []State{StatePending}, Limit: 5})
		require.NoError(t, err)
		require.Empty(t, after)
		require.Equal(t, []byte("g1"), rs[0].Payload)
		_, err = g.journal.Get(ctx, "none")
		require.ErrorIs(t, err, ErrNotFound)
	})
}

func TestRetryAndDiscardGoOnInBatches(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx := t.Context()
		g.put(keys(2500)...)
		g.store.mu.Lock()
		for _, m := range g.store.messages {
			m.State, m.Attempt = StateDead, 10
		}
		g.store.mu.Unlock()
		dead := Filter{States: []State{StateDead}}

		dry := dead
		dry.DryRun = true
		n, err := g.journal.Retry(ctx, dry)
		require.NoError(t, err)
		require.EqualValues(t, 2500, n)
		require.Equal(t, 2500, g.count(StateDead))

		limited := dead
		limited.Limit = 1200
		n, err = g.journal.Retry(ctx, limited)
		require.NoError(t, err)
		require.EqualValues(t, 1200, n)
		n, err = g.journal.Retry(ctx, dead)
		require.NoError(t, err)
		require.EqualValues(t, 1300, n)
		require.Equal(t, 2500, g.count(StatePending))
		for _, c := range g.store.callsOf("amend") {
			require.LessOrEqual(t, c.rows, 1000)
		}
		n, err = g.journal.Discard(ctx, Filter{All: true})
		require.NoError(t, err)
		require.EqualValues(t, 2500, n)
	})
}

func TestFilterThatNamesAKeySaysWhyNothingWasChanged(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx := t.Context()
		_, err := g.journal.Retry(ctx, Filter{Key: "none"})
		require.ErrorIs(t, err, ErrNotFound)
		g.putGroup("g", "k")
		_, err = g.journal.Retry(ctx, Filter{Key: "k"})
		require.ErrorIs(t, err, ErrState)
		require.ErrorContains(t, err, "it is pending")
		for _, f := range []Filter{{Key: "k", Group: "h"}, {Key: "k", States: []State{StateDead}}, {Key: "k", Code: "x"}} {
			_, err = g.journal.Discard(ctx, f)
			require.ErrorIs(t, err, ErrState)
		}
		g.store.change("k", func(m *fakeMessage) { m.locked = true })
		_, err = g.journal.Discard(ctx, Filter{Key: "k"})
		require.ErrorIs(t, err, ErrBusy)
		g.store.change("k", func(m *fakeMessage) { m.locked = false })
		n, err := g.journal.Discard(ctx, Filter{Key: "k"})
		require.NoError(t, err)
		require.EqualValues(t, 1, n)
		n, err = g.journal.Discard(ctx, Filter{Group: "none"})
		require.NoError(t, err)
		require.Zero(t, n)
	})
}

func TestPurgeDeletesWhatEndedBefore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ctx := t.Context()
		g.put(keys(2100)...)
		states := []State{StateSent, StateDead, StateUnknown, StatePending}
		g.store.mu.Lock()
		for i, k := range keys(2100) {
			m := g.store.messages[fakeKey{"c", k}]
			m.State, m.CompletedAt = states[i%4], time.Now()
		}
		g.store.mu.Unlock()
		n, err := g.journal.Purge(ctx, time.Now())
		require.NoError(t, err)
		require.Zero(t, n)
		time.Sleep(time.Second)
		n, err = g.journal.Purge(ctx, time.Now())
		require.NoError(t, err)
		require.EqualValues(t, 1575, n)
		require.Equal(t, 2+1, len(g.store.callsOf("purge")))
		require.Equal(t, 525, g.count(StatePending))
	})
}
