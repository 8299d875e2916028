package outboxtest_test

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// foldKey is what a careless collation makes of a key.
func foldKey(key string) string { return strings.ToLower(key) }

func (m *memory) Look(ctx context.Context, chs []outbox.Channel) ([]outbox.Look, error) {
	view := m.db.view
	if m.is("look waits for locks") {
		view = func(f func() error) error { return m.db.writeAlone(ctx, f) }
	}
	looks := []outbox.Look{}
	err := view(func() error {
		for _, ch := range chs {
			looks = append(looks, m.look(ch))
		}
		return nil
	})
	if m.is("looks are sorted") {
		slices.SortFunc(looks, func(a, b outbox.Look) int { return int(max(-1, min(1, a.Wait-b.Wait))) })
	}
	return looks, err
}

func (m *memory) look(ch outbox.Channel) outbox.Look {
	now, soonest := m.now(), time.Time{}
	if ch.System == outbox.SystemJournal || m.is("systems share messages") {
		soonest = m.soonestMessage(ch.Name)
	}
	for id, r := range m.db.rows {
		if ch != latest(id.channel) || m.is("look overlooks leases") && m.leased(r) {
			continue
		}
		at := r.Due
		if m.leased(r) && r.LeaseUntil.After(at) {
			at = r.LeaseUntil
		}
		if soonest.IsZero() || at.Before(soonest) != m.is("look takes the latest") {
			soonest = at
		}
	}
	l := outbox.Look{Wait: -1}
	if !soonest.IsZero() {
		l.Wait = max(0, soonest.Sub(now))
	}
	if c := m.channel(ch); c.down {
		l.Outage, l.Paused = true, max(0, c.pausedUntil.Sub(now))
	}
	return l
}

func (m *memory) Outage(ctx context.Context, ch outbox.Channel, down bool, reason string) error {
	return m.db.write(ctx, func() error {
		c, now := m.channel(ch), m.now()
		switch {
		case !down:
			level := c.level
			if *c = (memoryChannel{}); m.is("outage level stays") {
				c.level = level
			}
			if m.is("outage never ends") {
				c.down = true
			}
		case c.down && c.pausedUntil.After(now) && !m.is("reports lengthen the pause"):
		default:
			c.down, c.reason, c.probeUntil = true, reason, time.Time{}
			pause := min(time.Second<<min(c.level, 20), 5*time.Minute)
			switch m.defect {
			case "pauses do not grow":
				pause = time.Second
			case "pauses grow for ever":
				pause = time.Second << min(c.level, 20)
			case "first pause is long":
				pause = time.Minute
			}
			c.pausedUntil = now.Add(pause)
			c.level++
		}
		return nil
	})
}

func (m *memory) Stats(context.Context) ([]outbox.ChannelStats, error) {
	stats := map[string]*outbox.ChannelStats{}
	err := m.db.view(func() error {
		for id, r := range m.db.rows {
			s := stats[id.channel]
			if s == nil {
				s = &outbox.ChannelStats{Channel: outbox.Channel{System: outbox.SystemLatest, Name: id.channel}}
				stats[id.channel] = s
				if ch := m.channel(latest(id.channel)); ch.down {
					s.Outage, s.Reason, s.Paused = true, ch.reason, max(0, ch.pausedUntil.Sub(m.now()))
				}
			}
			m.count(s, r)
		}
		return nil
	})
	all := m.journalStats()
	for _, s := range stats {
		if !m.is("stats leave out channels without due rows") || s.Due > 0 {
			all = append(all, *s)
		}
	}
	return all, err
}

// count counts a row.
func (m *memory) count(s *outbox.ChannelStats, r memoryRow) {
	switch age := m.now().Sub(r.Due); {
	case m.leased(r) && !m.is("leased rows count as due"):
		s.InFlight++
	case age < 0:
		s.Scheduled++
	default:
		s.Due++
		s.OldestDue = max(s.OldestDue, age)
	}
	if r.Attempt > s.Attempt {
		s.Attempt, s.LastError = r.Attempt, r.LastError
	}
}
