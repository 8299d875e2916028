package integration

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// Field cases for messages, as others have them for state.

// TestFieldNumbersAndTokensPassTheEndOfInt32 is field case S25.
func TestFieldNumbersAndTokensPassTheEndOfInt32(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		const low = 1<<31 - 12
		if s.postgres() {
			s.exec(s.dialect.Render(fmt.Sprintf(`SELECT setval({s:seq}::regclass, %d), setval({s:token_seq}::regclass, %d)`, low, low)))
		} else {
			s.exec(s.dialect.Render(`UPDATE {t:seq} SET version = $1, token = $1`), low)
			start := time.UnixMicro(low)
			s.store = s.newStore(sqlstore.Options{Clock: func() time.Time { return start }})
		}
		j := s.journal("mail")
		for i := range 20 {
			key := fmt.Sprint("k", i)
			res := s.put(j, outbox.Message{Key: key, Group: []string{"", "g"}[i%2]})
			require.True(t, res[0].Created)
			r, err := j.Begin(t.Context(), key, time.Minute)
			require.NoError(t, err)
			require.Equal(t, res[0].Seq, r.Seq)
			lease, err := j.Extend(t.Context(), r.Lease, time.Minute)
			require.NoError(t, err)
			require.NoError(t, j.MarkFailed(t.Context(), lease, outbox.Permanent(errDown)))
			n, err := j.Retry(t.Context(), outbox.Filter{Key: key})
			require.NoError(t, err)
			require.EqualValues(t, 1, n)
			rs, err := j.ClaimDue(t.Context(), 10, time.Minute)
			require.NoError(t, err)
			require.Len(t, rs, 1)
			require.Greater(t, rs[0].Lease.Token, r.Lease.Token)
			require.NoError(t, j.MarkSent(t.Context(), rs[0].Lease, "ref"))
		}
		last := s.records(j)[19]
		require.Greater(t, last.Seq, int64(1<<31))
		require.Less(t, last.Seq, int64(1<<32))
		n, err := j.Purge(t.Context(), time.Now().Add(time.Hour))
		require.NoError(t, err)
		require.EqualValues(t, 20, n)
	})
}

// TestFieldFleetOfSendersAtHigherIsolation is field case S57.
func TestFieldFleetOfSendersAtHigherIsolation(t *testing.T) {
	if testing.Short() {
		return
	}
	for _, level := range []string{"repeatable read", "serializable"} {
		t.Run(level, func(t *testing.T) {
			t.Parallel()
			const putters, each = 3, 50
			s := newSite(t, dialect.Postgres(), "pgx", withParameter(t, pgtest.DSN(t), "default_transaction_isolation", level))
			j := s.journal("mail")
			var r receiver
			book := new(logbook)
			stop := s.senders(3, book, "mail", r.send, outbox.SendOptions{BatchSize: 5})
			var wg sync.WaitGroup
			for n := range putters {
				wg.Go(func() {
					for i := range each {
						s.insist(t, func(tx *sql.Tx) error {
							_, err := j.Put(t.Context(), tx, outbox.Message{Key: fmt.Sprintf("%d-%d", n, i)})
							if err == nil {
								_, err = j.Put(t.Context(), tx, outbox.Message{Key: fmt.Sprintf("grouped %d-%d", n, i), Group: fmt.Sprint(i % 3)})
							}
							return err
						})
					}
				})
			}
			wg.Wait()
			eventually(t, "all to be sent and settled", func() bool { return s.unfinished() == 0 })
			stop()
			require.Len(t, r.all(), 2*putters*each)
			require.Len(t, r.times(), 2*putters*each, "each once")
			require.Empty(t, book.noise())
		})
	}
}

// TestFieldEveryQueryOfMessagesReadsNothingOneAndMany is field case S61.
func TestFieldEveryQueryOfMessagesReadsNothingOneAndMany(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		j := s.journal("mail")
		ch := messageChannel("mail")
		stats := func() outbox.ChannelStats {
			all, err := s.store.Stats(t.Context())
			require.NoError(t, err)
			all = slices.DeleteFunc(all, func(c outbox.ChannelStats) bool { return c.Channel != ch })
			require.LessOrEqual(t, len(all), 1)
			return append(all, outbox.ChannelStats{Channel: ch})[0]
		}
		for _, n := range []int{0, 1, 30} {
			s.put(j, letters("k", n, 0)...)
			clock.Advance(3 * time.Second)
			want := outbox.ChannelStats{Channel: ch, Due: n}
			if n > 0 {
				want.OldestDue = 3 * time.Second
			}
			require.Equal(t, want, stats())
			looks, err := s.store.Look(t.Context(), []outbox.Channel{ch})
			require.NoError(t, err)
			require.Equal(t, n > 0, looks[0].Wait == 0)
			rs, next, err := j.List(t.Context(), outbox.Filter{All: true, Payload: true})
			require.NoError(t, err)
			require.Len(t, rs, n)
			require.Empty(t, next)
			_, err = j.Get(t.Context(), "none")
			require.ErrorIs(t, err, outbox.ErrNotFound)
			claimed, err := j.ClaimDue(t.Context(), 100, time.Minute)
			require.NoError(t, err)
			require.Len(t, claimed, n)
			require.Equal(t, n, stats().InFlight)
			for i, r := range claimed {
				err := []error{outbox.Permanent(errDown), outbox.Unknown(errDown), outbox.RetryAfter(time.Hour, errDown)}[i%3]
				require.NoError(t, j.MarkFailed(t.Context(), r.Lease, err))
			}
			got := stats()
			require.Equal(t, []int{(n + 2) / 3, (n + 1) / 3, n / 3}, []int{got.Dead, got.Unknown, got.Scheduled})
			for _, verb := range []func(context.Context, outbox.Filter) (int64, error){j.Retry, j.Discard} {
				done, err := verb(t.Context(), outbox.Filter{All: true})
				require.NoError(t, err)
				require.EqualValues(t, n, done)
			}
			purged, err := j.Purge(t.Context(), clock.Now().Add(time.Hour))
			require.NoError(t, err)
			require.Zero(t, purged)
			require.Empty(t, s.records(j))
		}
	})
}

// TestFieldWriteAheadLogStaysBoundedBelowMessages is field case S77.
func TestFieldWriteAheadLogStaysBoundedBelowMessages(t *testing.T) {
	const rounds, each, limit = 100 / raceFactor / raceFactor, 50, 15 << 20
	s := onSQLite(t)
	j := s.journal("mail")
	stop := s.senders(1, new(logbook), "mail", func(context.Context, *outbox.Record) (string, error) {
		time.Sleep(100 * time.Microsecond)
		return "", nil
	}, outbox.SendOptions{Retention: outbox.DeleteOnSent})
	payload := []byte(strings.Repeat("v", 16_000))
	highest := int64(0)
	for round := range rounds {
		ms := letters(fmt.Sprint(round, " "), each, 5*(round%2))
		for i := range ms {
			ms[i].Payload = payload
		}
		s.put(j, ms...)
		_, _, err := j.List(t.Context(), outbox.Filter{All: true, Limit: 1000, Payload: true})
		require.NoError(t, err)
		wal, err := os.Stat(s.file() + "-wal")
		require.NoError(t, err)
		highest = max(highest, wal.Size())
	}
	eventually(t, "all to be sent", func() bool { return s.unfinished() == 0 })
	stop()
	require.Less(t, highest, int64(limit), "of %d bytes of payloads alone, each written, claimed and deleted", rounds*each*len(payload))
}
