package integration

import (
	"context"
	"database/sql"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// onHostAt runs f as on a host whose clock is decades behind the database's:
// in a bubble of package synctest, where it is the year 2000. With ahead true
// the host's clock is decades ahead. A library that lets a host's clock decide
// anything in the database fails at three minutes as it does at decades.
func onHostAt(t *testing.T, s *site, ahead bool, f func(t *testing.T, db *sql.DB, store *sqlstore.Store)) {
	synctest.Test(t, func(t *testing.T) {
		if ahead {
			time.Sleep(60 * 365 * 24 * time.Hour)
		}
		db, err := sql.Open(s.driver, s.dsn)
		require.NoError(t, err)
		defer db.Close()
		store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		f(t, db, store)
	})
}

// onBothHosts runs f on a host that is behind and on one that is ahead.
func onBothHosts(t *testing.T, f func(t *testing.T, s *site, db *sql.DB, store *sqlstore.Store)) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		for name, ahead := range map[string]bool{"host behind": false, "host ahead": true} {
			t.Run(name, func(t *testing.T) {
				onHostAt(t, s, ahead, func(t *testing.T, db *sql.DB, store *sqlstore.Store) { f(t, s, db, store) })
			})
		}
	})
}

// near requires a time that the store tells to be that of the database.
func (s *site) near(t *testing.T, at time.Time, db *sql.DB) {
	t.Helper()
	var micros int64
	require.NoError(t, db.QueryRow(`SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint`).Scan(&micros))
	require.WithinDuration(t, time.UnixMicro(micros), at, time.Minute)
}

func stageIn(t *testing.T, db *sql.DB, l *outbox.Latest[string], key string) outbox.Version {
	t.Helper()
	tx, err := db.Begin()
	require.NoError(t, err)
	defer tx.Rollback()
	v, err := l.Stage(t.Context(), tx, key, "x")
	require.NoError(t, err)
	require.NoError(t, tx.Commit())
	return v
}

// A lease that another host holds is not taken, extended or ended by a host
// whose clock is wrong, and the wait that it is told is the true one.
func TestG5HostsClockTakesNoLease(t *testing.T) {
	onBothHosts(t, func(t *testing.T, s *site, db *sql.DB, store *sqlstore.Store) {
		const lease = time.Minute
		channel := outbox.Channel{System: outbox.SystemLatest, Name: t.Name()}
		stageIn(t, db, latestOn(t, store, channel.Name), "held")
		held, err := store.ClaimRows(t.Context(), outbox.Claim{Channel: channel.Name, Limit: 10, Lease: lease, Full: true})
		require.NoError(t, err)
		require.Len(t, held.Rows, 1, "due at once")
		s.near(t, held.Rows[0].StagedAt, db)
		s.near(t, held.Rows[0].Due, db)
		s.near(t, held.Rows[0].LeaseUntil.Add(-lease), db)

		again, err := store.ClaimRows(t.Context(), outbox.Claim{Channel: channel.Name, Limit: 10, Lease: lease, Full: true})
		require.NoError(t, err)
		require.Empty(t, again.Rows)
		looks, err := store.Look(t.Context(), []outbox.Channel{channel})
		require.NoError(t, err)
		require.InDelta(t, lease, looks[0].Wait, float64(lease/2))

		results, err := store.Extend(t.Context(), channel, held.Rows, time.Hour)
		require.NoError(t, err)
		require.Equal(t, []outbox.Result{outbox.ResultDone}, results)
		row, err := store.PendingRow(t.Context(), nil, channel.Name, "held")
		require.NoError(t, err)
		s.near(t, row.LeaseUntil.Add(-time.Hour), db)

		results, err = store.Settle(t.Context(), channel, []outbox.Settlement{
			{Row: held.Rows[0], Outcome: outbox.OutcomeRetry, Delay: 2 * time.Hour, Error: "x"}})
		require.NoError(t, err)
		require.Equal(t, []outbox.Result{outbox.ResultDone}, results)
		row, err = store.PendingRow(t.Context(), nil, channel.Name, "held")
		require.NoError(t, err)
		s.near(t, row.Due.Add(-2*time.Hour), db)
	})
}

// What hosts tell each other through the database, pauses, outages and ages,
// is in its time too.
func TestG5HostsClockDecidesNoPause(t *testing.T) {
	onBothHosts(t, func(t *testing.T, s *site, db *sql.DB, store *sqlstore.Store) {
		channel := outbox.Channel{System: outbox.SystemLatest, Name: t.Name()}
		stageIn(t, db, latestOn(t, store, channel.Name), "k")
		paused := func() time.Duration {
			looks, err := store.Look(t.Context(), []outbox.Channel{channel})
			require.NoError(t, err)
			return looks[0].Paused
		}
		require.NoError(t, store.Pause(t.Context(), channel.Name, time.Hour, "x"))
		require.InDelta(t, time.Hour, paused(), float64(time.Minute))
		require.NoError(t, store.Pause(t.Context(), channel.Name, 0, ""))
		require.NoError(t, store.Outage(t.Context(), channel, true, "x"))
		require.LessOrEqual(t, paused(), time.Second)
		stats, err := store.Stats(t.Context())
		require.NoError(t, err)
		for _, c := range stats {
			require.Less(t, c.OldestDue, time.Minute)
			require.Less(t, c.Paused, 2*time.Second)
		}
	})
}

// BatchDelay rounds by the database's clock, and versions never follow a host's.
func TestG2HostsClockMovesNoVersion(t *testing.T) {
	onBothHosts(t, func(t *testing.T, s *site, db *sql.DB, store *sqlstore.Store) {
		before := stageIn(t, db, latestOn(t, store, t.Name()), "k")
		s.near(t, time.UnixMicro(int64(before)), db)
		after := stageIn(t, db, latestOn(t, store, t.Name()), "k")
		require.Greater(t, after, before)
		version, token, err := store.Fence(t.Context())
		require.NoError(t, err)
		s.near(t, time.UnixMicro(int64(version)), db)
		s.near(t, time.UnixMicro(int64(token)), db)

		hourly, err := outbox.NewLatest(store, outbox.LatestOptions[string]{Channel: t.Name(), BatchDelay: time.Hour})
		require.NoError(t, err)
		stageIn(t, db, hourly, "rounded")
		row, err := store.PendingRow(t.Context(), nil, t.Name(), "rounded")
		require.NoError(t, err)
		require.Zero(t, row.Due.UnixMicro()%time.Hour.Microseconds())
		require.Less(t, row.Due.Sub(row.StagedAt), time.Hour)
	})
}

// A whole relay on such a host publishes what is due and leaves to others what
// they hold.
func TestG5RelayOnAHostWithAWrongClock(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		for name, ahead := range map[string]bool{"host behind": false, "host ahead": true} {
			t.Run(name, func(t *testing.T) {
				l := s.latest(name)
				s.stage(l, "held", "x")
				right := s.claim(name, 10, time.Minute) // by a host that is right
				require.Len(t, right, 1)
				s.stage(l, "due", "x")
				onHostAt(t, s, ahead, func(t *testing.T, _ *sql.DB, store *sqlstore.Store) {
					runUntilPublished(t, latestOn(t, store, name), "due")
				})
				require.Equal(t, []outbox.Result{outbox.ResultDone}, s.settle(name, outbox.OutcomeDone, 0, right...))
			})
		}
	})
}

// runUntilPublished runs a relay until it has published one key, and nothing else.
func runUntilPublished(t *testing.T, l *outbox.Latest[string], key string) {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var w witness
	book := new(logbook)
	relay, err := outbox.NewRelay(book.options(), l.Publisher(func(_ context.Context, batch []*outbox.Entry[string]) error {
		w.saw(batch)
		cancel()
		return nil
	}, outbox.PublishOptions{}))
	require.NoError(t, err)
	require.NoError(t, relay.Run(ctx))
	require.Len(t, w.all(), 1)
	require.Len(t, w.of(key), 1)
	require.Empty(t, book.noise())
}
