package integration

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// TestG6RetentionDeletesSentMessagesOnly: ten replicas at once, with traffic,
// delete each old sent message once and touch nothing else.
func TestG6RetentionDeletesSentMessagesOnly(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const n, replicas = 500, 10
		clock := s.onClock()
		j := s.journal("mail")
		for i, outcome := range slices.Concat(messageOutcomes, []outbox.Outcome{0}) {
			s.put(j, letters(fmt.Sprint("outcome ", i, " "), n, i%2*50)...)
			rows := s.take("mail", 10_000, 48*time.Hour) // runs of groups come in part
			if outcome != 0 {
				s.finish("mail", outcome, 48*time.Hour, rows...)
			}
		}
		s.put(j, letters("pending ", n, 0)...)
		old := s.count(`SELECT count(*) FROM {t:messages} WHERE outcome = 1`)
		require.Positive(t, old)
		clock.Advance(24 * time.Hour)
		s.put(j, letters("fresh ", n, 0)...)
		s.finish("mail", outbox.OutcomeDone, 0, s.take("mail", 10_000, time.Hour)...)
		kept := s.table(`SELECT * FROM {t:messages} WHERE NOT (outcome = 1 AND completed_at < $1) ORDER BY key`, clock.Now().Add(-time.Hour).UnixMicro())

		purge := outbox.Purge{States: []outbox.State{outbox.StateSent}, Age: 23 * time.Hour, Limit: 100}
		var deleted atomic.Int64
		var wg sync.WaitGroup
		for range replicas {
			store := s.newStore(sqlstore.Options{Clock: clock.Now})
			wg.Go(func() {
				for idle := 0; idle < 2; {
					got, err := store.PurgeMessages(context.Background(), "mail", purge)
					if err != nil && store.Retryable(err) {
						continue
					}
					if err != nil {
						t.Errorf("purge: %v", err)
						return
					}
					if deleted.Add(int64(got)); got == 0 {
						idle++
						time.Sleep(10 * time.Millisecond)
					}
				}
			})
		}
		wg.Wait()
		require.EqualValues(t, old, deleted.Load())
		require.Equal(t, kept, s.table(`SELECT * FROM {t:messages} ORDER BY key`))
	})
}

// TestG6PurgeByHandLeavesWhatIsOpen, and what ended later.
func TestG6PurgeByHandLeavesWhatIsOpen(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		j := s.journal("mail")
		for i, outcome := range messageOutcomes {
			for _, group := range []string{"", fmt.Sprint("g", i)} {
				key := fmt.Sprint(outcome, group)
				s.put(j, outbox.Message{Key: key, Group: group})
				row, err := s.store.BeginMessage(t.Context(), nil, "mail", key, time.Minute)
				require.NoError(t, err)
				s.finish("mail", outcome, time.Hour, row)
			}
		}
		s.put(j, outbox.Message{Key: "pending"}, outbox.Message{Key: "begun", Group: "begun"})
		_, err := j.Begin(t.Context(), "begun", time.Minute)
		require.NoError(t, err)
		n, err := j.Purge(t.Context(), clock.Now())
		require.NoError(t, err)
		require.Zero(t, n, "it ended at that time, not before")
		clock.Advance(365 * 24 * time.Hour)
		n, err = j.Purge(t.Context(), clock.Now())
		require.NoError(t, err)
		require.EqualValues(t, 6, n)
		require.Equal(t, map[string]outbox.State{
			"2": outbox.StateFailed, "2g1": outbox.StateFailed, "3": outbox.StatePending, "3g2": outbox.StatePending,
			"pending": outbox.StatePending, "begun": outbox.StateSending,
		}, s.states(j))
	})
}

// TestG6PurgePassesOverWhatATransactionHolds, and never waits for it.
func TestG6PurgePassesOverWhatATransactionHolds(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		s.put(j, letters("k", 5, 5)...)
		rows := s.take("mail", 5, time.Minute)
		s.finish("mail", outbox.OutcomeDone, 0, rows[:3]...)
		s.finish("mail", outbox.OutcomeDead, 0, rows[3:]...)
		holder := s.begin()
		_, err := holder.Exec(s.dialect.Render(`SELECT key FROM {t:messages} WHERE key = 'k0000001' FOR UPDATE`))
		require.NoError(t, err)
		_, err = j.Put(t.Context(), holder, outbox.Message{Key: "behind a dead one", Group: "group 4"})
		require.NoError(t, err)
		began := time.Now()
		n, err := j.Purge(t.Context(), time.Now().Add(time.Hour))
		require.NoError(t, err)
		require.Less(t, time.Since(began), time.Second)
		require.EqualValues(t, 3, n)
		require.NoError(t, holder.Commit())
		n, err = j.Purge(t.Context(), time.Now().Add(time.Hour))
		require.NoError(t, err)
		require.EqualValues(t, 2, n)
		var r receiver
		s.sendOnce(j, r.send, outbox.SendOptions{})
		require.Equal(t, []string{"behind a dead one"}, r.keys())
	})
}
