package integration

import (
	"context"
	"database/sql"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// counting gives the site a store on a pool that counts.
func (s *site) counting(t *testing.T) (*sql.DB, *counts) {
	t.Helper()
	db, c := s.counted(t)
	store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
	require.NoError(t, err)
	require.NoError(t, store.Check(t.Context()))
	s.store = store
	return db, c
}

func manyItems(n int) []outbox.Item[string] {
	items := make([]outbox.Item[string], n)
	for i := range items {
		items[i] = outbox.Item[string]{Key: fmt.Sprint("k", i), Value: "value"}
	}
	return items
}

// TestStagingIsOneStatement and one round trip, for one row or many. A
// statement that a connection sees for the first time is described first.
func TestStagingIsOneStatement(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		db, c := s.counting(t)
		db.SetMaxOpenConns(1) // one session: what is described stays so
		l := s.latest("orders")
		limit := 10_000
		if !s.postgres() {
			limit = 1_000
		}
		for round := range 2 {
			for _, n := range []int{1, 2, 100, limit, limit + 1} {
				tx, err := db.BeginTx(t.Context(), nil)
				require.NoError(t, err)
				items := manyItems(n)
				trips := c.during(func() { _, err = l.StageMany(t.Context(), tx, items) })
				require.NoError(t, err)
				require.NoError(t, tx.Commit())
				if round > 0 {
					require.Equal(t, (n+limit-1)/limit, trips, "%d rows: %q", n, c.last)
				}
			}
			tx, err := db.BeginTx(t.Context(), nil)
			require.NoError(t, err)
			trips := c.during(func() {
				_, err = l.Stage(t.Context(), tx, "k", "value")
				require.NoError(t, err)
				_, err = l.StageDelete(t.Context(), tx, "k")
				require.NoError(t, err)
				_, err = l.Pending(t.Context(), outbox.SQL(tx), "k")
				require.NoError(t, err)
			})
			require.NoError(t, tx.Commit())
			if round > 0 {
				require.Equal(t, 3, trips, "%q", c.last)
			}
		}
	})
}

// TestRelayCallsAreOneRoundTripEach on Postgres. SQLite has no trips to make.
func TestRelayCallsAreOneRoundTripEach(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		plain := s.latest("orders")
		db, c := s.counting(t)
		db.SetMaxOpenConns(1)
		ch := latestChannel("orders")
		var held []outbox.Row
		for round := range 2 {
			s.stageMany(plain, "k", 200)
			for _, step := range []struct {
				name string
				call func()
			}{
				{"look", func() {
					_, err := s.store.Look(t.Context(), []outbox.Channel{ch, latestChannel("a"), latestChannel("b"), latestChannel("c")})
					require.NoError(t, err)
				}},
				{"stats", func() {
					_, err := s.store.Stats(t.Context())
					require.NoError(t, err)
				}},
				{"list", func() {
					_, err := s.store.ListRows(t.Context(), "orders", "", 10)
					require.NoError(t, err)
				}},
				{"claim", func() { held = s.claim("orders", 50, time.Minute) }},
				{"extend", func() {
					_, err := s.store.Extend(t.Context(), ch, held, time.Minute)
					require.NoError(t, err)
				}},
				{"settle, retry", func() { s.settle("orders", outbox.OutcomeRetry, time.Hour, held...) }},
				{"claim again", func() { held = s.claim("orders", 50, time.Minute) }},
				{"settle, done", func() { s.settle("orders", outbox.OutcomeDone, 0, held...) }},
				{"discard", func() { _ = s.store.DiscardRow(t.Context(), "orders", "k0000001", 1) }},
				{"outage", func() { require.NoError(t, s.store.Outage(t.Context(), latestChannel("down"), true, "down")) }},
			} {
				if trips := c.during(step.call); round > 0 {
					require.Equal(t, 1, trips, step.name)
				}
				require.Len(t, held, map[bool]int{true: 50}[held != nil])
			}
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		}
	})
}

// TestBatchIsOneClaimAndOneSettlement: a relay that empties a backlog asks
// twice per batch.
func TestBatchIsOneClaimAndOneSettlement(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		plain := s.latest("orders")
		db, c := s.counting(t)
		db.SetMaxOpenConns(1)
		m := newMirror()
		r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, s.latest("orders").Publisher(m.publish, outbox.PublishOptions{}))
		require.NoError(t, err)
		s.stageMany(plain, "warm up ", 50)
		_, err = r.Flush(t.Context())
		require.NoError(t, err)
		s.stageMany(plain, "k", 1000)
		trips := c.during(func() { _, err = r.Flush(t.Context()) })
		require.NoError(t, err)
		require.Equal(t, 1050, m.published)
		require.Equal(t, 2*20+1, trips, "and one claim that finds nothing")
	})
}

// TestIdleRelayAsksOncePerPollInterval, for all its channels together,
// whatever lies in them for later or for others.
func TestIdleRelayAsksOncePerPollInterval(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s *site) {
		later, err := outbox.NewLatest(s.store, outbox.LatestOptions[string]{Channel: "later", BatchDelay: 365 * 24 * time.Hour})
		require.NoError(t, err)
		s.stage(later, "k", "value")
		s.stage(s.latest("nobody's"), "k", "value")
		s.stage(s.latest("failing"), "k", "value")
		require.NoError(t, s.store.Pause(t.Context(), "paused", time.Hour, "by an operator"))
		s.stage(s.latest("paused"), "k", "value")
		_, c := s.counting(t)
		const poll = 100 * time.Millisecond
		var as []outbox.Attachment
		for _, name := range []string{"a", "b", "c", "later", "failing", "paused"} {
			as = append(as, s.latest(name).Publisher(failing, outbox.PublishOptions{Backoff: constant(time.Hour)}))
		}
		s.run(outbox.RelayOptions{PollInterval: poll, Logger: quiet}, as...)
		time.Sleep(5 * poll) // its first looks, and the row that fails
		trips := c.during(func() { time.Sleep(20 * poll) })
		require.LessOrEqual(t, trips, 21, "%q", c.last)
		require.Greater(t, trips, 3)
	})
}

// TestRolledBackStageCostsAtMostTwentyLooks: the hint cannot know that the
// commit will never come.
func TestRolledBackStageCostsAtMostTwentyLooks(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s *site) {
		db, c := s.counting(t)
		l := s.latest("orders")
		const poll = 500 * time.Millisecond
		s.run(outbox.RelayOptions{PollInterval: poll, Logger: quiet}, l.Publisher(newMirror().publish, outbox.PublishOptions{}))
		time.Sleep(poll)
		looks := c.during(func() {
			tx, err := db.BeginTx(context.Background(), nil)
			require.NoError(t, err)
			_, err = l.Stage(t.Context(), tx, "k", "value")
			require.NoError(t, err)
			require.NoError(t, tx.Rollback())
			time.Sleep(2 * poll)
		})
		// Besides: begin (SQLite's driver does not show it), stage, describe it,
		// roll back, and three polls.
		require.LessOrEqual(t, looks, 20+7, "%q", c.last)
		require.Greater(t, looks, 5)
	})
}
