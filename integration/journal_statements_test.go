package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// putRows puts through a store, in a transaction of its own.
func putRows(t *testing.T, store outbox.JournalStore, channel string, ms []outbox.Message, begin time.Duration) []outbox.PutAnswer {
	t.Helper()
	rows := make([]outbox.PutRow, len(ms))
	for i, m := range ms {
		rows[i] = outbox.PutRow(m)
	}
	answers, err := store.PutRows(context.Background(), nil, channel, rows, begin)
	require.NoError(t, err)
	require.Len(t, answers, len(ms))
	return answers
}

// TestJournalCallsAreOneRoundTripEach on Postgres, whether the keys are new or
// not, in groups or not, for one message or many.
func TestJournalCallsAreOneRoundTripEach(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		db, c := s.counting(t)
		db.SetMaxOpenConns(1) // one session: what is described stays so
		ctx := t.Context()
		ch := messageChannel("mail")
		var held []outbox.Row
		settled := func(keep bool, outcomes ...outbox.Outcome) func() {
			return func() {
				ss := make([]outbox.Settlement, len(held))
				for i, r := range held {
					ss[i] = outbox.Settlement{Row: r, Outcome: outcomes[i%len(outcomes)], Delay: time.Hour, Keep: keep, Error: "why", Ref: "ref"}
				}
				_, err := s.store.Settle(ctx, ch, ss)
				require.NoError(t, err)
			}
		}
		claim := func() { held = s.take("mail", 50, time.Minute) }
		put := func(prefix string, n, groups int, begin time.Duration) func() {
			return func() { putRows(t, s.store, "mail", letters(prefix, n, groups), begin) }
		}
		for round := range 2 {
			for _, step := range []struct {
				name string
				call func()
			}{
				{"put", put("a", 1, 0, 0)},
				{"put of what exists", put("a", 1, 0, 0)},
				{"put many", put("b", 10_000, 0, 0)},
				{"put many, half of which exist", put("b", 1_000, 0, 0)},
				{"put in groups", put("c", 500, 10, 0)},
				{"put begun", put("d", 1, 0, time.Minute)},
				{"look", func() { _, err := s.store.Look(ctx, []outbox.Channel{ch, latestChannel("a")}); require.NoError(t, err) }},
				{"stats", func() { _, err := s.store.Stats(ctx); require.NoError(t, err) }},
				{"claim", claim},
				{"extend", func() { _, err := s.store.Extend(ctx, ch, held, time.Minute); require.NoError(t, err) }},
				{"settle, mixed", settled(false, outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeDead, outbox.OutcomeUnknown)},
				{"settle again", settled(false, outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeDead, outbox.OutcomeUnknown)},
				{"claim", claim},
				{"settle, all sent and kept", settled(true, outbox.OutcomeDone)},
				{"claim", claim},
				{"settle, all sent", settled(false, outbox.OutcomeDone)},
				{"begin", func() {
					_, err := s.store.BeginMessage(ctx, nil, "mail", "b0000900", time.Minute)
					require.NoError(t, err)
				}},
				{"list", func() {
					_, err := s.store.ListMessages(ctx, nil, "mail", outbox.MessageList{Limit: 10, Payloads: true})
					require.NoError(t, err)
				}},
				{"retry", func() {
					_, err := s.store.AmendMessages(ctx, nil, "mail", outbox.Amendment{Action: outbox.ActionRetry, Limit: 10})
					require.NoError(t, err)
				}},
				{"purge", func() {
					_, err := s.store.PurgeMessages(ctx, "mail", outbox.Purge{States: []outbox.State{outbox.StateSent}, Limit: 10})
					require.NoError(t, err)
				}},
			} {
				if trips := c.during(step.call); round > 0 {
					expected := 1
					if step.name == "put of what exists" && s.postgres() {
						expected = 2 // so that a Put of what is new costs less
					}
					require.Equal(t, expected, trips, step.name)
				}
			}
			s.wipe()
		}
	})
}

// TestMessagesAreClaimedByHeapOnlyUpdates in steady flow, and groups too.
func TestMessagesAreClaimedByHeapOnlyUpdates(t *testing.T) {
	t.Parallel()
	onlyPostgres(t, func(t *testing.T, s *site) {
		for _, groups := range []int{0, 100} {
			t.Run(fmt.Sprint(groups, " groups"), func(t *testing.T) { s.steadyFlow(t, groups) })
		}
	})
}

func (s *site) steadyFlow(t *testing.T, groups int) {
	const refill, batch = 2_000, 100
	s.wipe()
	db := s.open()
	db.SetMaxOpenConns(1)
	store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
	require.NoError(t, err)
	updates := func() (all, hot int) {
		time.Sleep(1100 * time.Millisecond) // sessions tell what they did once a second
		require.NoError(t, db.QueryRow(s.dialect.Render(
			`SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = {s:messages}::regclass`)).Scan(&all, &hot))
		return all, hot
	}
	cycle := func() {
		putRows(t, s.store, "mail", letters("k", refill, groups), 0)
		for n := 0; n < refill; {
			c, err := store.ClaimMessages(t.Context(), nil, outbox.Claim{Channel: "mail", Limit: batch, Lease: time.Minute, Full: true})
			require.NoError(t, err)
			require.NotEmpty(t, c.Rows)
			n += len(c.Rows)
			ss := make([]outbox.Settlement, len(c.Rows))
			for i, r := range c.Rows {
				ss[i] = outbox.Settlement{Row: r, Outcome: outbox.OutcomeDone}
			}
			_, err = store.Settle(t.Context(), messageChannel("mail"), ss)
			require.NoError(t, err)
		}
	}
	for i := range 10 {
		cycle()
		if i%3 == 2 { // what autovacuum does about every minute
			s.exec(s.dialect.Render(`VACUUM {t:messages}`))
			s.exec(s.dialect.Render(`VACUUM {t:groups}`))
		}
	}
	before, hotBefore := updates()
	for range 5 {
		cycle()
	}
	after, hot := updates()
	claims, heapOnly := after-before, hot-hotBefore
	require.Equal(t, 5*refill, claims)
	require.GreaterOrEqual(t, float64(heapOnly), 0.95*float64(claims), "%d of %d claims were heap-only", heapOnly, claims)
}
