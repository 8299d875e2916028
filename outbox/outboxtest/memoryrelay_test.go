package outboxtest_test

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// memoryChannel is what the database knows of a channel beside its rows.
type memoryChannel struct {
	down        bool
	reason      string
	level       int
	pausedUntil time.Time
	probeUntil  time.Time
}

func (m *memory) channel(ch outbox.Channel) *memoryChannel {
	if m.is("channels share an outage") {
		ch.Name = "all"
	}
	if m.is("systems share an outage") {
		ch.System = outbox.SystemLatest
	}
	if m.db.channels[ch] == nil {
		m.db.channels[ch] = &memoryChannel{}
	}
	return m.db.channels[ch]
}

// latest names a channel of Latest.
func latest(name string) outbox.Channel {
	return outbox.Channel{System: outbox.SystemLatest, Name: name}
}

// leased returns whether somebody holds the row.
func (m *memory) leased(r memoryRow) bool {
	if m.is("leases never lapse") {
		return !r.LeaseUntil.IsZero()
	}
	if m.is("leases lapse early") {
		return r.LeaseUntil.After(m.now().Add(time.Microsecond))
	}
	return r.LeaseUntil.After(m.now())
}

func (m *memory) ClaimRows(ctx context.Context, c outbox.Claim) (outbox.Claimed, error) {
	var claimed outbox.Claimed
	if m.is("cancelled context is ignored by relays") {
		ctx = context.WithoutCancel(ctx)
	}
	err := m.db.write(ctx, func() error {
		now, ch := m.now(), m.channel(latest(c.Channel))
		if ch.down && !m.is("outage is ignored") {
			if ch.pausedUntil.After(now) || ch.probeUntil.After(now) && !m.is("many probes") {
				return nil
			}
			claimed.Probe, c.Limit = true, 1
			if m.is("probe takes the batch") {
				c.Limit = 10
			}
			if m.is("empty claim takes the probe") {
				ch.probeUntil = now.Add(c.Lease)
			}
		}
		ids := m.claimable(c, now)
		if m.is("claims race") {
			m.db.mu.Unlock()
			time.Sleep(time.Millisecond)
			m.db.mu.Lock()
		}
		if len(ids) == 0 {
			claimed.Probe = false
			return nil
		}
		if claimed.Probe {
			ch.probeUntil = now.Add(c.Lease)
			if m.is("probe is never given out again") {
				ch.probeUntil = now.Add(time.Hour)
			}
		}
		for _, id := range ids {
			claimed.Rows = append(claimed.Rows, m.claim(id, now.Add(c.Lease)))
		}
		return nil
	})
	return claimed, err
}

// claimable returns the rows to claim, in the order of their due times.
func (m *memory) claimable(c outbox.Claim, now time.Time) []rowID {
	ids := []rowID{}
	for id, r := range m.db.rows {
		switch {
		case id.channel != c.Channel && !m.is("channels share claims"):
		case r.Due.After(now) && !m.is("due time is ignored"):
		case m.leased(r) && !m.is("leases are ignored"):
		case m.db.locked(id) && !m.is("claim overrides locks"):
		case m.is("full pass is not full") && c.Full && r.Due.Before(now.Add(-30*time.Millisecond)):
		case m.is("fresh rows wait for a full pass") && !c.Full:
		default:
			ids = append(ids, id)
		}
	}
	slices.SortFunc(ids, func(a, b rowID) int {
		x, y := m.db.rows[a], m.db.rows[b]
		if m.is("claimed by key") {
			return cmp.Compare(x.Key, y.Key)
		}
		if m.is("failing rows first") {
			return cmp.Or(-cmp.Compare(x.Attempt, y.Attempt), cmp.Compare(x.Key, y.Key))
		}
		return cmp.Or(x.Due.Compare(y.Due), cmp.Compare(x.ID, y.ID))
	})
	if m.is("limit is ignored") {
		return ids
	}
	return ids[:min(len(ids), c.Limit)]
}

// claim leases a row until then.
func (m *memory) claim(id rowID, until time.Time) outbox.Row {
	r := m.db.rows[id]
	switch m.defect {
	case "token stays":
		m.db.token = max(m.db.token, 1)
	default:
		m.db.token++
	}
	r.Token, r.LeaseUntil, r.claimed, r.outcome = m.db.token, until, true, 0
	if r.Attempt++; m.is("attempts are not counted at claim") {
		r.Attempt--
	}
	if m.is("claim clears the error") {
		r.LastError = ""
	}
	m.db.rows[id] = r
	if m.is("claim leaves out the header") {
		r.Header = nil
	}
	return r.Row
}

func (m *memory) Settle(ctx context.Context, ch outbox.Channel, ss []outbox.Settlement) ([]outbox.Result, error) {
	if ch.System == outbox.SystemJournal {
		return m.settleMessages(ctx, nil, ch.Name, ss)
	}
	results := []outbox.Result{}
	if m.is("cancelled context is ignored by relays") {
		ctx = context.WithoutCancel(ctx)
	}
	write := m.db.write
	switch m.defect {
	case "settle waits for locks":
		write = m.db.writeAlone
	case "settle does not wait for the writer":
		write = func(_ context.Context, f func() error) error { return m.db.view(f) }
	}
	err := write(ctx, func() error {
		for _, s := range ss {
			if m.is("again is the batch's") {
				s.Again = slices.ContainsFunc(ss, func(s outbox.Settlement) bool { return s.Again })
			}
			id, r, there := m.find(ch.Name, s.Row)
			result := m.settle(id, r, there, s)
			if results = append(results, result); result == outbox.ResultStale && m.is("batch stops at a stale row") {
				for len(results) < len(ss) {
					results = append(results, result)
				}
				break
			}
		}
		return nil
	})
	if m.is("results are sorted") {
		slices.Sort(results)
	}
	return results, err
}

// find returns the row that a relay names.
func (m *memory) find(channel string, row outbox.Row) (rowID, memoryRow, bool) {
	id := m.id(channel, row.Key)
	r, there := m.db.rows[id]
	return id, r, there && (r.ID == row.ID || m.is("rows are found by key"))
}

func (m *memory) settle(id rowID, r memoryRow, there bool, s outbox.Settlement) outbox.Result {
	switch {
	case !there && (s.Again && !m.is("again is ignored") || m.is("gone row is done")):
		return outbox.ResultDone
	case !there:
		return outbox.ResultStale
	case m.db.locked(id) && !m.is("settle overrides locks"):
		return outbox.ResultBusy
	case r.Token != s.Row.Token && !m.is("token is not compared"):
		return outbox.ResultStale
	case m.is("lapsed lease is stale") && !m.leased(r):
		return outbox.ResultStale
	case r.Version != s.Row.Version && m.is("version is not compared"):
	case r.Version != s.Row.Version:
		if r.outcome != 0 && m.is("superseded again is stale") {
			return outbox.ResultStale
		}
		if r.outcome = s.Outcome; !m.is("superseded keeps the lease") {
			r.LeaseUntil = time.Time{}
		}
		if m.is("superseded row waits for the delay") {
			r.Due = m.now().Add(s.Delay)
		}
		m.db.rows[id] = r
		return outbox.ResultSuperseded
	case r.outcome == s.Outcome && m.is("same settlement again is stale"):
		return outbox.ResultStale
	case r.outcome == s.Outcome && !m.is("settled twice"):
		return outbox.ResultDone
	case r.outcome != 0 && !m.has("other settlement afterwards is done", "settled twice"):
		return outbox.ResultStale
	}
	if s.Outcome == outbox.OutcomeDone {
		if delete(m.db.rows, id); m.is("done keeps the row") {
			m.db.rows[id] = r
		}
		return outbox.ResultDone
	}
	m.postpone(&r, s)
	m.db.rows[id] = r
	return outbox.ResultDone
}

// postpone makes a row due again.
func (m *memory) postpone(r *memoryRow, s outbox.Settlement) {
	now := m.now()
	r.LeaseUntil, r.Due, r.outcome = time.Time{}, later(now, s.Delay), s.Outcome
	if r.LastError = s.Error; m.is("long errors are cut") && len(s.Error) > 255 {
		r.LastError = s.Error[:255]
	}
	if s.Outcome == outbox.OutcomeRelease && !m.is("release spends the attempt") {
		r.Attempt--
	}
	switch m.defect {
	case "delay is ignored":
		r.Due = now
	case "delay is doubled":
		r.Due = now.Add(2 * s.Delay)
	case "delay in seconds":
		r.Due = now.Add(s.Delay.Truncate(time.Second) + time.Second)
	case "delay overflows":
		r.Due = time.Unix(0, now.UnixNano()+int64(s.Delay)).UTC()
	case "error is dropped":
		r.LastError = ""
	}
}

// later returns t + d, rounded up to whole microseconds.
func later(t time.Time, d time.Duration) time.Time {
	return time.UnixMicro(t.UnixMicro() + d.Microseconds()).UTC()
}

func (m *memory) Extend(ctx context.Context, ch outbox.Channel, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	if ch.System == outbox.SystemJournal {
		return m.extendMessages(ctx, nil, ch.Name, rows, d)
	}
	results := []outbox.Result{}
	if m.is("cancelled context is ignored by relays") {
		ctx = context.WithoutCancel(ctx)
	}
	err := m.db.write(ctx, func() error {
		for _, row := range rows {
			id, r, there := m.find(ch.Name, row)
			switch {
			case !there, r.Token != row.Token && !m.is("extend ignores the token"), r.outcome != 0 && !m.is("settled lease is extended"):
				results = append(results, outbox.ResultStale)
			case m.db.locked(id) && !m.is("extend overrides locks"):
				results = append(results, outbox.ResultBusy)
			case m.is("lapsed lease is not extended") && !m.leased(r), m.is("restaged row is not extended") && r.Version != row.Version:
				results = append(results, outbox.ResultStale)
			default:
				if r.LeaseUntil = later(m.now(), d); m.is("extend does nothing") {
					r.LeaseUntil = m.db.rows[id].LeaseUntil
				}
				m.db.rows[id] = r
				results = append(results, outbox.ResultDone)
			}
		}
		return nil
	})
	return results, err
}
