package outbox

import (
	"cmp"
	"context"
	"slices"
	"time"
)

// fakeJournal is a JournalStore in memory beside a fakeStore, whose faults,
// channels and hints it shares. Transactions commit at once.
type fakeJournal struct {
	*fakeStore
	messages map[fakeKey]*fakeMessage
	groups   map[fakeKey]*fakeGroup
	ended    []Settlement // that took effect, in order
	puts     [][]PutRow
	purges   []Purge
}

type fakeMessage struct {
	Row
	channel string
	lapses  int
	last    Outcome // of the settlement that ended the last lease
	locked  bool
}

type fakeGroup struct {
	until  time.Time
	token  Token
	locked bool
}

func newFakeJournal() *fakeJournal {
	return &fakeJournal{fakeStore: newFakeStore(), messages: map[fakeKey]*fakeMessage{}, groups: map[fakeKey]*fakeGroup{}}
}

func (s *fakeJournal) group(channel, name string) *fakeGroup {
	k := fakeKey{channel, name}
	if s.groups[k] == nil {
		s.groups[k] = &fakeGroup{}
	}
	return s.groups[k]
}

// message is a copy of a message; false: there is none.
func (s *fakeJournal) message(key string) (fakeMessage, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	m := s.messages[fakeKey{"c", key}]
	if m == nil {
		return fakeMessage{}, false
	}
	return *m, true
}

// change changes a message behind the relay's back.
func (s *fakeJournal) change(key string, f func(m *fakeMessage)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.messages[fakeKey{"c", key}])
}

func (s *fakeJournal) lockGroup(name string, locked bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.group("c", name).locked = locked
}

// sorted are the messages of a channel in the order of their numbers.
func (s *fakeJournal) sorted(channel string) (ms []*fakeMessage) {
	for _, m := range s.messages {
		if m.channel == channel {
			ms = append(ms, m)
		}
	}
	slices.SortFunc(ms, func(a, b *fakeMessage) int { return cmp.Compare(a.Version, b.Version) })
	return ms
}

func (m *fakeMessage) open() bool { return m.State <= StateSending }

func (m *fakeMessage) waits() {
	m.State = StatePending
	if m.Attempt > 0 {
		m.State = StateFailed
	}
}

func (m *fakeMessage) row() Row {
	r := m.Row
	if r.State != StateSending {
		r.LeaseUntil = time.Time{}
	}
	return r
}

// head is the first message of a group that is not sent.
func (s *fakeJournal) head(channel, group string, skip bool) *fakeMessage {
	for _, m := range s.sorted(channel) {
		if m.Group == group && m.State != StateSent && (m.open() || !skip) {
			return m
		}
	}
	return nil
}

func (s *fakeJournal) Settle(ctx context.Context, ch Channel, ss []Settlement) (rs []Result, err error) {
	if ch.System != SystemJournal {
		return s.fakeStore.Settle(ctx, ch, ss)
	}
	err = s.call(ctx, "settle", len(ss), ss, func() {
		for _, x := range ss {
			rs = append(rs, s.settleMessage(ch.Name, x))
		}
	})
	return rs, err
}

func (s *fakeJournal) settleMessage(channel string, x Settlement) Result {
	m := s.messages[fakeKey{channel, x.Row.Key}]
	switch {
	case m == nil && x.Again && x.Outcome == OutcomeDone:
		return ResultDone
	case m == nil:
		return ResultStale
	case m.locked:
		return ResultBusy
	case m.Token != x.Row.Token:
		return ResultStale
	case m.State != StateSending && m.last != x.Outcome:
		return ResultStale
	case m.State == StateSending:
		s.end(m, x)
	}
	if m.Group == "" {
		return ResultDone
	}
	g := s.group(channel, m.Group)
	switch {
	case g.token != x.Row.Token:
	case g.locked:
		return ResultBusy
	default:
		for _, other := range s.messages {
			if other.channel == channel && other.Group == m.Group && other.State == StateSending && other.Token == g.token {
				return ResultDone
			}
		}
		g.until = time.Time{}
	}
	return ResultDone
}

func (s *fakeJournal) end(m *fakeMessage, x Settlement) {
	s.ended = append(s.ended, x)
	m.last, m.lapses, m.LeaseUntil = x.Outcome, x.lapses(m.lapses), time.Time{}
	m.Ambiguous, m.Alone = m.lapses > 0, false
	now := time.Now()
	if x.Outcome != OutcomeDone {
		m.LastError, m.Code = x.Error, x.Code
	}
	switch x.Outcome {
	case OutcomeDone:
		m.State, m.Ref, m.CompletedAt = StateSent, x.Ref, now
		if !x.Keep {
			delete(s.messages, fakeKey{m.channel, m.Key})
		}
	case OutcomeDead:
		m.State, m.CompletedAt = StateDead, now
	case OutcomeUnknown:
		m.State, m.CompletedAt = StateUnknown, now
	case OutcomeRelease:
		m.Attempt--
		fallthrough
	default:
		m.Due = now.Add(x.Delay)
		m.waits()
	}
}

// lapses is what a settlement leaves of the lapses of a message.
func (x *Settlement) lapses(n int) int {
	switch {
	case x.Outcome != OutcomeRetry && x.Outcome != OutcomeRelease, x.Doubt == DoubtCleared:
		return 0
	case x.Doubt == DoubtRaised:
		return 1
	}
	return min(n, 1)
}

func (s *fakeJournal) Extend(ctx context.Context, ch Channel, rows []Row, d time.Duration) (rs []Result, err error) {
	if ch.System != SystemJournal {
		return s.fakeStore.Extend(ctx, ch, rows, d)
	}
	err = s.call(ctx, "extend", len(rows), nil, func() {
		for _, x := range rows {
			m := s.messages[fakeKey{ch.Name, x.Key}]
			switch {
			case m == nil || m.Token != x.Token || m.State != StateSending:
				rs = append(rs, ResultStale)
			case m.locked:
				rs = append(rs, ResultBusy)
			default:
				m.LeaseUntil = time.Now().Add(d)
				if g := s.group(ch.Name, m.Group); m.Group != "" && g.locked {
					rs = append(rs, ResultBusy)
					continue
				} else if g.token == m.Token {
					g.until = m.LeaseUntil
				}
				rs = append(rs, ResultDone)
			}
		}
	})
	return rs, err
}

func (s *fakeJournal) SettleMessages(ctx context.Context, tx Tx, channel string, ss []Settlement) ([]Result, error) {
	if tx == nil {
		return nil, ErrTx
	}
	return s.Settle(ctx, Channel{SystemJournal, channel}, ss)
}

func (s *fakeJournal) ExtendMessages(ctx context.Context, tx Tx, channel string, rows []Row, d time.Duration) ([]Result, error) {
	if tx == nil {
		return nil, ErrTx
	}
	return s.Extend(ctx, Channel{SystemJournal, channel}, rows, d)
}

func (f *MessageFilter) matches(m *fakeMessage) bool {
	return (f.Key == "" || f.Key == m.Key) && (f.Group == "" || f.Group == m.Group) && (f.Code == "" || f.Code == m.Code) &&
		(len(f.States) == 0 || slices.Contains(f.States, m.State))
}

func (s *fakeJournal) ListMessages(ctx context.Context, tx Tx, channel string, l MessageList) (rows []Row, err error) {
	err = s.call(ctx, "list", l.Limit, nil, func() {
		for _, m := range s.sorted(channel) {
			if m.Version > l.After && l.matches(m) && len(rows) < l.Limit {
				row := m.row()
				if !l.Payloads {
					row.Payload = nil
				}
				rows = append(rows, row)
			}
		}
	})
	return rows, err
}

func (s *fakeJournal) AmendMessages(ctx context.Context, tx Tx, channel string, a Amendment) (done Amended, err error) {
	err = s.call(ctx, "amend", a.Limit, nil, func() {
		for _, m := range s.sorted(channel) {
			if m.Version <= a.After || !a.matches(m) || !a.Action.allowed(m.State) || m.locked {
				continue
			}
			if done.Count == a.Limit {
				return
			}
			done.Count++
			done.Last = m.Version
			if !a.DryRun {
				s.amend(m, a)
			}
		}
		done.Last = 0
	})
	return done, err
}

func (s *fakeJournal) amend(m *fakeMessage, a Amendment) {
	m.CompletedAt = time.Time{}
	switch a.Action {
	case ActionDiscard:
		delete(s.messages, fakeKey{m.channel, m.Key})
	case ActionRetry:
		m.Attempt, m.Due = 0, time.Now()
		m.waits()
	case ActionPending:
		m.Due = time.Now()
		m.waits()
	case ActionSent:
		m.State, m.Ref, m.CompletedAt = StateSent, a.Ref, time.Now()
	case ActionDead:
		m.State, m.CompletedAt = StateDead, time.Now()
	}
}

func (s *fakeJournal) PurgeMessages(ctx context.Context, channel string, p Purge) (n int, err error) {
	err = s.call(ctx, "purge", p.Limit, nil, func() {
		s.purges = append(s.purges, p)
		before := p.Before
		if before.IsZero() {
			before = time.Now().Add(-p.Age)
		}
		for _, m := range s.sorted(channel) {
			if n < p.Limit && slices.Contains(p.States, m.State) && m.CompletedAt.Before(before) && !m.locked {
				n++
				delete(s.messages, fakeKey{channel, m.Key})
			}
		}
	})
	return n, err
}

func (s *fakeJournal) Look(ctx context.Context, chs []Channel) (looks []Look, err error) {
	if chs[0].System != SystemJournal {
		return s.fakeStore.Look(ctx, chs)
	}
	err = s.call(ctx, "look", len(chs), nil, func() {
		now := time.Now()
		for _, ch := range chs {
			c := s.channel(ch)
			l := Look{Wait: -1, Outage: c.level > 0}
			for _, t := range []time.Time{c.paused, c.outage, c.probe} {
				l.Paused = max(l.Paused, t.Sub(now))
			}
			for _, m := range s.sorted(ch.Name) {
				if !m.open() || m.Group != "" && s.head(ch.Name, m.Group, false) != m {
					continue
				}
				wait := max(0, m.Due.Sub(now), m.LeaseUntil.Sub(now))
				if l.Wait < 0 || wait < l.Wait {
					l.Wait = wait
				}
			}
			looks = append(looks, l)
		}
	})
	return looks, err
}

func (s *fakeJournal) Stats(ctx context.Context) ([]ChannelStats, error) { return nil, nil }
