package integration

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// TestG3FreshRowsAreNotStarvedByFailingOnes is field case S02: rows that fail
// are due again at once, and queue behind what fell due before. A claim that
// preferred them, or the oldest, would never come to the fresh ones.
func TestG3FreshRowsAreNotStarvedByFailingOnes(t *testing.T) {
	const bad, batch, good = 30, 10, 5
	onBoth(t, func(t *testing.T, s *site) {
		// Each pass claims one batch; bad/batch of them fell due before the good.
		within := func(what string, pass func(), done func() bool) {
			t.Helper()
			for n := 0; !done(); n++ {
				require.LessOrEqual(t, n, bad/batch+1, "passes, and the fresh %s wait", what)
				pass()
			}
		}
		l, j := s.latest("state"), s.journal("mail")
		var w witness
		publish := func(ctx context.Context, es []*outbox.Entry[string]) error {
			for _, e := range es {
				if e.Key[:1] == "b" {
					e.Fail(errDown)
					continue
				}
				w.saw([]*outbox.Entry[string]{e})
			}
			return nil
		}
		passState := func() {
			s.once(l, outbox.PublishOptions{BatchSize: batch, Backoff: constant(time.Millisecond)}, publish)
		}
		s.stageMany(l, "bad", bad)
		for range bad / batch {
			passState()
		}
		s.stageMany(l, "good", good)
		within("entries", passState, func() bool { return w.len() == good })

		for _, groups := range []int{0, bad} {
			name := fmt.Sprint(groups, " groups ")
			var r receiver
			passMail := func() {
				s.sendOnce(j, func(ctx context.Context, m *outbox.Record) (string, error) {
					if m.Key[:3] == "bad" {
						return "", errDown
					}
					return r.send(ctx, m)
				}, outbox.SendOptions{BatchSize: batch, MaxAttempts: outbox.NoLimit, Backoff: constant(time.Millisecond)})
			}
			s.put(j, letters("bad "+name, bad, groups)...)
			for range bad / batch {
				passMail()
			}
			fresh := letters("good "+name, good, 0)
			for i := range fresh {
				if groups > 0 {
					fresh[i].Group = fmt.Sprint("good ", i)
				}
			}
			s.put(j, fresh...)
			within("messages", passMail, func() bool { return r.len() == good })
			s.wipe()
		}
	})
}

// TestG5MessageThatFailsIsTriedOncePerBackoffByTheWholeFleet is field cases S01
// and S32 for the journal: what is due again is in the row, not in a relay.
func TestG5MessageThatFailsIsTriedOncePerBackoffByTheWholeFleet(t *testing.T) {
	t.Parallel()
	const backoff, tries = 200 * time.Millisecond, 6
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		s.put(j, outbox.Message{Key: "plain"}, outbox.Message{Key: "grouped", Group: "g"})
		var r receiver
		stop := s.senders(4, new(logbook), "mail", func(_ context.Context, m *outbox.Record) (string, error) {
			r.took(m)
			return "", errDown
		}, outbox.SendOptions{MaxAttempts: tries, Backoff: constant(backoff)})
		eventually(t, "both to be dead", func() bool { return s.unfinished() == 0 })
		stop()
		require.Equal(t, each(tries, "plain", "grouped"), r.times(), "sends and recorded attempts agree")
		last := map[string]receipt{}
		for _, m := range r.all() {
			before, again := last[m.key]
			require.Equal(t, before.attempt+1, m.attempt, m.key)
			require.True(t, !again || m.at.Sub(before.at) >= backoff*9/10, "%s after %s", m.key, m.at.Sub(before.at))
			last[m.key] = m
		}
	})
}
