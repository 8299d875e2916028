package integration

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// Whatever state an undelivered entry is in, nothing that happens by itself,
// or that an operator does short of discarding it, deletes it.
func TestG6NothingAutomaticDeletesWhatIsUndelivered(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		idle, failing, other := s.latest("nobody's"), s.latest("failing"), s.latest("other")
		for _, key := range []string{"fresh", "leased", "failed", "scheduled", "broken"} {
			s.stage(idle, key, "x")
		}
		change := func(key, set string) {
			s.exec(s.dialect.Render(`UPDATE {t:entries} SET `+set+` WHERE channel = 'nobody''s' AND key = $1`), key)
		}
		change("leased", `lease_until = 1, token = 7, attempt = 1`) // by somebody who died long ago
		change("failed", `attempt = 1000000, last_error = 'refused', due = 1`)
		change("scheduled", `due = 4102444800000000`)
		change("broken", `headers = '{'`)
		before := s.table(`SELECT * FROM {t:entries} WHERE channel = 'nobody''s' ORDER BY key`)
		require.Len(t, before, 5)

		s.stageMany(failing, "k", 10)
		for range 3 {
			require.NoError(t, migrations.Up(t.Context(), s.db, s.dialect))
			s.liveOnce(t, failing, other)
		}
		require.Equal(t, before, s.table(`SELECT * FROM {t:entries} WHERE channel = 'nobody''s' ORDER BY key`))
		require.Equal(t, 15, s.count(`SELECT count(*) FROM {t:entries}`))

		var refused *migrations.UndeliveredError
		require.ErrorAs(t, migrations.Down(t.Context(), s.db, s.dialect, false), &refused)
		require.EqualValues(t, 15, refused.Rows)
		require.Equal(t, 15, s.count(`SELECT count(*) FROM {t:entries}`))
		require.NoError(t, migrations.Down(t.Context(), s.db, s.dialect, true), "said aloud")
	})
}

// liveOnce is the life of a process: it starts, serves one channel that always
// fails and one that works, is operated, and stops.
func (s *site) liveOnce(t *testing.T, failing, other *outbox.Latest[string]) {
	t.Helper()
	require.NoError(t, s.store.Check(t.Context()))
	var w witness
	relay, err := outbox.NewRelay(new(logbook).options(),
		other.Publisher(w.publish, outbox.PublishOptions{}),
		failing.Publisher(func(context.Context, []*outbox.Entry[string]) error {
			return outbox.Permanent(errors.New("never"))
		}, outbox.PublishOptions{Lease: 100 * time.Millisecond}))
	require.NoError(t, err)
	s.exec(s.dialect.Render(`UPDATE {t:entries} SET due = 1 WHERE channel = 'failing'`))
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error)
	go func() { done <- relay.Run(ctx) }()
	s.stage(other, "k", "x")
	for _, channel := range []string{"nobody's", "failing", "other"} {
		require.NoError(t, s.store.Pause(t.Context(), channel, time.Hour, "x"))
		require.NoError(t, s.store.Pause(t.Context(), channel, 0, ""))
		require.NoError(t, s.store.Outage(t.Context(), latestChannel(channel), true, "x"))
		require.NoError(t, s.store.Outage(t.Context(), latestChannel(channel), false, ""))
	}
	_, _, err = s.store.Fence(t.Context())
	require.NoError(t, err)
	eventually(t, "the channels to be served", func() bool {
		return w.len() > 0 && s.count(`SELECT count(*) FROM {t:entries} WHERE channel = 'failing' AND due > 1`) == 10
	})
	stats, err := relay.Stats(t.Context())
	require.NoError(t, err)
	served := map[string]bool{}
	for _, c := range stats {
		served[c.Channel.Name] = c.Attached
	}
	require.Equal(t, map[string]bool{"nobody's": false, "failing": true, "other": true}, served)
	cancel()
	require.NoError(t, <-done)
	eventually(t, "the channel that works to be empty", func() bool {
		_, err := relay.Flush(t.Context())
		require.NoError(t, err)
		return s.count(`SELECT count(*) FROM {t:entries} WHERE channel = 'other'`) == 0
	})
}
