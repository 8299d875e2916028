package integration

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// crash is what becomes of messages whose relay was killed at one step, under
// one policy: how often the receiver had each, how often the Probe was asked,
// and how each ended. g1 and g2 are a group: a send of g1 that stands still
// keeps g2 back.
type crash struct {
	policy      policy
	at          step
	sent, asked map[string]int
	state       outbox.State
}

var crashKeys = []string{"a", "b", "g1", "g2"}

var crashes = []crash{
	{resend, beforeClaim, each(1, crashKeys...), each(0), outbox.StateSent},
	{resend, afterClaim, each(1, crashKeys...), each(0), outbox.StateSent},
	{resend, inPublish, map[string]int{"a": 2, "b": 2, "g1": 2, "g2": 1}, each(0), outbox.StateSent},
	{resend, beforeSettle, each(2, crashKeys...), each(0), outbox.StateSent},
	{resend, afterSettle, each(1, crashKeys...), each(0), outbox.StateSent},

	{park, beforeClaim, each(1, crashKeys...), each(0), outbox.StateSent},
	{park, afterClaim, each(0), each(0), outbox.StateUnknown},
	{park, inPublish, each(1, "a", "b", "g1"), each(0), outbox.StateUnknown},
	{park, beforeSettle, each(1, crashKeys...), each(0), outbox.StateUnknown},
	{park, afterSettle, each(1, crashKeys...), each(0), outbox.StateSent},

	{probe, beforeClaim, each(1, crashKeys...), each(0), outbox.StateSent},
	{probe, afterClaim, each(1, crashKeys...), each(1, crashKeys...), outbox.StateSent},
	{probe, inPublish, each(1, crashKeys...), each(1, crashKeys...), outbox.StateSent},
	{probe, beforeSettle, each(1, crashKeys...), each(1, crashKeys...), outbox.StateSent},
	{probe, afterSettle, each(1, crashKeys...), each(0), outbox.StateSent},
}

func (c crash) channel() string { return fmt.Sprint(c.policy, " ", c.at, " ") }

// prefixed puts a prefix before each key.
func prefixed(prefix string, times map[string]int) map[string]int {
	out := map[string]int{}
	for key, n := range times {
		out[prefix+key] = n
	}
	return out
}

// beforeItsSettle is the crash of a policy that comes before the settlement.
func beforeItsSettle(p policy) crash {
	return crashes[slices.IndexFunc(crashes, func(c crash) bool { return c.policy == p && c.at == beforeSettle })]
}

// TestG7SenderKilledBetweenBeginSendAndSettle: after SIGKILL at each step, under
// each policy, exactly what the table says is sent twice, parked or asked about.
// None vanishes, and Park sends none twice.
func TestG7SenderKilledBetweenBeginSendAndSettle(t *testing.T) {
	const lease = 3 * time.Second * raceFactor // none lapses before the last worker is killed
	onBoth(t, func(t *testing.T, s *site) {
		b := s.inbox()
		var workers []*worker
		settled := map[string]bool{} // a slow worker settles a part of the batch, and stands still then
		for _, c := range crashes {
			p := c.channel()
			s.put(s.journal(p), outbox.Message{Key: p + "a"}, outbox.Message{Key: p + "b"},
				outbox.Message{Key: p + "g1", Group: "g"}, outbox.Message{Key: p + "g2", Group: "g"})
		}
		for _, c := range crashes {
			workers = append(workers, s.startWorker(order{Channel: c.channel(), Lease: lease, HaltAt: c.at, Errand: &errand{Policy: c.policy}}))
		}
		for i, c := range crashes {
			workers[i].await("at " + string(c.at))
			want := map[step]int{inPublish: 3, beforeSettle: 4, afterSettle: 4}[c.at]
			eventually(t, "the sends", func() bool { return len(workers[i].said("sent")) >= want })
			workers[i].kill()
			for _, r := range s.records(s.journal(c.channel())) {
				settled[r.Key] = r.State == outbox.StateSent
			}
		}
		var as []outbox.Attachment
		for _, c := range crashes {
			as = append(as, s.journal(c.channel()).Sender(b.send, c.policy.options(b)))
		}
		stop := s.run(new(logbook).options(), as...)
		eventually(t, "all to end", func() bool { return s.unfinished() == 0 })
		require.NoError(t, stop())

		sent, asked := s.times(false), s.times(true)
		for _, c := range crashes {
			p := c.channel()
			of := func(times map[string]int) map[string]int {
				out := map[string]int{}
				for key, n := range times {
					if strings.HasPrefix(key, p) {
						out[key] = n
					}
				}
				return out
			}
			wantSent, wantAsked := prefixed(p, c.sent), prefixed(p, c.asked)
			rs := s.records(s.journal(p))
			require.Len(t, rs, 4, p)
			if c.at == afterSettle {
				require.True(t, slices.ContainsFunc(rs, func(r outbox.Record) bool { return settled[r.Key] }), "nothing was settled, %s", p)
			}
			for _, r := range rs {
				state := c.state
				if c.at == afterSettle && !settled[r.Key] {
					b := beforeItsSettle(c.policy)
					state = b.state
					short := strings.TrimPrefix(r.Key, p)
					wantSent[r.Key] = b.sent[short]
					if n := b.asked[short]; n > 0 {
						wantAsked[r.Key] = n
					}
				}
				require.Equal(t, state, r.State, r.Key)
				require.Equal(t, 1, r.Attempt, "the lapse gave the attempt back: %s", r.Key)
				if state == outbox.StateSent {
					require.Equal(t, "ref of "+r.Key, r.Ref)
				} else {
					require.Contains(t, r.LastError, "lapsed", r.Key)
				}
			}
			require.Equal(t, wantSent, of(sent), "sent, %s", p)
			require.Equal(t, wantAsked, of(asked), "asked about, %s", p)
		}
	})
}

// TestG7PutterKilledAfterItsCommit: who puts a message already begun, to send it
// itself, may die; a relay sees to it.
func TestG7PutterKilledAfterItsCommit(t *testing.T) {
	const lease = time.Second
	crashes := []crash{
		{policy: resend, at: afterCommit, sent: each(1, "k"), state: outbox.StateSent},
		{policy: resend, at: inPublish, sent: each(2, "k"), state: outbox.StateSent},
		{policy: park, at: afterCommit, sent: each(0), state: outbox.StateUnknown},
		{policy: park, at: inPublish, sent: each(1, "k"), state: outbox.StateUnknown},
		{policy: park, at: afterSettle, sent: each(1, "k"), state: outbox.StateSent},
		{policy: probe, at: afterCommit, sent: each(1, "k"), state: outbox.StateSent},
		{policy: probe, at: beforeSettle, sent: each(1, "k"), state: outbox.StateSent},
	}
	onBoth(t, func(t *testing.T, s *site) {
		b := s.inbox()
		want := map[string]int{}
		var workers []*worker
		var as []outbox.Attachment
		for _, c := range crashes {
			p := c.channel()
			for key, n := range prefixed(p, c.sent) {
				want[key] = n
			}
			workers = append(workers, s.startWorker(order{Channel: p, Lease: lease, HaltAt: c.at, Errand: &errand{Policy: c.policy, Deliver: p + "k"}}))
			as = append(as, s.journal(p).Sender(b.send, c.policy.options(b)))
		}
		for i, c := range crashes {
			workers[i].await("at " + string(c.at))
			workers[i].kill()
		}
		s.run(new(logbook).options(), as...)
		eventually(t, "all to end", func() bool { return s.unfinished() == 0 })
		require.Equal(t, want, s.times(false))
		for _, c := range crashes {
			require.Equal(t, all(c.state, c.channel()+"k"), s.states(s.journal(c.channel())))
		}
	})
}

// TestG7SenderKilledAtAnyMoment, again and again over a backlog.
func TestG7SenderKilledAtAnyMoment(t *testing.T) {
	const n, kills, lease = 200, 5, 2 * time.Second // longer than a busy machine stands still
	onBoth(t, func(t *testing.T, s *site) {
		b := s.inbox()
		var as []outbox.Attachment
		for _, p := range policies {
			s.put(s.journal(string(p)), letters(string(p), n/2, 0)...)
			s.put(s.journal(string(p)), letters(string(p)+" grouped ", n/2, n/10)...)
			o := p.options(b)
			o.Lease, o.Order = lease, outbox.Skip // what is parked must not keep the rest of its group
			as = append(as, s.journal(string(p)).Sender(b.send, o))
		}
		for range kills {
			var workers []*worker
			for _, p := range policies {
				workers = append(workers, s.startWorker(order{
					Channel: string(p), Lease: lease, BatchSize: 20, Errand: &errand{Policy: p, Workers: 4, Wander: 5 * time.Millisecond},
				}))
			}
			for i, w := range workers {
				eventually(t, "a send", func() bool {
					return len(w.said("sent")) > rand.N(8) ||
						s.count(`SELECT count(*) FROM {t:messages} WHERE channel = $1 AND outcome = 0`, string(policies[i])) == 0
				})
				time.Sleep(upTo(5 * time.Millisecond))
				w.kill()
			}
		}
		stop := s.run(new(logbook).options(), as...)
		eventually(t, "all to end", func() bool { return s.unfinished() == 0 })
		require.NoError(t, stop())
		sent := s.times(false)
		twice, parked := 0, 0
		for _, p := range policies {
			rs := s.records(s.journal(string(p)))
			require.Len(t, rs, n, "none vanished")
			for _, r := range rs {
				got := sent[r.Key]
				switch {
				case r.State == outbox.StateUnknown && p == park:
					require.LessOrEqual(t, got, 1, "%s was sent twice", r.Key)
					parked++
				case p == resend:
					require.Equal(t, outbox.StateSent, r.State, r.Key)
					require.Positive(t, got, r.Key)
					twice += got - 1
				default:
					require.Equal(t, outbox.StateSent, r.State, r.Key)
					require.Equal(t, 1, got, r.Key)
				}
			}
		}
		t.Logf("%d sent again, %d parked, %d asked about", twice, parked, len(s.times(true)))
		require.Positive(t, parked)
		require.Positive(t, len(s.times(true)))
	})
}

// TestG10MessageThatKillsItsProcessSparesItsBystanders: 99 good ones are in the
// same batch. They are sent, at their first attempt, and the one ends unknown.
func TestG10MessageThatKillsItsProcessSparesItsBystanders(t *testing.T) {
	const lease, attempts = 300 * time.Millisecond, 2
	onBoth(t, func(t *testing.T, s *site) {
		s.inbox()
		j := s.journal("mail")
		good := letters("good", 99, 0)
		for i := range good { // some are ordered
			if i%3 == 0 {
				good[i].Group = fmt.Sprint("g", i%7)
			}
		}
		s.put(j, append(append(good[:50:50], outbox.Message{Key: "poison"}), good[50:]...)...)
		var deaths []string
		for s.unfinished() > 0 {
			w := s.startWorker(order{Channel: "mail", Lease: lease, DieOn: "poison", Errand: &errand{Policy: resend, MaxAttempts: attempts}})
			eventually(t, "an end", func() bool {
				select {
				case <-w.done:
					return true
				default:
					return s.unfinished() == 0
				}
			})
			w.kill()
			deaths = append(deaths, w.said("dies")...)
			require.Less(t, len(deaths), 10)
		}
		require.Equal(t, all(outbox.StateSent, keysOf(good)...), without(s.states(j), "poison"))
		for _, r := range s.records(j) {
			if r.Key == "poison" {
				require.Equal(t, outbox.StateUnknown, r.State)
				continue
			}
			require.Equal(t, 1, r.Attempt, "bystanders pay nothing: %s", r.Key)
		}
		// Two deaths in company cost nothing, what it suffers alone counts.
		require.Equal(t, []string{"dies 1", "dies 1", "dies 1", "dies 2"}, deaths)
		_, err := j.Retry(context.Background(), outbox.Filter{Key: "poison"})
		require.NoError(t, err)
		var r receiver
		s.sendOnce(j, r.send, outbox.SendOptions{})
		require.Equal(t, each(1, "poison"), r.times())
	})
}

func without[V any](of map[string]V, key string) map[string]V {
	delete(of, key)
	return of
}
