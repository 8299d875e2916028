package integration

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// queue is what was committed into groups, in the order of the commits. A
// putter takes its turn while it holds the group, which it does from Put to the
// end of its transaction, so turns are in that order.
type queue struct {
	turns  atomic.Int64
	mu     sync.Mutex
	groups map[string][]queued
}

type queued struct{ turn, seq int64 }

func newQueue() *queue { return &queue{groups: map[string][]queued{}} }

func (q *queue) committed(rs []outbox.PutResult, turn int64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for _, r := range rs {
		q.groups[r.Group] = append(q.groups[r.Group], queued{turn, r.Seq})
	}
}

// order returns the numbers of each group's messages as they were committed.
func (q *queue) order(t *testing.T) map[string][]int64 {
	t.Helper()
	order := map[string][]int64{}
	for group, list := range q.groups {
		slices.SortStableFunc(list, func(a, b queued) int { return int(a.turn - b.turn) })
		for _, m := range list {
			order[group] = append(order[group], m.seq)
		}
		require.True(t, slices.IsSorted(order[group]), "numbers of %s do not grow in the order of the commits: %v", group, list)
	}
	return order
}

// counter receives the messages of groups, and notes what must not happen:
// two runs of a group at a time, and a message before an earlier one.
type counter struct {
	mu       sync.Mutex
	out      map[string]int
	accepted map[string][]int64
	wrong    []string
}

func newCounter() *counter { return &counter{out: map[string]int{}, accepted: map[string][]int64{}} }

func (c *counter) enter(m *outbox.Record) (leave func()) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.out[m.Group]++; c.out[m.Group] > 1 {
		c.wrong = append(c.wrong, "two calls at a time in "+m.Group)
	}
	return func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.out[m.Group]--
	}
}

func (c *counter) accept(m *outbox.Record) {
	c.mu.Lock()
	defer c.mu.Unlock()
	list := c.accepted[m.Group]
	switch n := len(list); {
	case n > 0 && list[n-1] == m.Seq: // again, where its lease was lost
	case n > 0 && list[n-1] > m.Seq:
		c.wrong = append(c.wrong, fmt.Sprintf("%d of %s after %d", m.Seq, m.Group, list[n-1]))
	default:
		c.accepted[m.Group] = append(list, m.Seq)
	}
}

// moody is how a call goes when anything may happen.
func moody(ctx context.Context) error {
	switch rand.N(24) {
	case 0:
		return errDown
	case 1:
		return outbox.Defer(3 * time.Millisecond)
	case 2:
		return outbox.RetryAfter(5*time.Millisecond, errDown)
	case 3:
		panic("in the middle of it")
	case 4:
		runtime.Goexit()
	case 5:
		<-ctx.Done() // past the AttemptTimeout
		return ctx.Err()
	case 6:
		return outbox.Unknown(errDown)
	}
	time.Sleep(upTo(2 * time.Millisecond))
	return nil
}

func (c *counter) send(ctx context.Context, m *outbox.Record) (string, error) {
	defer c.enter(m)()
	err := moody(ctx)
	if err == nil {
		c.accept(m)
	}
	return "", err
}

// sendAll goes through a batch in its order, and past no message that failed.
func (c *counter) sendAll(ctx context.Context, batch []*outbox.Delivery) error {
	failed := map[string]bool{}
	for _, d := range batch {
		if failed[d.Group] {
			continue
		}
		switch leave := c.enter(&d.Record); rand.N(10) {
		case 0:
			d.Fail(errDown)
			failed[d.Group] = true
			leave()
		default:
			c.accept(&d.Record)
			d.Sent("")
			leave()
		}
	}
	return nil
}

// TestG5GroupsAreSentInTheOrderOfTheCommits: many writers put into few groups,
// alone and in bulk, at every isolation level, stall, commit and roll back;
// relays of both kinds send with failures of every kind.
func TestG5GroupsAreSentInTheOrderOfTheCommits(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const writers, puts, groups = 5, 40, 4
		q, c := newQueue(), newCounter()
		o := outbox.SendOptions{
			MaxAttempts: outbox.NoLimit, Backoff: constant(3 * time.Millisecond), AttemptTimeout: 30 * time.Millisecond,
			Lease: 2 * time.Second, BatchSize: 7, Retention: outbox.DeleteOnSent,
		}
		relay := outbox.RelayOptions{PollInterval: 20 * time.Millisecond, Logger: quiet}
		for n := range 3 {
			other := journalOn(t, s.newStore(sqlstore.Options{}), "mail")
			if n == 0 {
				s.run(relay, other.BatchSender(c.sendAll, o))
				continue
			}
			s.run(relay, other.Sender(c.send, o))
		}
		j := s.journal("mail")
		var writing sync.WaitGroup
		for w := range writers {
			writing.Go(func() {
				for n := range puts {
					if err := s.enqueue(j, q, fmt.Sprintf("%d.%d", w, n), w, groups); err != nil && !s.store.Retryable(err) {
						t.Errorf("writer %d: %v", w, err)
						return
					}
				}
			})
		}
		writing.Wait()
		eventually(t, "all to be sent", func() bool { return s.unfinished() == 0 })
		require.Equal(t, q.order(t), c.accepted)
		require.Empty(t, c.wrong)
		eventually(t, "the groups to be gone", func() bool { return s.count(`SELECT count(*) FROM {t:groups}`) == 0 })
	})
}

// enqueue puts a few messages in one transaction, in one of the ways that
// callers do.
func (s *site) enqueue(j *outbox.Journal, q *queue, prefix string, writer, groups int) error {
	ctx := context.Background()
	level := sql.LevelDefault
	if s.postgres() {
		level = []sql.IsolationLevel{sql.LevelReadCommitted, sql.LevelReadCommitted, sql.LevelReadCommitted, sql.LevelRepeatableRead, sql.LevelSerializable}[writer%5]
	}
	tx, err := s.db.BeginTx(ctx, &sql.TxOptions{Isolation: level})
	if err != nil {
		return err
	}
	defer tx.Rollback()
	ms := make([]outbox.Message, 1+rand.N(3))
	for i := range ms {
		ms[i] = outbox.Message{Key: fmt.Sprint(prefix, ".", i), Group: fmt.Sprint("group ", rand.N(groups))}
	}
	if writer%2 == 0 {
		ms = ms[:1]
	}
	rs, err := j.PutMany(ctx, tx, ms)
	if err != nil {
		return err
	}
	turn := q.turns.Add(1) // while the groups are ours
	if rand.N(3) == 0 {
		time.Sleep(upTo(15 * time.Millisecond))
	}
	if rand.N(5) == 0 {
		return nil // rolled back
	}
	if err := tx.Commit(); err != nil {
		return err
	}
	q.committed(rs, turn)
	return nil
}

// TestG5PutRacesTheSettlementOfItsGroup: whatever comes first, the follower is
// found at once by the next claim.
func TestG5PutRacesTheSettlementOfItsGroup(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const groups, rounds = 15, 20
		j := s.journal("mail")
		ch := []outbox.Channel{messageChannel("mail")}
		for round := range rounds {
			s.put(j, letters(fmt.Sprint(round, " head "), groups, groups)...)
			held := s.take("mail", 100, time.Hour)
			require.Len(t, held, groups)
			ss := endings(messageOutcomes[round%3], time.Hour, held)
			if round%3 == 0 {
				for i := range ss {
					ss[i].Keep = round%2 == 0
				}
			}
			follow := func(from, to int) func() {
				return func() {
					for _, m := range letters(fmt.Sprint(round, " follower "), groups, groups)[from:to] {
						if _, err := s.putAt(sql.LevelDefault, j, []outbox.Message{m}, true); err != nil && !s.store.Retryable(err) {
							t.Errorf("put: %v", err)
						}
					}
				}
			}
			race(func() { s.settleUntilFree(ss) }, follow(0, groups/2), follow(groups/2, groups))
			want := rowKeys(nil)
			if round%3 == 0 { // sent: the followers are first
				looks, err := s.store.Look(t.Context(), ch)
				require.NoError(t, err)
				require.Zero(t, looks[0].Wait, "nobody would look")
				want = keysOf(letters(fmt.Sprint(round, " follower "), groups, groups))
			} else { // behind one that is due in an hour, none goes out
				require.Empty(t, s.take("mail", 100, time.Hour))
				n, err := j.Discard(t.Context(), outbox.Filter{All: true, Group: "group 0"})
				require.NoError(t, err)
				require.EqualValues(t, 2, n)
			}
			require.ElementsMatch(t, want, rowKeys(s.take("mail", 100, time.Hour)), "a follower is stranded: %q", s.messages())
			s.wipe()
		}
	})
}

// TestG5PutThatHoldsItsGroupKeepsNobody: messages of the group are settled
// though it is locked, its follower goes out as soon as its transaction has
// committed, and a relay that dies meanwhile delays it by its lease.
func TestG5PutThatHoldsItsGroupKeepsNobody(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		j := s.journal("mail")
		for _, dies := range []bool{false, true} {
			s.put(j, outbox.Message{Key: "head", Group: "g"}, outbox.Message{Key: "other", Group: "another"}, outbox.Message{Key: "plain"})
			held := s.take("mail", 10, time.Minute)
			require.Len(t, held, 3)
			tx := s.begin()
			_, err := j.Put(t.Context(), tx, outbox.Message{Key: "follower", Group: "g"})
			require.NoError(t, err)
			ss := endings(outbox.OutcomeDone, 0, held)
			results, err := s.store.Settle(t.Context(), messageChannel("mail"), ss)
			require.NoError(t, err)
			for i, r := range results {
				want := outbox.ResultDone
				if held[i].Key == "head" {
					want = outbox.ResultBusy
				}
				require.Equal(t, want, r, held[i].Key)
			}
			require.Equal(t, all(outbox.StateSent, "head", "other", "plain"), s.states(j), "busy is the group only")
			require.NoError(t, tx.Commit())
			if dies {
				require.Empty(t, s.take("mail", 10, time.Minute))
				clock.Advance(time.Minute)
			} else {
				ss[0].Again, ss[1].Again, ss[2].Again = true, true, true
				results, err = s.store.Settle(t.Context(), messageChannel("mail"), ss)
				require.NoError(t, err)
				require.Equal(t, allOf(outbox.ResultDone, 3), results)
			}
			rows := s.take("mail", 10, time.Minute)
			require.Equal(t, []string{"follower"}, rowKeys(rows))
			require.False(t, rows[0].Ambiguous)
			require.Equal(t, 1, rows[0].Attempt)
			s.wipe()
		}
	})
}

// TestG5FollowerGoesOutSoonAfterItsSlowCommit, by a relay.
func TestG5FollowerGoesOutSoonAfterItsSlowCommit(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		var r receiver
		book := new(logbook)
		stop := s.run(book.options(), j.Sender(r.send, outbox.SendOptions{}))
		for n := range 3 {
			tx := s.begin()
			s.put(j, outbox.Message{Key: fmt.Sprint("head ", n), Group: "g"})
			_, err := j.Put(t.Context(), tx, outbox.Message{Key: fmt.Sprint("follower ", n), Group: "g"})
			require.NoError(t, err)
			time.Sleep(150 * time.Millisecond)
			require.NoError(t, tx.Commit())
			began := time.Now()
			eventually(t, "the follower", func() bool { return slices.Contains(r.keys(), fmt.Sprint("follower ", n)) })
			require.Less(t, time.Since(began), 3*time.Second)
		}
		require.NoError(t, stop())
		require.Equal(t, []string{"head 0", "follower 0", "head 1", "follower 1", "head 2", "follower 2"}, r.keys())
		require.Empty(t, book.grep("level=ERROR"))
	})
}

// TestG5TenRelaysSendEachMessageOnce, with and without groups, where nothing fails.
func TestG5TenRelaysSendEachMessageOnce(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		n := 4000 / raceFactor
		if !s.postgres() {
			n = 400 // ten relays mostly wait for each other there
		}
		var r receiver
		book := new(logbook)
		stop := s.senders(10, book, "mail", r.send, outbox.SendOptions{})
		j := s.journal("mail")
		ms := append(letters("plain ", n/2, 0), letters("grouped ", n/2, n/20)...)
		s.put(j, ms...)
		eventually(t, "all to be sent", func() bool { return r.len() >= n && s.unfinished() == 0 })
		stop()
		require.Equal(t, each(1, keysOf(ms)...), r.times())
		high := map[string]int64{}
		for _, m := range r.all() {
			require.Equal(t, 1, m.attempt)
			if m.group != "" {
				require.Greater(t, m.seq, high[m.group], "%s in order", m.group)
				high[m.group] = m.seq
			}
		}
		require.Zero(t, book.count(outbox.EventLost)+book.count(outbox.EventLeft))
		require.True(t, !s.postgres() || len(book.noise()) == 0, "%q", book.noise())
	})
}
