package filestore

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// Check implements outbox.RelayStore: it reads the file, unless it has been
// read. Errors say what is wrong with it and what to do; one that is torn, not
// an outbox, or of a newer version of this library is outbox.ErrSchema.
func (s *Store) Check(ctx context.Context) error {
	_, err := read(ctx, s, nil, func(*state, time.Time) (struct{}, error) { return struct{}{}, nil })
	if err != nil {
		return fmt.Errorf("check: %w", err)
	}
	return nil
}

// Look implements outbox.RelayStore.
func (s *Store) Look(ctx context.Context, channels []outbox.Channel) ([]outbox.Look, error) {
	looks, err := read(ctx, s, nil, func(st *state, now time.Time) ([]outbox.Look, error) {
		looks := make([]outbox.Look, len(channels))
		for i, ch := range channels {
			if looks[i].Wait = -1; ch.System != outbox.SystemJournal {
				continue // of which a file has none
			}
			c := st.channels[ch.Name]
			looks[i].Paused, looks[i].Outage = c.wait(now), c.outages > 0
			if at, ok := st.soonest(ch.Name); ok {
				looks[i].Wait = max(0, at.Sub(now), looks[i].Paused)
			}
		}
		return looks, nil
	})
	if err != nil {
		return nil, fmt.Errorf("look at %d channels: %w", len(channels), err)
	}
	return looks, nil
}

// soonest returns when something of a channel can be claimed, if ever.
func (st *state) soonest(channel string) (at time.Time, ok bool) {
	consider := func(t time.Time) {
		if !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	for _, m := range st.of(channel) {
		if m.row.Group == "" && !m.hasEnded() {
			consider(latest(m.row.Due, m.row.LeaseUntil))
		}
	}
	for _, g := range st.groups(channel) {
		if len(g.slots) > 0 && !g.blocked() {
			consider(latest(g.head().row.Due, g.until))
		}
	}
	return at, ok
}

// Pauses of a channel whose destination is down.
const (
	outageBase = time.Second
	outageCap  = 5 * time.Minute
)

// Outage implements outbox.RelayStore.
func (s *Store) Outage(ctx context.Context, ch outbox.Channel, down bool, reason string) error {
	err := onlyJournal(ch)
	if err == nil {
		err = s.setChannel(ctx, ch.Name, func(c channel, now time.Time) channel {
			if !down {
				c = channel{pausedUntil: c.pausedUntil, reason: c.reason}
				if !c.pausedUntil.After(now) {
					return channel{}
				}
				return c
			}
			if c.downUntil.After(now) { // others have said so
				return c
			}
			pause := outageCap
			if c.outages < 10 { // beyond, a shift would be over the cap
				pause = min(outageBase<<c.outages, outageCap)
			}
			c.outages, c.downUntil, c.probeUntil, c.cause = min(c.outages+1, 10), later(now, pause), time.Time{}, outbox.ErrorText(reason)
			return c
		})
	}
	if err != nil {
		return fmt.Errorf("record the outage of channel %q: %w", ch.Name, err)
	}
	return nil
}

// Pause pauses a channel for d, under a reason that shows in the stats, also
// for processes that open the file later: sends in flight end, none begins. A
// d of 0 resumes it at once, also from an outage. Refuses a negative d, one of
// over a hundred years, and a bad name or reason, by outbox.ErrInvalid.
func (s *Store) Pause(ctx context.Context, name string, d time.Duration, reason string) error {
	if err := outbox.ValidChannel(name); err != nil {
		return fmt.Errorf("pause channel: %w", err)
	}
	if d < 0 || d > 100*365*24*time.Hour {
		return fmt.Errorf("pause channel %q: %w: duration %s is not within 0 and 100 years", name, outbox.ErrInvalid, d)
	}
	err := s.setChannel(ctx, name, func(c channel, now time.Time) channel {
		if d == 0 {
			return channel{}
		}
		c.pausedUntil, c.reason = later(now, d), outbox.ErrorText(reason)
		return c
	})
	if err != nil {
		return fmt.Errorf("pause channel %q: %w", name, err)
	}
	if d == 0 {
		s.Wake()
	}
	return nil
}

func (s *Store) setChannel(ctx context.Context, name string, f func(channel, time.Time) channel) error {
	_, err := change(ctx, s, nil, func(st *state, now time.Time) (struct{}, error) {
		st.setChannel(name, f(st.channels[name], now))
		return struct{}{}, nil
	})
	return err
}

// Stats implements outbox.RelayStore.
func (s *Store) Stats(ctx context.Context) ([]outbox.ChannelStats, error) {
	list, err := read(ctx, s, nil, func(st *state, now time.Time) ([]outbox.ChannelStats, error) {
		names := map[string]bool{}
		for _, sl := range st.slots {
			if sl.m != nil {
				names[sl.m.channel] = true
			}
		}
		for name := range st.channels {
			names[name] = true
		}
		var list []outbox.ChannelStats
		for name := range names {
			list = append(list, st.stats(name, now))
		}
		slices.SortFunc(list, func(a, b outbox.ChannelStats) int { return cmp.Compare(a.Channel.Name, b.Channel.Name) })
		return list, nil
	})
	if err != nil {
		return nil, fmt.Errorf("count what is waiting: %w", err)
	}
	return list, nil
}

func (st *state) stats(name string, now time.Time) outbox.ChannelStats {
	s := outbox.ChannelStats{Channel: journal(name)}
	c := st.channels[name]
	s.Paused = max(0, latest(c.pausedUntil, c.downUntil).Sub(now))
	if c.pausedUntil.After(now) {
		s.Reason = c.reason
	} else if c.outages > 0 {
		s.Outage, s.Reason = true, c.cause
	}
	groups := st.groups(name)
	waiting := map[string]bool{} // blocked groups with open messages
	for _, m := range st.of(name) {
		if m.row.State == outbox.StateSent {
			continue
		}
		if m.row.Attempt > s.Attempt {
			s.Attempt, s.LastError = m.row.Attempt, m.row.LastError
		}
		g := groups[m.row.Group]
		behind := g != nil && g.blocked()
		if behind && !m.hasEnded() {
			waiting[m.row.Group] = true
		}
		switch {
		case m.row.State == outbox.StateDead:
			s.Dead++
		case m.row.State == outbox.StateUnknown:
			s.Unknown++
		case m.leased(now):
			s.InFlight++
		case behind:
		case m.row.Due.After(now):
			s.Scheduled++
		default:
			s.Due++
			s.OldestDue = max(s.OldestDue, now.Sub(m.row.Due))
		}
	}
	s.Blocked = len(waiting)
	for _, n := range []*int{&s.Due, &s.Scheduled, &s.InFlight, &s.Blocked, &s.Dead, &s.Unknown} {
		*n = min(*n, outbox.StatsCap)
	}
	return s
}

func journal(name string) outbox.Channel {
	return outbox.Channel{System: outbox.SystemJournal, Name: name}
}

// onlyJournal refuses the channels of outbox.Latest: a value that is replaced
// is staged in the transaction that changes it, and a file has none.
func onlyJournal(ch outbox.Channel) error {
	if ch.System != outbox.SystemJournal {
		return fmt.Errorf("%w: channel %q is of outbox.Latest, a file store keeps outbox.Journal's alone", outbox.ErrInvalid, ch.Name)
	}
	return nil
}
