package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

var messageOutcomes = append(outcomes, outbox.OutcomeDead, outbox.OutcomeUnknown)

// TestG4StaleSenderChangesNothing: whoever has lost messages is told so message
// by message, and the rest of the batch is settled.
func TestG4StaleSenderChangesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		for _, groups := range []int{0, 6} {
			for _, outcome := range messageOutcomes {
				j := s.journal("mail")
				s.put(j, letters("k", 6, groups)...)
				old := s.take("mail", 6, time.Second)
				require.Len(t, old, 6)
				clock.Advance(time.Second) // not after, at its very end
				taken := s.take("mail", 2, time.Hour)
				require.Equal(t, rowKeys(old[:2]), rowKeys(taken))
				require.True(t, taken[0].Ambiguous)
				wrong := old[5]
				wrong.Token++
				old[5] = wrong
				before := s.table(`SELECT * FROM {t:messages} ORDER BY key`)

				want := append(allOf(outbox.ResultStale, 2), allOf(outbox.ResultDone, 3)...)
				want = append(want, outbox.ResultStale)
				extended, err := s.store.Extend(t.Context(), messageChannel("mail"), old, 0)
				require.NoError(t, err)
				require.Equal(t, want, extended, "a lease that lapsed and that nobody took is extended")
				require.Equal(t, want, s.finish("mail", outcome, time.Hour, old...))
				after := s.table(`SELECT * FROM {t:messages} ORDER BY key`)
				require.Subset(t, after, []string{before[0], before[1], before[5]}, "a stale settlement changed its message")
				require.Equal(t, allOf(outbox.ResultDone, 2), s.finish("mail", outbox.OutcomeDone, 0, taken...))
				s.wipe()
			}
		}
	})
}

// TestG4VerbsWithALeaseThatIsOthers answer ErrLeaseLost, alone and inside a
// transaction, which stays usable.
func TestG4VerbsWithALeaseThatIsOthers(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		j := s.journal("mail")
		for _, group := range []string{"", "g"} {
			s.put(j, outbox.Message{Key: "k", Group: group})
			old, err := j.Begin(t.Context(), "k", time.Minute)
			require.NoError(t, err)
			clock.Advance(time.Minute)
			_, err = j.Begin(t.Context(), "k", time.Minute)
			require.ErrorIs(t, err, outbox.ErrState, "a lapsed lease is for ClaimDue, which says ambiguous")
			rs, err := j.ClaimDue(t.Context(), 1, time.Minute)
			require.NoError(t, err)
			require.True(t, rs[0].Ambiguous)
			before := s.messages()
			for _, inside := range []bool{false, true} {
				v, tx := j.Verbs, s.begin()
				if inside {
					v = j.In(outbox.SQL(tx))
				} else {
					require.NoError(t, tx.Rollback())
				}
				_, err = v.Extend(t.Context(), old.Lease, time.Hour)
				require.ErrorIs(t, err, outbox.ErrLeaseLost)
				require.ErrorIs(t, v.MarkSent(t.Context(), old.Lease, "ref"), outbox.ErrLeaseLost)
				require.ErrorIs(t, v.MarkFailed(t.Context(), old.Lease, errDown), outbox.ErrLeaseLost)
				require.ErrorIs(t, v.MarkFailed(t.Context(), old.Lease, outbox.Permanent(errDown)), outbox.ErrLeaseLost)
				require.ErrorIs(t, v.ResolveAmbiguous(t.Context(), old.Lease, outbox.StateUnknown), outbox.ErrLeaseLost)
				if inside {
					_, err = tx.Exec(`INSERT INTO app VALUES ($1, 'goes on')`, group)
					require.NoError(t, err)
					require.NoError(t, tx.Commit())
				}
				require.Equal(t, before, s.messages())
			}
			require.NoError(t, j.MarkSent(t.Context(), rs[0].Lease, "ref"))
			require.NoError(t, j.MarkSent(t.Context(), rs[0].Lease, "ref"), "the same again")
			require.ErrorIs(t, j.MarkFailed(t.Context(), rs[0].Lease, errDown), outbox.ErrLeaseLost, "another outcome")
			s.wipe()
		}
	})
}

// TestG4RacingSettlementsOfAMessage: the sender that lost its messages and the
// one that has them settle at the same time; and a settlement races its own
// repetition and an extension.
func TestG4RacingSettlementsOfAMessage(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const n, rounds = 30, 25
		clock := s.onClock()
		j := s.journal("mail")
		for round := range rounds {
			s.put(j, letters("k", n, round%2*n)...)
			old := s.take("mail", n, time.Second)
			clock.Advance(2 * time.Second)
			held := s.take("mail", n, time.Hour)
			require.Len(t, held, n)
			rand.Shuffle(n, func(i, j int) { old[i], old[j] = old[j], old[i] })
			lost, won := messageOutcomes[round%5], messageOutcomes[round/5]
			var stale, done, again []outbox.Result
			race(
				func() { stale = s.settleUntilFree(endings(lost, time.Hour, old)) },
				func() { done = s.settleUntilFree(endings(won, time.Hour, held)) },
				func() {
					ss := endings(won, time.Hour, held)
					for i := range ss {
						ss[i].Again = true
					}
					again = s.settleUntilFree(ss)
				},
				func() {
					if _, err := s.store.Extend(context.Background(), messageChannel("mail"), held, time.Hour); err != nil {
						t.Errorf("extend: %v", err)
					}
				},
			)
			require.Equal(t, allOf(outbox.ResultStale, n), stale)
			require.Equal(t, allOf(outbox.ResultDone, n), done)
			require.Equal(t, allOf(outbox.ResultDone, n), again)
			require.Zero(t, s.count(`SELECT count(*) FROM {t:messages} WHERE lease_until > 0`), "leased after all")
			require.Zero(t, s.count(`SELECT count(*) FROM {t:groups} WHERE lease_until > 0`), "a group is leased after all")
			require.Equal(t, n, s.count(`SELECT count(*) FROM {t:messages} WHERE lease_until = $1`, -int(won)))
			s.wipe()
		}
	})
}

// settleUntilFree settles messages until none is busy.
func (s *site) settleUntilFree(ss []outbox.Settlement) []outbox.Result {
	results := make([]outbox.Result, len(ss))
	place := make([]int, len(ss))
	for i := range place {
		place[i] = i
	}
	for len(place) > 0 {
		todo := make([]outbox.Settlement, len(place))
		for n, i := range place {
			todo[n] = ss[i]
		}
		some, err := s.store.Settle(context.Background(), messageChannel("mail"), todo)
		if err != nil && s.store.Retryable(err) {
			continue
		}
		if err != nil {
			s.t.Errorf("settle: %v", err)
			return nil
		}
		var busy []int
		for n, i := range place {
			if results[i] = some[n]; some[n] == outbox.ResultBusy {
				busy = append(busy, i)
				ss[i].Again = true
			}
		}
		place = busy
	}
	return results
}

// TestG4TokensOfAKeyNeverRepeat, whatever becomes of the message and of the clock.
func TestG4TokensOfAKeyNeverRepeat(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		clock.Advance(-40 * 365 * 24 * time.Hour) // long before the tokens' start
		j := s.journal("mail")
		last, seq := outbox.Token(0), int64(0)
		var former []outbox.Lease
		for n := range 24 {
			m := outbox.Message{Key: "k", Group: []string{"", "g"}[n/12]}
			var lease outbox.Lease
			switch n % 3 {
			case 0:
				res := s.put(j, m)[0]
				require.Greater(t, res.Seq, seq, "numbers do not repeat either")
				seq = res.Seq
				r, err := j.Begin(t.Context(), "k", time.Minute)
				require.NoError(t, err)
				lease = r.Lease
			case 1:
				clock.Advance(-time.Second)
				tx := s.begin()
				res, err := j.PutBegun(t.Context(), tx, m, time.Minute)
				require.NoError(t, err)
				require.NoError(t, tx.Commit())
				seq, lease = res.Seq, res.Lease
			case 2:
				s.put(j, m)
				rs, err := j.ClaimDue(t.Context(), 1, time.Minute)
				require.NoError(t, err)
				seq, lease = rs[0].Seq, rs[0].Lease
			}
			require.Greater(t, lease.Token, last)
			last = lease.Token
			for _, old := range former {
				require.ErrorIs(t, j.MarkSent(t.Context(), old, ""), outbox.ErrLeaseLost)
			}
			former = append(former, lease)
			gone, err := j.Discard(t.Context(), outbox.Filter{Key: "k"})
			require.NoError(t, err)
			require.EqualValues(t, 1, gone)
			require.ErrorIs(t, j.MarkSent(t.Context(), lease, ""), outbox.ErrLeaseLost, "of a message that was discarded")
		}
		require.Empty(t, s.messages())
	})
}

// TestG5RunOfAGroupThatOthersHaveIsNotExtended: a sender whose lease lapsed must
// not go on with the rest of its run while another sends the head again.
func TestG5RunOfAGroupThatOthersHaveIsNotExtended(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		j := s.journal("mail")
		s.put(j, letters("k", 3, 1)...)
		old := s.take("mail", 3, time.Second)
		require.Len(t, old, 3)
		clock.Advance(2 * time.Second)
		head := s.take("mail", 1, time.Hour)
		require.Equal(t, rowKeys(old[:1]), rowKeys(head))
		extended, err := s.store.Extend(t.Context(), messageChannel("mail"), old, time.Hour)
		require.NoError(t, err)
		require.Equal(t, allOf(outbox.ResultStale, 3), extended, "two runs of the group are out")
		require.Empty(t, s.take("mail", 10, time.Hour))
		require.Equal(t, allOf(outbox.ResultDone, 1), s.finish("mail", outbox.OutcomeDone, 0, head...))
		rest := s.take("mail", 10, time.Hour)
		require.Equal(t, rowKeys(old[1:]), rowKeys(rest), fmt.Sprint(s.messages()))
		require.Equal(t, allOf(outbox.ResultStale, 2), s.finish("mail", outbox.OutcomeDone, 0, old[1:]...))
	})
}
