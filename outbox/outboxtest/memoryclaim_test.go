package outboxtest_test

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func (m *memory) ClaimMessages(ctx context.Context, tx outbox.Tx, c outbox.Claim) (outbox.Claimed, error) {
	return within(ctx, m, tx, "claim", func(t *memoryTx) (outbox.Claimed, error) {
		claimed := outbox.Claimed{}
		now, ch := m.now(), m.channel(outbox.Channel{System: outbox.SystemJournal, Name: c.Channel})
		if ch.down && !m.is("outage is ignored by the journal") {
			if ch.pausedUntil.After(now) || ch.probeUntil.After(now) {
				return claimed, nil
			}
			if claimed.Probe, c.Limit = true, 1; m.is("probe takes a batch of messages") {
				c.Limit = 10
			}
		}
		picked := m.pick(m.runs(t, c, now), c.Limit)
		if len(picked) == 0 {
			claimed.Probe = false
			return claimed, nil
		}
		if claimed.Probe {
			ch.probeUntil = now.Add(c.Lease)
		}
		t.db.token++
		for _, r := range picked {
			r := m.lease(r, t.db.token, later(now, c.Lease))
			t.setMessage(m.messageID(c.Channel, r.Key), r)
			if r.Group != "" {
				t.setGroup(m.groupID(c.Channel, r.Group), memoryGroup{until: r.LeaseUntil, token: r.Token})
			}
			if m.is("claim leaves out the payload") {
				r.Payload = []byte{}
			}
			claimed.Rows = append(claimed.Rows, r.Row)
		}
		return claimed, nil
	})
}

// runs returns what could be claimed, in the order of their heads' due times:
// single messages, and the runs of groups.
func (m *memory) runs(t *memoryTx, c outbox.Claim, now time.Time) [][]memoryMessage {
	runs, groups := [][]memoryMessage{}, map[string][]memoryMessage{}
	for _, r := range t.of(c.Channel) {
		switch {
		case r.Group != "" && !m.is("groups have no order"):
			groups[m.foldGroup(r.Group)] = append(groups[m.foldGroup(r.Group)], r)
		case m.claimableMessage(t, c, r):
			runs = append(runs, []memoryMessage{r})
		}
	}
	for name, rs := range groups {
		id := m.groupID(c.Channel, name)
		if t.held(id) && !m.is("claim overrides a held group") || t.group(id).until.After(now) && !m.is("many runs of a group") {
			continue
		}
		slices.SortFunc(rs, func(a, b memoryMessage) int { return cmp.Compare(a.Version, b.Version) })
		if run := m.run(t, c, rs); len(run) > 0 {
			runs = append(runs, run)
		}
	}
	if m.is("blocked group blocks all") && len(groups) > 0 && len(runs) > 0 {
		return nil
	}
	slices.SortFunc(runs, func(a, b []memoryMessage) int {
		if m.is("groups come last") && a[0].Group != b[0].Group {
			return cmp.Compare(a[0].Group, b[0].Group)
		}
		if m.is("messages are claimed by number") {
			return cmp.Compare(a[0].Version, b[0].Version)
		}
		if m.is("messages are claimed by key") {
			return cmp.Compare(a[0].Key, b[0].Key)
		}
		return cmp.Or(a[0].Due.Compare(b[0].Due), cmp.Compare(a[0].Version, b[0].Version))
	})
	return runs
}

func (m *memory) claimableMessage(t *memoryTx, c outbox.Claim, r memoryMessage) bool {
	switch {
	case ended(r.State):
		return m.is("dead messages are claimed") && r.State == outbox.StateDead
	case r.Due.After(m.now()) && !m.is("due time of messages is ignored"):
		return false
	case m.leasedMessage(r):
		return false
	case m.is("lapsed messages are left") && r.claimed:
		return false
	case m.is("fresh messages wait for a full pass") && !c.Full:
		return false
	case m.is("full pass leaves out late messages") && c.Full && r.Due.Before(m.now().Add(-30*time.Millisecond)):
		return false
	}
	return !t.held(m.messageID(c.Channel, r.Key)) || m.is("claim overrides held messages")
}

func ended(s outbox.State) bool { return s >= outbox.StateSent }

func (m *memory) foldGroup(name string) string {
	if m.is("groups are folded") {
		return foldKey(name)
	}
	return name
}

// run returns the messages of a group, given in their order, that can go out.
func (m *memory) run(t *memoryTx, c outbox.Claim, rs []memoryMessage) []memoryMessage {
	run := []memoryMessage{}
	for _, r := range rs {
		switch {
		case r.State == outbox.StateSent && !m.is("sent messages block"):
			continue
		case ended(r.State) && (c.SkipEnded && !m.is("skip is ignored") || m.is("blocked head is skipped")):
			continue
		case m.leasedMessage(r) && m.reliesOnGroups():
			continue
		case !m.claimableMessage(t, c, r) && m.is("group is not cut where one is not due"):
			continue
		case !m.claimableMessage(t, c, r):
			return run
		case m.alone(r) && len(run) > 0:
			return run
		}
		if run = append(run, r); m.alone(r) || m.is("runs of one") {
			return run
		}
	}
	return run
}

// reliesOnGroups returns whether the store has a mistake in who holds groups.
// It then believes in them, and does not look at who holds their messages.
func (m *memory) reliesOnGroups() bool {
	return m.has("group is let go before its last", "extend forgets the group", "begun message does not hold its group", "many runs of a group", "lost run is extended")
}

// alone returns whether a message lapsed so often that it is claimed alone.
func (m *memory) alone(r memoryMessage) bool {
	return r.claimed && r.lapses+1 >= 2 && !m.is("poison is claimed in company")
}

// pick takes up to limit messages.
func (m *memory) pick(runs [][]memoryMessage, limit int) []memoryMessage {
	picked := []memoryMessage{}
	for i, run := range runs {
		switch {
		case m.alone(run[0]) && i == 0:
			return run[:1]
		case m.alone(run[0]):
			continue
		}
		if m.is("runs are reversed") {
			slices.Reverse(run)
		}
		picked = append(picked, run...)
	}
	if m.is("runs are mixed") {
		slices.SortStableFunc(picked, func(a, b memoryMessage) int { return cmp.Compare(a.Version, b.Version) })
	}
	if m.is("limit of messages is ignored") {
		return picked
	}
	return picked[:min(len(picked), limit)]
}

// soonestMessage returns when something can be claimed; zero: never.
func (m *memory) soonestMessage(channel string) time.Time {
	t, soonest := newMemoryTx(m.db), time.Time{}
	heads := map[string]memoryMessage{}
	consider := func(at time.Time) {
		if soonest.IsZero() || at.Before(soonest) {
			soonest = at
		}
	}
	for _, r := range t.of(channel) {
		switch {
		case r.State == outbox.StateSent, r.Group == "" && ended(r.State):
		case r.Group == "" && m.is("look overlooks leased messages") && r.claimed:
		case r.Group == "":
			consider(latest2(r.Due, r.LeaseUntil))
		default:
			if h, ok := heads[r.Group]; !ok || r.Version < h.Version {
				heads[r.Group] = r
			}
		}
	}
	for name, r := range heads {
		if m.is("look overlooks groups") || ended(r.State) && !m.is("blocked groups are due") {
			continue
		}
		consider(latest2(latest2(r.Due, r.LeaseUntil), t.group(m.groupID(channel, name)).until))
	}
	return soonest
}

func latest2(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// journalStats counts messages.
func (m *memory) journalStats() []outbox.ChannelStats {
	all := []outbox.ChannelStats{}
	_ = m.db.view(func() error {
		names := map[string]bool{}
		for id := range m.db.messages {
			names[id.channel] = true
		}
		for name := range names {
			all = append(all, m.channelStats(name))
		}
		return nil
	})
	return all
}

func (m *memory) channelStats(name string) outbox.ChannelStats {
	now, t := m.now(), newMemoryTx(m.db)
	s := outbox.ChannelStats{Channel: outbox.Channel{System: outbox.SystemJournal, Name: name}}
	if c := m.channel(s.Channel); c.down {
		s.Outage, s.Reason, s.Paused = true, c.reason, max(0, c.pausedUntil.Sub(now))
	}
	heads, open := map[string]memoryMessage{}, map[string]bool{}
	for _, r := range t.of(name) {
		if h, ok := heads[r.Group]; r.Group != "" && r.State != outbox.StateSent && (!ok || r.Version < h.Version) {
			heads[r.Group] = r
		}
	}
	for _, r := range t.of(name) {
		switch {
		case r.State == outbox.StateSent:
			continue
		case r.State == outbox.StateDead:
			s.Dead++
			continue
		case r.State == outbox.StateUnknown:
			s.Unknown++
			continue
		}
		open[r.Group] = true
		switch {
		case r.LeaseUntil.After(now):
			s.InFlight++
		case ended(heads[r.Group].State) && !m.is("blocked messages are due"):
		case r.Due.After(now):
			s.Scheduled++
		default:
			s.Due++
			s.OldestDue = max(s.OldestDue, now.Sub(r.Due))
		}
		if r.Attempt > s.Attempt {
			s.Attempt, s.LastError = r.Attempt, r.LastError
		}
	}
	for g, h := range heads {
		if ended(h.State) && open[g] && !m.is("blocked groups are not counted") {
			s.Blocked++
		}
	}
	if m.is("dead messages are not counted") {
		s.Dead, s.Unknown = 0, 0
	}
	return s
}
