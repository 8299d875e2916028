package integration

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

var errConnection = errors.New("connection refused")

// TestG8HourOfUnavailableSpendsNobodysAttempts: by the store's clock, a fleet of
// three asks with one message at pauses that grow, and nothing is dead after it.
func TestG8HourOfUnavailableSpendsNobodysAttempts(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const step = 5 * time.Second
		clock := s.onClock()
		j := s.journal("mail")
		ms := append(letters("plain", 40, 0), letters("grouped", 40, 8)...)
		s.put(j, ms...)
		var up atomic.Bool
		var mu sync.Mutex
		var calls []time.Time
		var r receiver
		send := func(ctx context.Context, m *outbox.Record) (string, error) {
			if up.Load() {
				return r.send(ctx, m)
			}
			mu.Lock()
			defer mu.Unlock()
			calls = append(calls, clock.Now())
			return "", outbox.Unavailable(errConnection)
		}
		var fleet []*outbox.Relay
		for range 3 {
			other := journalOn(t, s.newStore(sqlstore.Options{Clock: clock.Now}), "mail")
			relay, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, other.Sender(send, outbox.SendOptions{MaxAttempts: 2}))
			require.NoError(t, err)
			fleet = append(fleet, relay)
		}
		round := func() {
			t.Helper()
			for _, relay := range fleet {
				_, err := relay.RunOnce(t.Context())
				require.NoError(t, err)
			}
		}
		began := clock.Now()
		for clock.Now().Sub(began) < time.Hour {
			round()
			clock.Advance(step)
		}
		require.Zero(t, s.count(`SELECT count(*) FROM {t:messages} WHERE attempt > 0 OR outcome > 0`), "an attempt was spent")
		require.Contains(t, s.get(j, ms[0].Key).LastError+s.get(j, ms[40].Key).LastError, "connection refused")
		first := 0
		for first < len(calls) && calls[first].Equal(calls[0]) {
			first++ // those that found it down
		}
		require.LessOrEqual(t, first, 8+1, "one batch has workers that were all told")
		probes := calls[first:]
		require.Greater(t, len(probes), 10, "an outage is probed")
		require.Less(t, len(probes), 25, "at most every five minutes in the end")
		for i := 1; i < len(probes); i++ {
			require.False(t, probes[i].Equal(probes[i-1]), "two probes at a time")
		}
		require.Greater(t, probes[len(probes)-1].Sub(probes[len(probes)-2]), 4*time.Minute)

		up.Store(true)
		for range 200 {
			if s.unfinished() == 0 {
				break
			}
			round()
			clock.Advance(step)
		}
		require.Equal(t, each(1, keysOf(ms)...), r.times())
		for _, m := range r.all() {
			require.Equal(t, 1, m.attempt)
		}
	})
}

// TestG8RecoveryFromAnOutageIsNoStampede: after the probe that got through,
// claims grow from one message, in each relay.
func TestG8RecoveryFromAnOutageIsNoStampede(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s *site) {
		const relays = 3
		j := s.journal("mail")
		ms := append(letters("plain", 150, 0), letters("grouped", 150, 30)...)
		s.put(j, ms...)
		var up atomic.Bool
		var failed atomic.Int32
		var r receiver
		send := func(ctx context.Context, m *outbox.Record) (string, error) {
			if !up.Load() {
				failed.Add(1)
				return "", outbox.Unavailable(errConnection)
			}
			time.Sleep(2 * time.Millisecond)
			return r.send(ctx, m)
		}
		books := make([]*logbook, relays)
		for n := range relays {
			books[n] = new(logbook)
			s.run(books[n].options(), journalOn(t, s.newStore(sqlstore.Options{}), "mail").Sender(send, outbox.SendOptions{}))
		}
		eventually(t, "the outage", func() bool {
			n := 0
			for _, book := range books {
				n += book.count(outbox.EventOutage)
			}
			return n > 0
		})
		time.Sleep(400 * time.Millisecond) // for the batches that were out when it was told
		before := failed.Load()
		eventually(t, "a probe", func() bool { return failed.Load() > before })
		time.Sleep(100 * time.Millisecond)
		require.Zero(t, s.count(`SELECT max(attempt) FROM {t:messages}`), "an attempt was spent")
		seen := make([]int, relays)
		for n, book := range books {
			seen[n] = len(book.of(outbox.EventClaim))
		}
		up.Store(true)
		eventually(t, "all to be sent", func() bool { return s.unfinished() == 0 })
		require.LessOrEqual(t, failed.Load()-before, int32(2), "probes that failed")
		for n, book := range books {
			allowed := 1
			for _, e := range book.of(outbox.EventClaim)[seen[n]:] {
				require.LessOrEqual(t, e.Rows, allowed, "relay %d", n)
				if e.Rows > 0 {
					allowed *= 2
				}
			}
		}
		require.Equal(t, each(1, keysOf(ms)...), r.times())
		for _, m := range r.all() {
			require.Equal(t, 1, m.attempt)
		}
	})
}

// TestOperatorsPauseAndResumeAJournalInEveryReplica.
func TestOperatorsPauseAndResumeAJournalInEveryReplica(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		var r receiver
		stop := s.senders(3, new(logbook), "mail", r.send, outbox.SendOptions{})
		operator := s.newStore(sqlstore.Options{})
		j := s.journal("mail")
		pause := func(d time.Duration, reason string) {
			t.Helper()
			require.NoError(t, operator.Pause(t.Context(), "mail", d, reason))
		}
		pause(time.Hour, "maintenance")
		s.put(j, letters("k", 100, 0)...)
		s.put(j, letters("g", 100, 9)...)
		s.store.Wake()
		time.Sleep(300 * time.Millisecond)
		require.Zero(t, r.len())
		rs, err := j.ClaimDue(t.Context(), 10, time.Minute)
		require.NoError(t, err)
		require.Empty(t, rs, "a paused channel gives none")
		stats, err := operator.Stats(t.Context())
		require.NoError(t, err)
		last := stats[len(stats)-1] // of the journal; a pause is of the name
		require.Equal(t, messageChannel("mail"), last.Channel)
		require.Equal(t, "maintenance", last.Reason)
		pause(200*time.Millisecond, "shorter")
		eventually(t, "the pause to end by itself", func() bool { return s.unfinished() == 0 })
		pause(time.Hour, "again")
		s.put(j, outbox.Message{Key: "last"})
		pause(0, "")
		eventually(t, "the resume", func() bool { return s.unfinished() == 0 })
		stop()
		require.Len(t, r.times(), 201)
		require.Equal(t, 201, r.len())
	})
}

// TestG5DestinationThatHangsIsNotMultiplied: sends that ignore their cancelled
// context keep their workers; their messages wait, and Park keeps them.
func TestG5DestinationThatHangsIsNotMultiplied(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s *site) {
		for _, p := range []policy{resend, park} {
			j := s.journal(string(p))
			release := make(chan struct{})
			var calls atomic.Int32
			so := p.options(inbox{})
			so.Workers, so.AttemptTimeout, so.Lease, so.Backoff = 2, 50*time.Millisecond, 500*time.Millisecond, constant(50*time.Millisecond)
			var r receiver
			book := new(logbook)
			stop := s.run(book.options(), j.Sender(func(ctx context.Context, m *outbox.Record) (string, error) {
				if m.Key == "hangs" {
					calls.Add(1)
					<-release
				}
				return r.send(ctx, m)
			}, so))
			s.post(j, "hangs")
			eventually(t, "it to hang", func() bool { return book.count(outbox.EventHung) == 1 })
			for n := range 10 {
				s.post(j, fmt.Sprint("good", n))
			}
			eventually(t, "the others", func() bool { return r.len() == 10 })
			time.Sleep(600 * time.Millisecond)
			require.EqualValues(t, 1, calls.Load(), "sent again while it is being sent")
			state := s.get(j, "hangs").State
			require.Equal(t, map[policy]bool{resend: false, park: true}[p], state == outbox.StateUnknown, "%s", state)
			close(release)
			eventually(t, "it to return", func() bool { return book.count(outbox.EventReturned) == 1 })
			eventually(t, "all to end", func() bool { return s.unfinished() == 0 })
			require.NoError(t, stop())
		}
	})
}
