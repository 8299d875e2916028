package outbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"
)

func (s *fakeJournal) PutRows(ctx context.Context, tx Tx, channel string, rows []PutRow, begin time.Duration) (as []PutAnswer, err error) {
	var blocked bool
	err = s.call(ctx, "put", len(rows), nil, func() {
		s.puts = append(s.puts, slices.Clone(rows))
		for _, r := range rows {
			if begin > 0 && r.Group != "" && s.head(channel, r.Group, false) != nil && s.messages[fakeKey{channel, r.Key}] == nil {
				blocked = true
				return
			}
		}
		for _, r := range rows {
			as = append(as, s.putMessage(channel, r, begin))
		}
	})
	if blocked {
		err = fmt.Errorf("put: %w", ErrBlocked)
	}
	if err == nil {
		s.hint(Hint{Channel: Channel{SystemJournal, channel}, Version: as[len(as)-1].Row.Version})
	}
	return as, err
}

func (s *fakeJournal) putMessage(channel string, r PutRow, begin time.Duration) PutAnswer {
	k, now := fakeKey{channel, r.Key}, time.Now()
	if m := s.messages[k]; m != nil {
		return PutAnswer{Row: m.row(), Differs: m.Group != r.Group || string(m.Payload) != string(r.Payload)}
	}
	s.last++
	m := &fakeMessage{channel: channel, Row: Row{
		ID: s.last, Key: r.Key, Version: Version(s.last), Group: r.Group, Payload: append([]byte{}, r.Payload...), Header: r.Header,
		StagedAt: now, Due: now.Add(r.Delay), State: StatePending,
	}}
	s.messages[k] = m
	if begin > 0 {
		s.lease(m, begin)
	}
	row := m.Row
	row.Payload, row.Header = nil, nil
	return PutAnswer{Row: row, Created: true}
}

func (s *fakeJournal) lease(m *fakeMessage, d time.Duration) {
	s.last++
	s.leaseAs(m, d, Token(s.last))
}

func (s *fakeJournal) leaseAs(m *fakeMessage, d time.Duration, token Token) {
	m.Token, m.LeaseUntil = token, time.Now().Add(d)
	lapsed := m.State == StateSending
	if !lapsed || m.lapses >= 2 {
		m.Attempt++
	}
	if lapsed {
		m.lapses++
	}
	m.Ambiguous, m.Alone = m.lapses > 0, m.lapses > 1
	m.State = StateSending
	if m.Group != "" {
		g := s.group(m.channel, m.Group)
		g.token, g.until = m.Token, m.LeaseUntil
	}
}

func (s *fakeJournal) ClaimMessages(ctx context.Context, tx Tx, c Claim) (claimed Claimed, err error) {
	err = s.call(ctx, "claim", c.Limit, nil, func() { claimed = s.claimMessages(c) })
	return claimed, err
}

func (s *fakeJournal) claimMessages(c Claim) (claimed Claimed) {
	now := time.Now()
	ch := s.channel(Channel{SystemJournal, c.Channel})
	if ch.paused.After(now) || ch.outage.After(now) || (ch.level > 0 && ch.probe.After(now)) {
		return claimed
	}
	limit := c.Limit
	if ch.level > 0 {
		limit, claimed.Probe = 1, true
	}
	due := s.dueMessages(c, now)
	if i := slices.IndexFunc(due, func(m *fakeMessage) bool { return m.State == StateSending && m.lapses >= 1 }); i == 0 {
		due = due[:1]
	} else {
		due = slices.DeleteFunc(due, func(m *fakeMessage) bool { return m.State == StateSending && m.lapses >= 1 })
	}
	s.last++
	token := Token(s.last)
	for _, m := range due[:min(limit, len(due))] {
		s.leaseAs(m, c.Lease, token)
		claimed.Rows = append(claimed.Rows, m.Row)
	}
	if claimed.Probe && len(claimed.Rows) > 0 {
		ch.probe = now.Add(c.Lease)
	}
	return claimed
}

// dueMessages are those that could be claimed: runs of groups in one piece.
func (s *fakeJournal) dueMessages(c Claim, now time.Time) (due []*fakeMessage) {
	stopped := map[string]bool{}
	var single []*fakeMessage
	runs := map[string][]*fakeMessage{}
	var order []string
	for _, m := range s.sorted(c.Channel) {
		ready := m.open() && !m.Due.After(now) && !m.locked && (m.State != StateSending || !m.LeaseUntil.After(now))
		switch {
		case m.Group == "":
			if ready {
				single = append(single, m)
			}
		case m.State == StateSent || !m.open() && c.SkipEnded || stopped[m.Group]:
		case !ready || s.group(c.Channel, m.Group).until.After(now) || s.group(c.Channel, m.Group).locked:
			stopped[m.Group] = true
		default:
			if runs[m.Group] == nil {
				order = append(order, m.Group)
			}
			runs[m.Group] = append(runs[m.Group], m)
		}
	}
	slices.SortStableFunc(single, func(a, b *fakeMessage) int { return a.Due.Compare(b.Due) })
	for _, g := range order {
		due = append(due, runs[g]...)
	}
	return append(due, single...)
}

func (s *fakeJournal) BeginMessage(ctx context.Context, tx Tx, channel, key string, lease time.Duration) (row Row, err error) {
	var bad error
	err = s.call(ctx, "begin", 1, nil, func() {
		m := s.messages[fakeKey{channel, key}]
		switch {
		case m == nil:
			bad = ErrNotFound
		case m.locked:
			bad = ErrBusy
		case m.State > StateFailed:
			bad = ErrState
		case m.Group != "" && (s.head(channel, m.Group, false) != m || s.group(channel, m.Group).until.After(time.Now())):
			bad = ErrBlocked
		default:
			s.lease(m, lease)
			row = m.Row
		}
	})
	return row, cmp.Or(err, bad)
}
