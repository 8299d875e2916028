package integration

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// TestG1SentCommitsWithItsEffects: a verb inside a transaction is part of it,
// and is undone with it.
func TestG1SentCommitsWithItsEffects(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		for _, group := range []string{"", "g"} {
			s.wipe()
			s.put(j, outbox.Message{Key: "k", Group: group}, outbox.Message{Key: "next", Group: group, Delay: time.Hour})
			r, err := j.Begin(t.Context(), "k", time.Minute)
			require.NoError(t, err)
			before := s.messages()
			effect := func(commit bool) {
				tx := s.begin()
				_, err := tx.Exec(`INSERT INTO app VALUES ($1, 'effect')`, "k"+group)
				require.NoError(t, err)
				in := j.In(outbox.SQL(tx))
				require.NoError(t, in.MarkSent(t.Context(), r.Lease, "ref"))
				got, err := in.Get(t.Context(), "k")
				require.NoError(t, err)
				require.Equal(t, outbox.StateSent, got.State)
				if commit {
					require.NoError(t, tx.Commit())
					return
				}
				require.NoError(t, tx.Rollback())
			}
			effect(false)
			require.Equal(t, before, s.messages(), "undone with its effects")
			require.Zero(t, s.count(`SELECT count(*) FROM app WHERE id = $1`, "k"+group))
			effect(true)
			require.Equal(t, map[string]outbox.State{"k": outbox.StateSent, "next": outbox.StatePending}, s.states(j))
			require.Equal(t, 1, s.count(`SELECT count(*) FROM app WHERE id = $1`, "k"+group))
			_, err = j.Begin(t.Context(), "next", time.Minute)
			require.NoError(t, err, "the group was let go")
		}
	})
}

// TestG1EveryVerbRollsBack with the caller's transaction, all together.
func TestG1EveryVerbRollsBack(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		s.put(j, append(letters("k", 6, 2), letters("plain", 3, 0)...)...)
		s.finish("mail", outbox.OutcomeDead, 0, s.take("mail", 2, time.Minute)...)
		before := s.messages()
		for round := range 3 {
			tx := s.begin()
			everyVerb(t, j, tx, fmt.Sprint("new ", round))
			require.NoError(t, tx.Rollback())
			require.Equal(t, before, s.messages())
		}
	})
}

// TestG8SendThatSettlesItselfIsNotSettledAgain: the effects of a send and its
// record are one transaction; if that fails the message is sent again.
func TestG8SendThatSettlesItselfIsNotSettledAgain(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		ms := append(letters("plain", 5, 0), letters("grouped", 5, 1)...)
		s.put(j, ms...)
		tries := map[string]int{}
		send := func(ctx context.Context, m *outbox.Record) (string, error) {
			tries[m.Key]++
			err := s.store.Transact(ctx, nil, func(tx *sql.Tx) error {
				_, err := tx.Exec(`INSERT INTO app VALUES ($1, 'effect')`, m.Key)
				if err == nil {
					err = j.In(outbox.SQL(tx)).MarkSent(ctx, m.Lease, "own ref")
				}
				if tries[m.Key] == 1 {
					err = errors.Join(err, errDown)
				}
				return err
			})
			if err != nil {
				return "", err
			}
			return "", outbox.ErrSettled
		}
		r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, j.Sender(send, outbox.SendOptions{Workers: 1, Backoff: constant(time.Millisecond)}))
		require.NoError(t, err)
		for n := 0; s.unfinished() > 0; n++ {
			require.Less(t, n, 50)
			_, err := r.RunOnce(t.Context())
			require.NoError(t, err)
			time.Sleep(2 * time.Millisecond)
		}
		require.Equal(t, each(2, keysOf(ms)...), tries)
		require.Equal(t, len(ms), s.count(`SELECT count(*) FROM app`))
		for _, rec := range s.records(j) {
			require.Equal(t, "own ref", rec.Ref)
			require.Equal(t, 2, rec.Attempt)
		}
		require.Zero(t, s.count(`SELECT count(*) FROM {t:groups}`))
	})
}

// putBegun commits a message that is the caller's to send.
func (s *site) putBegun(j *outbox.Journal, m outbox.Message, lease time.Duration) outbox.Record {
	s.t.Helper()
	tx := s.begin()
	res, err := j.PutBegun(context.Background(), tx, m, lease)
	require.NoError(s.t, err)
	require.True(s.t, res.Created)
	require.NoError(s.t, tx.Commit())
	return res.Record
}

// TestDeliverSendsAndSettlesAsARelayWould, while relays leave the message alone.
func TestDeliverSendsAndSettlesAsARelayWould(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		var relayed receiver
		stop := s.senders(2, new(logbook), "mail", relayed.send, outbox.SendOptions{Order: outbox.Skip})
		o := outbox.SendOptions{Lease: 500 * time.Millisecond, Backoff: constant(time.Hour)}
		for _, c := range []struct {
			name  string
			end   error
			state outbox.State
		}{
			{"sent", nil, outbox.StateSent}, {"refused", outbox.Permanent(errDown), outbox.StateDead},
			{"failed", errDown, outbox.StateFailed}, {"deferred", outbox.Defer(time.Hour), outbox.StatePending},
		} {
			for _, group := range []string{"", "of its own "} {
				key := group + c.name
				if group != "" {
					group = key
				}
				var own receiver
				rec := s.putBegun(j, outbox.Message{Key: key, Group: group, Payload: []byte("text")}, time.Second)
				settled, err := j.Deliver(t.Context(), rec, func(ctx context.Context, m *outbox.Record) (string, error) {
					require.Equal(t, "text", string(m.Payload))
					if c.end == nil {
						time.Sleep(1200 * time.Millisecond) // longer than both leases
					}
					_, _ = own.send(ctx, m)
					return "ref of " + m.Key, c.end
				}, o)
				require.ErrorIs(t, err, c.end, key)
				require.Equal(t, 1, own.len())
				require.Equal(t, c.state, settled.State, key)
				require.Equal(t, c.state, s.get(j, key).State, key)
				_, err = j.Deliver(t.Context(), settled, own.send, o)
				require.ErrorIs(t, err, outbox.ErrState, "its lease is used up")
				_, err = j.Deliver(t.Context(), rec, own.send, o)
				require.ErrorIs(t, err, outbox.ErrLeaseLost, key)
				require.Equal(t, 1, own.len())
			}
		}
		stop()
		require.Empty(t, relayed.keys(), "a relay sent what was being sent")
	})
}

// TestG7RelayIsTheSafetyNetOfAMessageBegunByItsPutter who never sends it, or too
// late: one of the two sends it.
func TestG7RelayIsTheSafetyNetOfAMessageBegunByItsPutter(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		var r receiver
		stop := s.senders(2, new(logbook), "mail", r.send, outbox.SendOptions{})
		for _, group := range []string{"", "g"} {
			rec := s.putBegun(j, outbox.Message{Key: "k" + group, Group: group}, 300*time.Millisecond)
			s.put(j, outbox.Message{Key: "behind it" + group, Group: group})
			eventually(t, "the relay to send it", func() bool { return s.get(j, rec.Key).State == outbox.StateSent })
			var own receiver
			_, err := j.Deliver(t.Context(), rec, own.send, outbox.SendOptions{})
			require.ErrorIs(t, err, outbox.ErrLeaseLost)
			require.Zero(t, own.len(), "sent although its lease was lost")
			eventually(t, "the next one", func() bool { return r.times()["behind it"+group] == 1 })
		}
		stop()
		require.Equal(t, each(1, "k", "behind it", "kg", "behind itg"), r.times())
		for _, m := range r.all() {
			require.Equal(t, m.key == "k" || m.key == "kg", m.ambiguous, m.key)
			require.Equal(t, 1, m.attempt)
		}
	})
}

// TestG1PutBegunThatIsRolledBackSendsNothing: nor is its key taken.
func TestG1PutBegunThatIsRolledBackSendsNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		tx := s.begin()
		res, err := j.PutBegun(t.Context(), tx, outbox.Message{Key: "k", Group: "g"}, time.Minute)
		require.NoError(t, err)
		require.NoError(t, tx.Rollback())
		var own receiver
		_, err = j.Deliver(t.Context(), res.Record, own.send, outbox.SendOptions{})
		require.ErrorIs(t, err, outbox.ErrLeaseLost)
		require.Zero(t, own.len())
		require.Empty(t, s.messages())
	})
}
