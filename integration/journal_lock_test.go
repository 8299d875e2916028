package integration

import (
	"context"
	"database/sql"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// impatient opens a store whose statements fail rather than wait for a lock.
func (s *site) impatient(t *testing.T) *sqlstore.Store {
	t.Helper()
	other := *s
	other.dsn = withParameter(t, s.dsn, "lock_timeout", "50ms")
	return other.newStore(sqlstore.Options{})
}

// TestG9NoTransactionIsOpenWhileAMessageIsBeingSent: on Postgres no session of
// the relay is in one; on SQLite the write lock is free.
func TestG9NoTransactionIsOpenWhileAMessageIsBeingSent(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		var sends atomic.Int32
		send := func(context.Context, *outbox.Record) (string, error) {
			sends.Add(1)
			if s.postgres() {
				// Others of its statements may run at this moment: none stays.
				held := func() int {
					return s.count(`SELECT count(*) FROM pg_stat_activity
						WHERE application_name = 'sender under test' AND state LIKE 'idle in transaction%'`)
				}
				for n := 0; held() > 0; n++ {
					require.Less(t, n, 50, "a transaction stays open")
					time.Sleep(time.Millisecond)
				}
				return "", nil
			}
			began := time.Now()
			tx, err := s.db.BeginTx(context.Background(), nil) // _txlock=immediate
			require.NoError(t, err)
			require.NoError(t, tx.Rollback())
			require.Less(t, time.Since(began), 2*time.Second)
			return "", nil
		}
		store := s.store
		if s.postgres() {
			store = s.named("sender under test")
		}
		relayed := journalOn(t, store, "mail")
		stop := s.run(new(logbook).options(), relayed.Sender(send, outbox.SendOptions{Workers: 2}))
		ms := append(letters("plain", 20, 0), letters("grouped", 20, 4)...)
		s.put(s.journal("mail"), ms...)
		eventually(t, "all to be sent", func() bool { return s.unfinished() == 0 })
		require.NoError(t, stop())
		require.EqualValues(t, 40, sends.Load())
	})
}

// TestG9NoJournalStatementOfARelayWaitsForARow: an operator holds messages and
// groups in a long transaction, and everything returns at once: what is held is
// busy or passed over, the rest is done.
func TestG9NoJournalStatementOfARelayWaitsForARow(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		store := s.impatient(t)
		j, ch := journalOn(t, store, "mail"), messageChannel("mail")
		holds := map[string]string{
			"a message": `SELECT key FROM {t:messages} WHERE key = 'k0000002' FOR UPDATE`,
			"its group": `SELECT grp FROM {t:groups} WHERE grp = 'group 2' FOR UPDATE`,
			"all":       `SELECT m.key FROM {t:messages} AS m CROSS JOIN {t:groups} AS g WHERE m.key <> 'free' FOR UPDATE`,
		}
		for what, hold := range holds {
			for _, outcome := range messageOutcomes {
				s.put(s.journal("mail"), letters("k", 5, 5)...)
				s.put(s.journal("mail"), outbox.Message{Key: "free"})
				held := s.take("mail", 10, time.Minute)
				require.Len(t, held, 6)
				s.put(s.journal("mail"), letters("more", 5, 5)...)
				holder := s.begin()
				_, err := holder.Exec(s.dialect.Render(hold))
				require.NoError(t, err)

				name := fmt.Sprint(what, ", outcome ", outcome)
				_, err = store.ClaimMessages(t.Context(), nil, outbox.Claim{Channel: "mail", Limit: 10, Lease: time.Minute, Full: true})
				require.NoError(t, err, name)
				_, err = store.Look(t.Context(), []outbox.Channel{ch})
				require.NoError(t, err, name)
				_, err = store.Stats(t.Context())
				require.NoError(t, err, name)
				extended, err := store.Extend(t.Context(), ch, held, time.Minute)
				require.NoError(t, err, name)
				began := time.Now()
				settled, err := store.Settle(t.Context(), ch, endings(outcome, time.Hour, held))
				require.NoError(t, err, name)
				require.Less(t, time.Since(began), 2*time.Second, name)
				for i, r := range held {
					busy := what == "all" && r.Key != "free" || r.Key == "k0000002"
					require.Equal(t, busy, settled[i] == outbox.ResultBusy, "%s, %s: %d", name, r.Key, settled[i])
					require.Equal(t, busy && what != "its group", extended[i] == outbox.ResultBusy, "%s, %s: %d", name, r.Key, extended[i])
				}
				_, err = store.PurgeMessages(t.Context(), "mail", outbox.Purge{States: []outbox.State{outbox.StateSent}, Before: time.Now().Add(time.Hour), Limit: 100})
				require.NoError(t, err, name)
				_, err = j.Begin(t.Context(), "more0000002", time.Minute)
				require.Error(t, err)
				require.NotContains(t, err.Error(), "lock timeout", name)
				_, err = j.Retry(t.Context(), outbox.Filter{All: true})
				require.NoError(t, err, name)
				_, err = j.Discard(t.Context(), outbox.Filter{All: true})
				require.NoError(t, err, name)
				require.NoError(t, holder.Commit())
				s.wipe()
			}
		}
	})
}

// TestG9RelayPassesByWhatIsHeld: what is not held goes out at once, what is goes
// out soon after, and what was being sent is settled then, not sent again.
func TestG9RelayPassesByWhatIsHeld(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		ms := append(letters("plain", 5, 0), letters("grouped", 6, 3)...)
		s.put(j, ms...)
		var r receiver
		taken, release := make(chan struct{}), make(chan struct{})
		book := new(logbook)
		stop := s.run(book.options(), journalOn(t, s.impatient(t), "mail").Sender(func(ctx context.Context, m *outbox.Record) (string, error) {
			if m.Key == "plain0000000" {
				close(taken)
				<-release
			}
			return r.send(ctx, m)
		}, outbox.SendOptions{}))
		<-taken
		holder := s.begin() // what is being sent, what waits, and a group
		_, err := holder.Exec(s.dialect.Render(`UPDATE {t:messages} SET last_error = last_error WHERE key = 'plain0000000'`))
		require.NoError(t, err)
		s.put(j, outbox.Message{Key: "later"}, outbox.Message{Key: "of a group", Group: "group 0"})
		_, err = holder.Exec(s.dialect.Render(`SELECT grp FROM {t:groups} FOR UPDATE`))
		require.NoError(t, err)
		close(release)
		eventually(t, "the others", func() bool { return len(without(r.times(), "of a group")) >= 12 })
		time.Sleep(500 * time.Millisecond)
		require.Equal(t, outbox.StateSending, s.get(j, "plain0000000").State)
		require.NoError(t, holder.Commit())
		eventually(t, "all to be settled", func() bool { return s.unfinished() == 0 })
		require.NoError(t, stop())
		require.Equal(t, each(1, append(keysOf(ms), "later", "of a group")...), r.times())
		for _, e := range book.of(outbox.EventTrouble) {
			require.NotContains(t, e.Err.Error(), "lock timeout")
		}
	})
}

// TestG9PutsAndRelaysDoNotDeadlock: the same groups and keys in random order,
// with relays settling them, operators retrying and purging meanwhile.
func TestG9PutsAndRelaysDoNotDeadlock(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		const writers, rounds = 4, 60
		j := s.journal("mail")
		book := new(logbook)
		for range 2 {
			s.run(book.options(), journalOn(t, s.impatient(t), "mail").Sender(func(context.Context, *outbox.Record) (string, error) {
				return "", []error{nil, nil, errDown, outbox.Permanent(errDown)}[upTo(4)]
			}, outbox.SendOptions{Backoff: constant(time.Millisecond), Order: outbox.Skip}))
		}
		ctx, stop := context.WithCancel(t.Context())
		operated := make(chan error, 1)
		go func() {
			for ctx.Err() == nil {
				_, err := j.Retry(context.Background(), outbox.Filter{States: []outbox.State{outbox.StateDead}})
				if err == nil {
					_, err = j.Purge(context.Background(), time.Now())
				}
				if err != nil {
					operated <- err
					return
				}
				time.Sleep(5 * time.Millisecond)
			}
			operated <- nil
		}()
		failed := make(chan error, writers)
		for range writers {
			go func() {
				for range rounds {
					ms := letters("k", 40, 5)
					for i := range ms { // in a random order
						k := int(upTo(time.Duration(i + 1)))
						ms[i], ms[k] = ms[k], ms[i]
					}
					if _, err := s.putAt(sql.LevelReadCommitted, j, ms, true); err != nil {
						failed <- err
						return
					}
				}
				failed <- nil
			}()
		}
		for range writers {
			require.NoError(t, <-failed)
		}
		stop()
		require.NoError(t, <-operated)
		for _, e := range book.of(outbox.EventTrouble) {
			require.False(t, strings.Contains(e.Err.Error(), "lock timeout") || strings.Contains(e.Err.Error(), "deadlock"), "%v", e.Err)
		}
	})
}
