package integration

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// TestBatchOfMessagesIsOneClaimAndOneSettlement, whether sent messages are kept
// or not.
func TestBatchOfMessagesIsOneClaimAndOneSettlement(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		plain := s.journal("mail")
		db, c := s.counting(t)
		db.SetMaxOpenConns(1)
		send := func(context.Context, *outbox.Record) (string, error) { return "", nil }
		many := func(context.Context, []*outbox.Delivery) error { return nil }
		for _, retention := range []time.Duration{outbox.DeleteOnSent, time.Hour} {
			for _, groups := range []int{0, 1000} {
				o := outbox.SendOptions{Retention: retention}
				for most, a := range map[int]outbox.Attachment{
					2*10 + 1: s.journal("mail").BatchSender(many, o),
					3*10 + 1: s.journal("mail").Sender(send, o), // what is sent while the first are being settled
				} {
					r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, a)
					require.NoError(t, err)
					s.put(plain, letters("warm up ", 100, groups)...)
					_, err = r.Flush(t.Context())
					require.NoError(t, err)
					s.put(plain, letters("k", 1000, groups)...)
					var pass outbox.Pass
					trips := c.during(func() { pass, err = r.Flush(t.Context()) })
					require.NoError(t, err)
					require.Equal(t, 1000, pass.Published)
					require.LessOrEqual(t, trips, most, "and one claim that finds nothing")
					s.wipe()
				}
			}
		}
	})
}

// TestPuttingIsOneCallPerChunk on SQLite, whose driver makes no trips.
func TestPuttingIsOneCallPerChunk(t *testing.T) {
	onlySQLite(t, func(t *testing.T, s *site) {
		db, c := s.counting(t)
		db.SetMaxOpenConns(1)
		j := s.journal("mail")
		for _, n := range []int{1, 2, 1000, 1001, 3000} {
			for _, groups := range []int{0, 5} {
				tx, err := db.BeginTx(t.Context(), nil)
				require.NoError(t, err)
				calls := c.during(func() { _, err = j.PutMany(t.Context(), tx, letters(fmt.Sprint(n, groups, " "), n, groups)) })
				require.NoError(t, err)
				require.NoError(t, tx.Commit())
				require.Equal(t, (n+999)/1000, calls, "%d messages: %q", n, c.last)
			}
		}
	})
}

// series runs a statement beside a table i (n) of the numbers from 1 to n.
func (s *site) series(text string, n int) {
	s.t.Helper()
	from := `WITH RECURSIVE i (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM i WHERE n < $1) `
	if s.postgres() {
		from = `WITH i (n) AS (SELECT generate_series(1, $1::integer)) `
	}
	text = strings.ReplaceAll(text, "{empty}", map[bool]string{true: `''::bytea`, false: `x''`}[s.postgres()])
	_, err := s.db.Exec(s.dialect.Render(from+text), n)
	require.NoError(s.t, err)
}

// setDue ends an INSERT of groups: SQLite's trigger gave them rows with their messages.
const setDue = ` ON CONFLICT (channel, grp) DO UPDATE SET due = excluded.due`

// crowds are what may lie in a channel without being due.
var crowds = map[string]func(s *site){
	"100,000 dead": func(s *site) {
		s.series(`INSERT INTO {t:messages} (seq, channel, key, due, created_at, outcome, lease_until, completed_at, payload)
			SELECT n, 'mail', 'crowd ' || n, 0, 0, 4, -4, n, {empty} FROM i WHERE true`, 100_000)
	},
	"100,000 sent": func(s *site) {
		s.series(`INSERT INTO {t:messages} (seq, channel, key, grp, due, created_at, outcome, lease_until, completed_at, payload)
			SELECT n, 'mail', 'crowd ' || n, CASE WHEN n % 2 = 0 THEN 'group ' || n % 50 ELSE '' END, 0, 0, 1, -1, n, {empty} FROM i WHERE true`, 100_000)
	},
	"100,000 scheduled for later": func(s *site) {
		s.series(`INSERT INTO {t:messages} (seq, channel, key, due, created_at, payload)
			SELECT n, 'mail', 'crowd ' || n, 9000000000000000 + n, 0, {empty} FROM i WHERE true`, 100_000)
	},
	"100,000 in one group, its head for later": func(s *site) {
		s.series(`INSERT INTO {t:messages} (seq, channel, key, grp, due, created_at, payload)
			SELECT n, 'mail', 'crowd ' || n, 'crowd', 9000000000000000, 0, {empty} FROM i WHERE true`, 100_000)
		s.exec(s.dialect.Render(`INSERT INTO {t:groups} (channel, grp, due) VALUES ('mail', 'crowd', 9000000000000000)` + setDue))
	},
	"100,000 in one group behind a dead one, due to be looked at": func(s *site) {
		s.series(`INSERT INTO {t:messages} (seq, channel, key, grp, due, created_at, outcome, payload)
			SELECT n, 'mail', 'crowd ' || n, 'crowd', 0, 0, CASE n WHEN 1 THEN 4 ELSE 0 END, {empty} FROM i WHERE true`, 100_000)
		s.exec(s.dialect.Render(`INSERT INTO {t:groups} (channel, grp, due) VALUES ('mail', 'crowd', 0)` + setDue))
	},
	"10,000 blocked groups": func(s *site) {
		s.series(`INSERT INTO {t:messages} (seq, channel, key, grp, due, created_at, outcome, payload)
			SELECT n, 'mail', 'crowd ' || n, 'crowd ' || (n + 1) / 2, 0, 0, CASE n % 2 WHEN 1 THEN 4 ELSE 0 END, {empty} FROM i WHERE true`, 20_000)
		s.series(`INSERT INTO {t:groups} (channel, grp, due) SELECT 'mail', 'crowd ' || n, 9223372036854775807 FROM i WHERE true`+setDue, 10_000)
	},
}

// TestG5CrowdsCostTheOthersLittle: whatever lies in a channel, claiming and
// settling what is due takes hardly longer. Bounds are wide, for busy machines:
// walking over the crowd would cost a hundred times as much.
func TestG5CrowdsCostTheOthersLittle(t *testing.T) {
	t.Parallel()
	onBothUnsynced(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		round := func() time.Duration {
			s.put(j, append(letters("plain ", 50, 0), letters("grouped ", 50, 50)...)...)
			began := time.Now()
			for n := 0; n < 100; {
				rows := s.take("mail", 50, time.Minute)
				require.NotEmpty(t, rows)
				n += len(rows)
				ss := endings(outbox.OutcomeDone, 0, rows)
				for i := range ss {
					require.NotContains(t, rows[i].Key, "crowd")
					ss[i].Keep = false
				}
				results, err := s.store.Settle(t.Context(), messageChannel("mail"), ss)
				require.NoError(t, err)
				require.Equal(t, allOf(outbox.ResultDone, len(rows)), results)
			}
			require.Empty(t, s.take("mail", 50, time.Minute))
			_, err := s.store.Look(t.Context(), []outbox.Channel{messageChannel("mail")})
			require.NoError(t, err)
			return time.Since(began)
		}
		median := func() time.Duration {
			took := make([]time.Duration, 7)
			for i := range took {
				took[i] = round()
			}
			slices.Sort(took)
			return took[len(took)/2]
		}
		median()
		alone := median()
		for name, crowd := range crowds {
			median() // plans are made while there is next to nothing
			crowd(s)
			crowded := median()
			t.Logf("%s: %s, alone %s", name, crowded, alone)
			require.Less(t, crowded, 4*alone+20*time.Millisecond, name)
			s.wipe()
		}
	})
}

// TestG5GroupsThatTurnOutToBeBlockedArePassedBy: ten thousand, all due to be
// looked at, do not keep a message behind them for long.
func TestG5GroupsThatTurnOutToBeBlockedArePassedBy(t *testing.T) {
	t.Parallel()
	onBothUnsynced(t, func(t *testing.T, s *site) {
		crowds["10,000 blocked groups"](s)
		s.exec(s.dialect.Render(`UPDATE {t:groups} SET due = 1`))
		j := s.journal("mail")
		s.put(j, outbox.Message{Key: "good", Group: "good"})
		var r receiver
		began := time.Now()
		s.run(outbox.RelayOptions{Logger: quiet, PollInterval: 20 * time.Millisecond}, j.Sender(r.send, outbox.SendOptions{}))
		eventually(t, "the good one", func() bool { return r.len() == 1 })
		t.Logf("after %s", time.Since(began))
		require.Less(t, time.Since(began), 6*time.Second*raceFactor)
		require.Equal(t, []string{"good"}, r.keys())
	})
}
