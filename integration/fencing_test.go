package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

var outcomes = []outbox.Outcome{outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeRelease}

// TestG4StaleHolderChangesNothing: whoever has lost a lease is told so row by
// row, and the rest of the batch is settled.
func TestG4StaleHolderChangesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		for _, outcome := range outcomes {
			channel := fmt.Sprint("outcome ", outcome)
			l := s.latest(channel)
			s.stageMany(l, "k", 6)
			old := s.claim(channel, 6, time.Second)
			require.Len(t, old, 6)
			clock.Advance(time.Second) // not after, at its very end
			taken := s.claim(channel, 2, time.Hour)
			require.Len(t, taken, 2)
			require.Equal(t, old[0].Version, taken[0].Version)
			wrong := old[5]
			wrong.Token++
			old[5] = wrong
			before := s.entries()

			want := append(allOf(outbox.ResultStale, 2), allOf(outbox.ResultDone, 3)...)
			want = append(want, outbox.ResultStale)
			extended, err := s.store.Extend(t.Context(), latestChannel(channel), old, 0)
			require.NoError(t, err)
			require.Equal(t, want, extended, "a lease that lapsed and that nobody took is extended")
			require.Equal(t, want, s.settle(channel, outcome, time.Hour, old...))
			after := s.entries()
			require.Subset(t, after, []string{before[0], before[1], before[5]}, "a stale settlement changed its row")
			require.Equal(t, allOf(outbox.ResultDone, 2), s.settle(channel, outbox.OutcomeDone, 0, taken...))
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		}
	})
}

// TestG4SameSettlementAgainIsASuccess: an answer that was lost on the wire is
// asked for again.
func TestG4SameSettlementAgainIsASuccess(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		ch := latestChannel("orders")
		settle := func(ss ...outbox.Settlement) outbox.Result {
			t.Helper()
			results, err := s.store.Settle(t.Context(), ch, ss)
			require.NoError(t, err)
			return results[0]
		}
		l := s.latest("orders")
		for _, outcome := range outcomes {
			s.stage(l, "k", "value")
			row := s.claim("orders", 1, time.Minute)[0]
			one := outbox.Settlement{Row: row, Outcome: outcome, Delay: time.Hour, Error: "why"}
			require.Equal(t, outbox.ResultDone, settle(one))
			state := s.entries()
			one.Again = true
			require.Equal(t, outbox.ResultDone, settle(one), "outcome %d again", outcome)
			require.Equal(t, state, s.entries(), "the same again changed the row")
			for _, other := range outcomes {
				if other != outcome && outcome != outbox.OutcomeDone { // a row that is gone tells nothing
					one.Outcome, one.Again = other, false
					require.Equal(t, outbox.ResultStale, settle(one), "outcome %d after %d", other, outcome)
					require.Equal(t, state, s.entries())
				}
			}
			extended, err := s.store.Extend(t.Context(), ch, []outbox.Row{row}, time.Hour)
			require.NoError(t, err)
			require.Equal(t, allOf(outbox.ResultStale, 1), extended, "a settled lease was extended")
			require.Equal(t, state, s.entries())
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		}

		s.stage(l, "k", "old")
		row := s.claim("orders", 1, time.Minute)[0]
		s.stage(l, "k", "new")
		one := outbox.Settlement{Row: row, Outcome: outbox.OutcomeDone}
		require.Equal(t, outbox.ResultSuperseded, settle(one))
		state := s.entries()
		one.Again = true
		require.Contains(t, []outbox.Result{outbox.ResultDone, outbox.ResultSuperseded}, settle(one))
		require.Equal(t, state, s.entries())

		// Gone without our doing is not the same again.
		row = s.claim("orders", 1, time.Minute)[0]
		require.NoError(t, s.store.DiscardRow(t.Context(), "orders", "k", row.Version))
		require.Equal(t, outbox.ResultStale, settle(outbox.Settlement{Row: row, Outcome: outbox.OutcomeDone}))
	})
}

// TestG4OneOfTwoRacingSettlementsWins is field case S07: the holder that lost
// its rows and the one that has them settle at the same time.
func TestG4OneOfTwoRacingSettlementsWins(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const rows, rounds = 50, 20 // 1,000 pairs
		clock := s.onClock()
		l := s.latest("orders")
		for round := range rounds {
			s.stageMany(l, "k", rows)
			old := s.claim("orders", rows, time.Second)
			clock.Advance(2 * time.Second)
			held := s.claim("orders", rows, time.Hour)
			require.Len(t, held, rows)
			rand.Shuffle(rows, func(i, j int) { old[i], old[j] = old[j], old[i] })
			lost, won := outcomes[round%3], outcomes[round/3%3]
			var stale, done []outbox.Result
			race(
				func() { stale = s.raceSettle(lost, old) },
				func() { done = s.raceSettle(won, held) },
			)
			require.Equal(t, allOf(outbox.ResultStale, rows), stale)
			require.Equal(t, allOf(outbox.ResultDone, rows), done)
			left := s.count(`SELECT count(*) FROM {t:entries}`)
			if won == outbox.OutcomeDone {
				require.Zero(t, left)
			} else {
				require.Equal(t, rows, left)
			}
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		}
	})
}

// raceSettle settles rows with one outcome until none is busy: the other side
// of a race holds them for a moment.
func (s *site) raceSettle(o outbox.Outcome, rows []outbox.Row) []outbox.Result {
	results := make([]outbox.Result, len(rows))
	todo := make([]int, len(rows))
	for i := range todo {
		todo[i] = i
	}
	for len(todo) > 0 {
		ss := make([]outbox.Settlement, len(todo))
		for n, i := range todo {
			ss[n] = outbox.Settlement{Row: rows[i], Outcome: o}
		}
		some, err := s.store.Settle(context.Background(), latestChannel("orders"), ss)
		if err != nil {
			s.t.Errorf("settle: %v", err)
			return nil
		}
		var busy []int
		for n, i := range todo {
			if results[i] = some[n]; some[n] == outbox.ResultBusy {
				busy = append(busy, i)
			}
		}
		todo = busy
	}
	return results
}

// race runs functions at the same time.
func race(fs ...func()) {
	var wg sync.WaitGroup
	start := make(chan struct{})
	for _, f := range fs {
		wg.Go(func() {
			<-start
			f()
		})
	}
	close(start)
	wg.Wait()
}

// TestG4RepeatedSettlementRacesItself: a settlement whose answer was lost may
// still be running when it is sent again.
func TestG4RepeatedSettlementRacesItself(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const rows = 20
		l := s.latest("orders")
		ch := latestChannel("orders")
		for round := range 12 {
			s.stageMany(l, "k", rows)
			held := s.claim("orders", rows, time.Minute)
			outcome := outcomes[round%3]
			var results [2][]outbox.Result
			settle := func(n int) func() {
				return func() {
					ss := make([]outbox.Settlement, rows)
					for i, r := range held {
						ss[i] = outbox.Settlement{Row: r, Outcome: outcome, Delay: time.Hour, Again: n == 1}
					}
					var err error
					if results[n], err = s.store.Settle(t.Context(), ch, ss); err != nil {
						t.Errorf("settle: %v", err)
					}
				}
			}
			race(settle(0), settle(1))
			want := rows
			if outcome == outbox.OutcomeDone {
				want = 0
			}
			require.Equal(t, want, s.count(`SELECT count(*) FROM {t:entries}`))
			for i := range rows {
				pair := []outbox.Result{results[0][i], results[1][i]}
				require.Contains(t, pair, outbox.ResultDone, "row %d of outcome %d: %v", i, outcome, pair)
			}
			require.Zero(t, s.count(`SELECT count(*) FROM {t:entries} WHERE attempt > 1 OR lease_until > 0`))
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		}
	})
}

// TestG4ExtensionRacesSettlement: a row that was settled is never held again.
func TestG4ExtensionRacesSettlement(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const rows = 20
		l := s.latest("orders")
		for round := range 12 {
			s.stageMany(l, "k", rows)
			held := s.claim("orders", rows, time.Minute)
			outcome := outcomes[round%3]
			var settled []outbox.Result
			race(
				func() { settled = s.raceSettle(outcome, held) },
				func() {
					_, err := s.store.Extend(t.Context(), latestChannel("orders"), held, time.Hour)
					if err != nil {
						t.Errorf("extend: %v", err)
					}
				},
			)
			require.Equal(t, allOf(outbox.ResultDone, rows), settled)
			require.Zero(t, s.count(`SELECT count(*) FROM {t:entries} WHERE lease_until > 0`))
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		}
	})
}

// TestG4TokensDifferThoughTheClockStands is field case S08.
func TestG4TokensDifferThoughTheClockStands(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		clock.Advance(-40 * 365 * 24 * time.Hour) // long before the tokens' start
		l := s.latest("orders")
		s.stage(l, "k", "value")
		var former []outbox.Row
		last := outbox.Token(0)
		for range 10 {
			rows := s.claim("orders", 1, time.Minute)
			require.Len(t, rows, 1)
			require.Greater(t, rows[0].Token, last)
			last = rows[0].Token
			for _, old := range former {
				require.Equal(t, allOf(outbox.ResultStale, 1), s.settle("orders", outbox.OutcomeDone, 0, old))
			}
			former = append(former, rows[0])
			require.Equal(t, allOf(outbox.ResultDone, 1), s.settle("orders", outbox.OutcomeRelease, 0, rows[0]))
		}
		require.False(t, s.empty())
	})
}

// TestG4TokensAreABatchsOwn: of two claims at the same time, each has its own.
func TestG4TokensAreABatchsOwn(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		s.stageMany(s.latest("orders"), "k", 200)
		var mu sync.Mutex
		holders, tokens := map[outbox.Version]int{}, map[outbox.Token]int{}
		claim := func(n int) func() {
			return func() {
				for range 10 {
					c, err := s.store.ClaimRows(context.Background(), outbox.Claim{Channel: "orders", Limit: 5, Lease: time.Minute, Full: true})
					if err != nil {
						t.Errorf("claim: %v", err)
					}
					mu.Lock()
					for _, r := range c.Rows {
						holders[r.Version]++
						if other, ok := tokens[r.Token]; ok && other != n {
							t.Errorf("token %d was given to %d and %d", r.Token, other, n)
						}
						tokens[r.Token] = n
					}
					mu.Unlock()
				}
			}
		}
		race(claim(0), claim(1), claim(2), claim(3))
		require.Len(t, holders, 200)
		for version, n := range holders {
			require.Equal(t, 1, n, "version %d was claimed %d times", version, n)
		}
	})
}

// TestG4PlacesAreNoNames is field case S78: an old holder cannot touch the
// next life of its key, nor a row that came to its row's place.
func TestG4PlacesAreNoNames(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		seen := map[outbox.Version]bool{}
		var old []outbox.Row
		for range 5 {
			s.stage(l, "k", "value")
			rows := s.claim("orders", 1, time.Minute)
			require.Len(t, rows, 1)
			require.False(t, seen[rows[0].Version], "version %d was used again", rows[0].Version)
			seen[rows[0].Version] = true
			before := s.entries()
			for _, outcome := range outcomes {
				for _, r := range old {
					require.Equal(t, allOf(outbox.ResultStale, 1), s.settle("orders", outcome, time.Hour, r))
				}
			}
			require.Equal(t, before, s.entries())
			old = append(old, rows[0])
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
			if s.postgres() {
				s.exec(s.dialect.Render(`VACUUM {t:entries}`)) // places are free again
			}
		}
	})
}

// TestG4DiscardIsGuardedByTheVersion: what was staged meanwhile stays.
func TestG4DiscardIsGuardedByTheVersion(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		require.ErrorIs(t, l.Discard(t.Context(), "k", 1), outbox.ErrNotFound)
		v := s.stage(l, "k", "old")
		newer := s.stage(l, "k", "new")
		require.ErrorIs(t, l.Discard(t.Context(), "k", v), outbox.ErrLeaseLost)
		if s.postgres() { // SQLite waits for its one writer
			tx := s.begin()
			_, err := l.Stage(t.Context(), tx, "k", "held")
			require.NoError(t, err)
			require.ErrorIs(t, l.Discard(t.Context(), "k", newer), outbox.ErrBusy)
			require.NoError(t, tx.Rollback())
		}
		e, err := l.Pending(t.Context(), nil, "k")
		require.NoError(t, err)
		require.Equal(t, "new", e.Value)
		held := s.claim("orders", 1, time.Minute)[0]
		require.NoError(t, l.Discard(t.Context(), "k", newer))
		require.Equal(t, allOf(outbox.ResultStale, 1), s.settle("orders", outbox.OutcomeDone, 0, held))
		require.True(t, s.empty())
	})
}
