package integration

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// failingOn fails one key and lets the receiver have the others.
func (r *receiver) failingOn(key string, err error) outbox.SendFunc {
	return func(ctx context.Context, m *outbox.Record) (string, error) {
		if m.Key == key {
			return "", err
		}
		return r.send(ctx, m)
	}
}

// TestG5EndedHeadBlocksItsGroupUntilSomebodyDecides: the others go on, and
// whatever is decided lets the group go on in its order.
func TestG5EndedHeadBlocksItsGroupUntilSomebodyDecides(t *testing.T) {
	decisions := map[string]struct {
		end    error
		decide func(j *outbox.Journal) error
		want   []string // what is received of the group then
	}{
		"retried": {outbox.Permanent(errDown), func(j *outbox.Journal) error {
			_, err := j.Retry(context.Background(), outbox.Filter{Key: "a0000000"})
			return err
		}, []string{"a0000000", "a0000001", "a0000002"}},
		"discarded": {outbox.Permanent(errDown), func(j *outbox.Journal) error {
			_, err := j.Discard(context.Background(), outbox.Filter{States: []outbox.State{outbox.StateDead}})
			return err
		}, []string{"a0000001", "a0000002"}},
		"purged": {outbox.Permanent(errDown), func(j *outbox.Journal) error {
			_, err := j.Purge(context.Background(), time.Now().Add(time.Hour))
			return err
		}, []string{"a0000001", "a0000002"}},
		"resolved as sent": {outbox.Unknown(errDown), func(j *outbox.Journal) error {
			return j.ResolveUnknown(context.Background(), "a0000000", outbox.VerdictSent, "ref")
		}, []string{"a0000001", "a0000002"}},
		"resolved as not sent": {outbox.Unknown(errDown), func(j *outbox.Journal) error {
			return j.ResolveUnknown(context.Background(), "a0000000", outbox.VerdictNotSent, "")
		}, []string{"a0000000", "a0000001", "a0000002"}},
		"resolved as dead": {outbox.Unknown(errDown), func(j *outbox.Journal) error {
			return j.ResolveUnknown(context.Background(), "a0000000", outbox.VerdictDead, "")
		}, nil},
	}
	onBoth(t, func(t *testing.T, s *site) {
		for name, d := range decisions {
			j := s.journal(name)
			s.put(j, letters("a", 3, 1)...)
			s.put(j, outbox.Message{Key: "b", Group: "another"}, outbox.Message{Key: "plain"})
			var r receiver
			o := outbox.SendOptions{OnUnknown: outbox.Park}
			for range 3 {
				s.sendOnce(j, r.failingOn("a0000000", d.end), o)
			}
			require.Equal(t, each(1, "b", "plain"), r.times(), name)
			stats, err := s.store.Stats(t.Context())
			require.NoError(t, err)
			mine := stats[slices.IndexFunc(stats, func(c outbox.ChannelStats) bool { return c.Channel.Name == name })]
			require.Equal(t, 1, mine.Blocked, name)
			require.Equal(t, 1, mine.Dead+mine.Unknown, name)
			_, err = j.Begin(t.Context(), "a0000001", time.Minute)
			require.ErrorIs(t, err, outbox.ErrBlocked, name)
			tx := s.begin()
			_, err = j.PutBegun(t.Context(), tx, outbox.Message{Key: "a4", Group: "group 0"}, time.Minute)
			require.ErrorIs(t, err, outbox.ErrBlocked, name)
			require.NoError(t, tx.Rollback())

			var later receiver
			require.NoError(t, d.decide(j), name)
			for range 4 {
				s.sendOnce(j, later.send, o)
			}
			require.Equal(t, d.want, later.keys(), name)
		}
	})
}

// TestG5SkippedHeadLetsItsGroupGoOn, also one that was blocked before.
func TestG5SkippedHeadLetsItsGroupGoOn(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		ms := letters("a", 4, 1)
		s.put(j, ms...)
		var r receiver
		skip := outbox.SendOptions{Order: outbox.Skip}
		for range 3 {
			s.sendOnce(j, r.failingOn(ms[0].Key, outbox.Permanent(errDown)), outbox.SendOptions{})
		}
		require.Zero(t, r.len())
		for range 3 {
			s.sendOnce(j, r.failingOn(ms[2].Key, outbox.Permanent(errDown)), skip)
		}
		require.Equal(t, []string{ms[1].Key, ms[3].Key}, r.keys())
		n, err := j.Retry(t.Context(), outbox.Filter{States: []outbox.State{outbox.StateDead}})
		require.NoError(t, err)
		require.EqualValues(t, 2, n)
		s.put(j, outbox.Message{Key: "last", Group: "group 0"})
		for range 3 {
			s.sendOnce(j, r.send, skip)
		}
		require.Equal(t, []string{ms[1].Key, ms[3].Key, ms[0].Key, ms[2].Key, "last"}, r.keys())
	})
}

// TestG5RetryOfAHeadIsNotOvertaken by the messages behind it, whoever works.
func TestG5RetryOfAHeadIsNotOvertaken(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		const tries = 4
		var r receiver
		var failures atomic.Int32
		stop := s.senders(3, new(logbook), "mail", func(ctx context.Context, m *outbox.Record) (string, error) {
			if m.Key == "k0000001" && failures.Add(1) < tries {
				return "", []error{errDown, outbox.RetryAfter(80*time.Millisecond, errDown), outbox.Defer(80 * time.Millisecond)}[failures.Load()-1]
			}
			return r.send(ctx, m)
		}, outbox.SendOptions{Backoff: constant(80 * time.Millisecond)})
		j := s.journal("mail")
		ms := letters("k", 6, 1)
		s.put(j, ms...)
		s.put(j, outbox.Message{Key: "sooner", Group: "group 0"})
		eventually(t, "all to be sent", func() bool { return r.len() == 7 })
		stop()
		require.Equal(t, append(keysOf(ms), "sooner"), r.keys())
		require.EqualValues(t, tries, failures.Load())
	})
}

// TestG5ScheduledHeadIsWaitedFor: a delay holds the group too.
func TestG5ScheduledHeadIsWaitedFor(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		j := s.journal("mail")
		s.put(j, outbox.Message{Key: "later", Group: "g", Delay: time.Hour})
		s.put(j, outbox.Message{Key: "now", Group: "g"}, outbox.Message{Key: "other", Group: "another"})
		var r receiver
		s.sendOnce(j, r.send, outbox.SendOptions{})
		require.Equal(t, []string{"other"}, r.keys())
		looks, err := s.store.Look(t.Context(), []outbox.Channel{messageChannel("mail")})
		require.NoError(t, err)
		require.Equal(t, time.Hour, looks[0].Wait)
		clock.Advance(time.Hour)
		s.sendOnce(j, r.send, outbox.SendOptions{})
		require.Equal(t, []string{"other", "later", "now"}, r.keys())

		s.put(j, outbox.Message{Key: "first", Group: "g"}, outbox.Message{Key: "second", Group: "g", Delay: time.Hour}, outbox.Message{Key: "third", Group: "g"})
		rows := s.take("mail", 10, time.Minute)
		require.Equal(t, []string{"first"}, rowKeys(rows), "in the middle of a run too")
		s.finish("mail", outbox.OutcomeDone, 0, rows...)
		require.Empty(t, s.take("mail", 10, time.Minute))
		clock.Advance(time.Hour)
		require.Equal(t, []string{"second", "third"}, rowKeys(s.take("mail", 10, time.Minute)))
	})
}

// TestG5ThousandGroupsGoOutInParallel, each in its order.
func TestG5ThousandGroupsGoOutInParallel(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const groups, each = 1000, 3
		j := s.journal("mail")
		s.put(j, letters("k", groups*each, groups)...)
		c := newCounter()
		var now, most atomic.Int32
		var mu sync.Mutex
		for range 2 {
			s.run(outbox.RelayOptions{Logger: quiet}, journalOn(t, s.newStore(sqlstore.Options{}), "mail").Sender(
				func(_ context.Context, m *outbox.Record) (string, error) {
					defer c.enter(m)()
					mu.Lock()
					most.Store(max(most.Load(), now.Add(1)))
					mu.Unlock()
					time.Sleep(5 * time.Millisecond)
					now.Add(-1)
					c.accept(m)
					return "", nil
				}, outbox.SendOptions{Workers: 50, BatchSize: 300}))
		}
		eventually(t, "all to be sent", func() bool { return s.unfinished() == 0 })
		require.Empty(t, c.wrong)
		require.Len(t, c.accepted, groups)
		for group, list := range c.accepted {
			require.Len(t, list, each, group)
		}
		require.Greater(t, most.Load(), int32(20), "calls at a time")
	})
}

// TestG5NeitherGroupsNorOthersStarve: a claim takes of both.
func TestG5NeitherGroupsNorOthersStarve(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		for i := range 3 {
			s.put(j, letters(fmt.Sprint("plain ", i), 100, 0)...)
			s.put(j, letters(fmt.Sprint("grouped ", i), 100, 100)...)
			s.put(j, letters(fmt.Sprint("long ", i), 100, 1)...)
		}
		for range 3 {
			kinds := map[string]int{}
			for _, r := range s.take("mail", 20, time.Hour) {
				kinds[r.Key[:4]]++
			}
			require.Equal(t, 10, kinds["plai"], "%v", kinds)
			require.Equal(t, 10, kinds["grou"]+kinds["long"], "%v", kinds)
		}
	})
}
