package integration

import (
	"context"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"testing"
	"time"
	_ "time/tzdata"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// TestTimesAreReadAsTheyWereWritten is field case S58: what is due now is
// claimed now, not a microsecond later.
func TestTimesAreReadAsTheyWereWritten(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		now := time.Date(2030, 1, 1, 12, 0, 0, 999_999_500, time.FixedZone("odd", 5*3600+1800))
		s.store = s.newStore(sqlstore.Options{Clock: func() time.Time { return now }})
		l := s.latest("orders")
		for i := range 300 / raceFactor {
			now = now.Add(time.Duration(i) * 1234567 * time.Nanosecond)
			s.stage(l, "k", "value")
			infos, err := l.List(t.Context(), "", 1)
			require.NoError(t, err)
			require.Equal(t, now.UTC().Truncate(time.Microsecond), infos[0].StagedAt)
			require.Equal(t, infos[0].StagedAt, infos[0].Due)

			rows := s.claim("orders", 1, time.Second)
			require.Len(t, rows, 1, "not due at %s", now)
			infos, err = l.List(t.Context(), "", 1)
			require.NoError(t, err)
			require.Equal(t, infos[0].Due, rows[0].Due)
			require.Equal(t, infos[0].StagedAt, rows[0].StagedAt)
			require.Equal(t, infos[0].LeaseUntil, rows[0].LeaseUntil)
			require.Equal(t, now.UTC().Truncate(time.Microsecond).Add(time.Second), rows[0].LeaseUntil)

			// Delays are rounded up to microseconds, and over when they are over.
			s.settle("orders", outbox.OutcomeRetry, 1500*time.Nanosecond, rows...)
			before := now
			now = before.Add(1 * time.Microsecond)
			require.Empty(t, s.claim("orders", 1, time.Second))
			looks, err := s.store.Look(t.Context(), []outbox.Channel{latestChannel("orders")})
			require.NoError(t, err)
			require.Equal(t, time.Microsecond, looks[0].Wait)
			now = before.Add(2 * time.Microsecond)
			rows = s.claim("orders", 1, time.Second)
			require.Len(t, rows, 1)
			s.settle("orders", outbox.OutcomeDone, 0, rows...)
		}
	})
}

// TestWhatIsDueNowIsFoundNow by the clock of each database itself.
func TestWhatIsDueNowIsFoundNow(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		for range 200 / raceFactor {
			s.stage(l, "k", "value")
			rows := s.claim("orders", 1, time.Minute)
			require.Len(t, rows, 1)
			require.Equal(t, allOf(outbox.ResultDone, 1), s.settle("orders", outbox.OutcomeRetry, 0, rows...))
			rows = s.claim("orders", 1, time.Minute)
			require.Len(t, rows, 1)
			require.Equal(t, allOf(outbox.ResultDone, 1), s.settle("orders", outbox.OutcomeDone, 0, rows...))
		}
	})
}

// TestTimesAreInstants is field case S60: no zone of a process, session, role
// or clock shifts them.
func TestTimesAreInstants(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		for _, zone := range []string{"UTC", "Asia/Tokyo", "America/New_York", "Asia/Kathmandu"} {
			if s.postgres() {
				u, err := url.Parse(s.dsn)
				require.NoError(t, err)
				q := u.Query()
				q.Set("timezone", zone)
				u.RawQuery = q.Encode()
				s.dsn = u.String()
			}
			s.db = s.open()
			s.store = s.newStore(sqlstore.Options{})
			l := s.latest(zone)
			around := func(what string, at time.Time) {
				t.Helper()
				require.Equal(t, time.UTC, at.Location(), what)
				require.WithinDuration(t, time.Now(), at, time.Minute, what)
			}
			s.stage(l, "k", "value")
			s.stage(l, "pending", "value")
			rows := s.claim(zone, 1, 30*time.Second)
			require.Len(t, rows, 1)
			around("staged at", rows[0].StagedAt)
			around("due", rows[0].Due)
			around("lease", rows[0].LeaseUntil)
			s.settle(zone, outbox.OutcomeRetry, time.Second, rows...)
			info, ok := entry(t, l, "k")
			require.True(t, ok)
			around("due after a second", info.Due)
			stats, err := s.store.Stats(t.Context())
			require.NoError(t, err)
			for _, c := range stats {
				require.Less(t, c.OldestDue, time.Minute)
			}
			// How the migrations say that people read them.
			reading := `SELECT abs(extract(epoch FROM to_timestamp(due / 1e6) - now()))::integer FROM {t:entries} WHERE key = 'k' AND channel = $1`
			if !s.postgres() {
				reading = `SELECT abs(unixepoch(datetime(due / 1e6, 'unixepoch')) - unixepoch('now')) FROM {t:entries} WHERE key = 'k' AND channel = $1`
			}
			require.Less(t, s.count(reading, zone), 60)
		}
	})
}

// zoneEnv tells a process in which zone it is to find itself.
const zoneEnv = "OUTBOX_TEST_ZONE"

// TestTimesAreInstantsInEveryZone runs the test above in processes of other zones.
func TestTimesAreInstantsInEveryZone(t *testing.T) {
	if zone := os.Getenv(zoneEnv); zone != "" {
		require.Equal(t, zone, os.Getenv("TZ"))
		_, offset := time.Date(2030, 1, 1, 0, 0, 0, 0, time.Local).Zone()
		require.NotZero(t, offset, "the process does not know its zone")
		return
	}
	t.Parallel()
	env := os.Environ()
	if !testing.Short() {
		env = append(env, pgtest.Env+"="+pgtest.DSN(t)) // not a server for each
	}
	for _, zone := range []string{"Asia/Shanghai", "America/New_York"} {
		self := exec.Command(os.Args[0], "-test.run=^TestTimesAreInstants(InEveryZone)?$", fmt.Sprint("-test.short=", testing.Short()))
		self.Env = append(env, "TZ="+zone, zoneEnv+"="+zone)
		out, err := self.CombinedOutput()
		require.NoError(t, err, "%s: %s", zone, out)
	}
}

// TestClockCrossesDaylightSaving: windows and leases are counted in instants,
// though the clock tells the time of a zone whose day has 23 or 25 hours.
func TestClockCrossesDaylightSaving(t *testing.T) {
	zone, err := time.LoadLocation("America/New_York")
	require.NoError(t, err)
	onBoth(t, func(t *testing.T, s *site) {
		for _, night := range []time.Time{
			time.Date(2026, 3, 8, 1, 59, 30, 0, zone),  // an hour is left out
			time.Date(2026, 11, 1, 1, 59, 30, 0, zone), // an hour comes twice
			time.Date(2026, 12, 31, 23, 59, 30, 0, time.UTC),
		} {
			now := night
			s.store = s.newStore(sqlstore.Options{Clock: func() time.Time { return now }})
			channel := night.String()
			l, err := outbox.NewLatest(s.store, outbox.LatestOptions[string]{Channel: channel, BatchDelay: time.Minute})
			require.NoError(t, err)
			s.stage(l, "k", "value")
			require.Empty(t, s.claim(channel, 1, time.Minute))
			now = night.Add(30*time.Second - time.Microsecond)
			require.Empty(t, s.claim(channel, 1, time.Minute))
			now = night.Add(30 * time.Second)
			held := s.claim(channel, 1, time.Minute)
			require.Len(t, held, 1)
			now = now.Add(time.Minute - time.Microsecond)
			require.Empty(t, s.claim(channel, 1, time.Minute), "the lease is not over")
			now = now.Add(time.Microsecond)
			held = s.claim(channel, 1, time.Minute)
			require.Len(t, held, 1)
			s.settle(channel, outbox.OutcomeRetry, 2*time.Hour, held...)
			now = now.Add(2*time.Hour - time.Microsecond)
			require.Empty(t, s.claim(channel, 1, time.Minute))
			now = now.Add(time.Microsecond)
			require.Len(t, s.claim(channel, 1, time.Minute), 1)
		}
	})
}

// TestEveryQueryReadsNothingOneAndMany is field case S61: no aggregate of times
// comes back as text, or as NULL, where the tables are empty.
func TestEveryQueryReadsNothingOneAndMany(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		l := s.latest("orders")
		ch := latestChannel("orders")
		r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, l.Publisher(failing, outbox.PublishOptions{Backoff: constant(time.Hour)}))
		require.NoError(t, err)
		read := func() (outbox.ChannelStats, outbox.Look, int) {
			t.Helper()
			stats, err := r.Stats(t.Context())
			require.NoError(t, err)
			// A pause is of the name, in both systems, and shows in both.
			stats = slices.DeleteFunc(stats, func(c outbox.ChannelStats) bool { return c.Channel.System != outbox.SystemLatest })
			require.Len(t, stats, 1)
			looks, err := s.store.Look(t.Context(), []outbox.Channel{ch, latestChannel("none")})
			require.NoError(t, err)
			require.Equal(t, outbox.Look{Wait: -1}, roundLook(looks[1]))
			infos, err := l.List(t.Context(), "", 0)
			require.NoError(t, err)
			_, err = l.Pending(context.Background(), nil, "k0000000")
			require.Equal(t, len(infos) > 0, err == nil)
			return stats[0], roundLook(looks[0]), len(infos)
		}
		none := outbox.ChannelStats{Channel: ch, Attached: true}
		stats, look, n := read()
		require.Equal(t, none, stats)
		require.Equal(t, outbox.Look{Wait: -1}, look)
		require.Zero(t, n)

		for _, rows := range []int{1, 30} {
			s.stageMany(l, "k", rows)
			clock.Advance(3 * time.Second)
			stats, look, n = read()
			want := none
			want.Due, want.OldestDue = rows, 3*time.Second
			require.Equal(t, want, stats)
			require.Equal(t, outbox.Look{}, look)
			require.Equal(t, rows, n)

			_, err = r.Flush(t.Context())
			require.NoError(t, err)
			stats, look, _ = read()
			want = none
			want.Scheduled, want.Attempt, want.LastError = rows, 1, errDown.Error()
			require.Equal(t, want, stats)
			require.Equal(t, outbox.Look{Wait: time.Hour}, look)

			clock.Advance(2 * time.Hour)
			held := s.claim("orders", 100, time.Minute)
			stats, look, _ = read()
			want.Scheduled, want.InFlight, want.Attempt = 0, rows, 2
			require.Equal(t, want, stats)
			require.Equal(t, outbox.Look{Wait: time.Minute}, look)

			require.NoError(t, s.store.Outage(t.Context(), ch, true, "it is down"))
			stats, look, _ = read()
			want.Paused, want.Outage, want.Reason = time.Second, true, "it is down"
			require.Equal(t, want, stats)
			require.Equal(t, outbox.Look{Wait: time.Minute, Paused: time.Second, Outage: true}, look)

			require.NoError(t, s.store.Pause(t.Context(), "orders", time.Hour, "by an operator"))
			stats, look, _ = read()
			want.Paused, want.Outage, want.Reason = time.Hour, false, "by an operator" // the operator's word goes first
			require.Equal(t, want, stats)
			require.Equal(t, outbox.Look{Wait: time.Hour, Paused: time.Hour, Outage: true}, look)
			require.NoError(t, s.store.Pause(t.Context(), "orders", 0, ""))

			s.settle("orders", outbox.OutcomeDone, 0, held...)
			stats, look, _ = read()
			require.Equal(t, none, stats)
			require.Equal(t, outbox.Look{Wait: -1}, look)
		}
	})
}

// roundLook makes looks that say "nothing waits" equal.
func roundLook(l outbox.Look) outbox.Look {
	if l.Wait < 0 {
		l.Wait = -1
	}
	return l
}
