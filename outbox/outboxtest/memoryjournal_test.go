package outboxtest_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

var _ outbox.JournalStore = (*memory)(nil)

var errCorrupt = errors.New("headers: not JSON")

// within runs f in tx, or in a transaction of its own where tx is nil.
func within[A any](ctx context.Context, m *memory, tx outbox.Tx, name string, f func(*memoryTx) (A, error)) (A, error) {
	var answer A
	if m.is("cancelled context is ignored by the journal") {
		ctx = context.WithoutCancel(ctx)
	}
	if tx != nil && !m.is("caller's transaction is left out") {
		var any_ any
		err := m.query(ctx, tx, &any_, name, func(t *memoryTx) (any, error) {
			t.spoilt = t.spoilt || m.is("transactions are rolled back")
			return f(t)
		})
		if err == nil {
			answer = any_.(A)
		}
		return answer, err
	}
	err := m.db.write(ctx, func() (err error) {
		t := newMemoryTx(m.db)
		t.spoilt = m.is("transactions are rolled back")
		if m.db.oneWriter {
			m.db.writer = t
		}
		defer func() { t.finish(err == nil && !t.spoilt) }()
		answer, err = f(t)
		return err
	})
	return answer, err
}

func (m *memory) messageID(channel, key string) messageID { return messageID(m.id(channel, key)) }

func (m *memory) groupID(channel, group string) groupID {
	if m.is("channels share groups") {
		channel = "all"
	}
	return groupID{channel, group}
}

func (m *memory) PutRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.PutRow, begin time.Duration) ([]outbox.PutAnswer, error) {
	answers, err := within(ctx, m, tx, "put", func(t *memoryTx) ([]outbox.PutAnswer, error) {
		return m.putRows(ctx, t, channel, rows, begin)
	})
	for _, a := range answers {
		if a.Created {
			m.hint(outbox.Hint{Channel: outbox.Channel{System: outbox.SystemJournal, Name: channel}, Version: a.Row.Version})
			break
		}
	}
	if m.is("answers are sorted") {
		slices.SortFunc(answers, func(a, b outbox.PutAnswer) int { return cmp.Compare(a.Row.Key, b.Row.Key) })
	}
	return answers, err
}

func (m *memory) putRows(ctx context.Context, t *memoryTx, channel string, rows []outbox.PutRow, begin time.Duration) ([]outbox.PutAnswer, error) {
	found := map[string]outbox.Row{}
	for _, r := range rows {
		if there, ok := t.message(m.messageID(channel, r.Key)); ok && m.is("put looks before it waits") {
			found[r.Key] = there.Row
		}
	}
	if err := m.lockPut(ctx, t, channel, rows); err != nil {
		return nil, err
	}
	if begin > 0 && !m.is("begun put ignores its group") {
		if key := m.blockedPut(t, channel, rows); key != "" {
			t.spoilt = m.is("refusal spoils the transaction")
			return nil, fmt.Errorf("put key %q: %w", key, outbox.ErrBlocked)
		}
	}
	if m.is("numbered by key") {
		rows = slices.Clone(rows)
		slices.SortFunc(rows, func(a, b outbox.PutRow) int { return cmp.Compare(a.Key, b.Key) })
	}
	answers := []outbox.PutAnswer{}
	for _, r := range rows {
		if m.is("one delay for all") {
			r.Delay = rows[0].Delay
		}
		if there, ok := found[r.Key]; ok {
			answers = append(answers, outbox.PutAnswer{Row: there})
			continue
		}
		answers = append(answers, m.putRow(t, channel, r, begin))
	}
	return answers, nil
}

// lockPut locks groups, then the keys that are new: nobody may create them meanwhile.
func (m *memory) lockPut(ctx context.Context, t *memoryTx, channel string, rows []outbox.PutRow) error {
	groups, ids := map[string]bool{}, []messageID{}
	for _, r := range rows {
		ids = append(ids, m.messageID(channel, r.Key))
		if r.Group != "" && !m.is("put does not lock its group") {
			groups[r.Group] = true
		}
	}
	for _, g := range slices.Sorted(maps.Keys(groups)) {
		if err := t.lock(ctx, m.groupID(channel, g)); err != nil {
			return err
		}
	}
	slices.SortFunc(ids, func(a, b messageID) int { return cmp.Compare(a.key, b.key) })
	for _, id := range ids {
		if m.is("putters of a key do not wait") {
			continue
		}
		mine := t.db.locks[id] == t
		if err := t.lock(ctx, id); err != nil {
			return err
		}
		if _, there := t.message(id); there && !mine {
			delete(t.db.locks, id)
		}
	}
	return nil
}

// blockedPut returns the key of a message that cannot be begun.
func (m *memory) blockedPut(t *memoryTx, channel string, rows []outbox.PutRow) string {
	new := map[string]bool{}
	for _, r := range rows {
		if _, there := t.message(m.messageID(channel, r.Key)); there && !m.is("begun put of an existing key is blocked") || r.Group == "" {
			continue
		}
		if new[r.Group] || m.behind(t, channel, r.Group, 1<<62) {
			return r.Key
		}
		new[r.Group] = true
	}
	return ""
}

// behind returns whether a message with a number is not next in its group.
func (m *memory) behind(t *memoryTx, channel, group string, number outbox.Version) bool {
	if t.group(m.groupID(channel, group)).until.After(m.now()) {
		return true
	}
	for _, r := range t.of(channel) {
		if r.Group == group && r.Version < number && r.State != outbox.StateSent {
			return true
		}
	}
	return false
}

func (m *memory) putRow(t *memoryTx, channel string, p outbox.PutRow, begin time.Duration) outbox.PutAnswer {
	id := m.messageID(channel, p.Key)
	if r, there := t.message(id); there {
		t.spoilt = m.is("existing key is a serialization failure")
		differs := string(r.Payload) != string(p.Payload) || r.Group != p.Group
		if m.is("put overwrites the payload") {
			r.Payload = m.payload(p.Payload)
			t.setMessage(id, r)
		}
		if m.is("put makes a message due again") {
			r.Due = m.now()
			t.setMessage(id, r)
		}
		if m.is("existing key delays its group") && p.Group != "" {
			t.setGroup(m.groupID(channel, p.Group), memoryGroup{until: later(m.now(), p.Delay)})
		}
		if m.is("existing message comes without its payload") {
			r.Payload = nil
		}
		if m.is("another group does not differ") {
			differs = string(r.Payload) != string(p.Payload)
		}
		return outbox.PutAnswer{Row: r.Row, Differs: differs && !m.is("nothing differs"), Created: m.is("existing message is created")}
	}
	r := m.fresh(t, channel, p, begin)
	if r.claimed && r.Group != "" && !m.is("begun message does not hold its group") {
		t.setGroup(m.groupID(channel, r.Group), memoryGroup{until: r.LeaseUntil, token: r.Token})
	}
	t.setMessage(id, r)
	if m.is("put outside the transaction") {
		t.db.messages[id] = &r
	}
	answer := r.Row
	answer.Payload, answer.Header = nil, nil
	return outbox.PutAnswer{Row: answer, Created: true}
}

// fresh returns a new message.
func (m *memory) fresh(t *memoryTx, channel string, p outbox.PutRow, begin time.Duration) memoryMessage {
	now := m.now()
	t.db.ids++
	r := memoryMessage{Row: outbox.Row{
		ID: t.db.ids, Key: p.Key, Group: p.Group, Version: t.db.draw(now), Payload: m.payload(p.Payload), Header: maps.Clone(p.Header),
		State: outbox.StatePending, StagedAt: now, Due: later(now, p.Delay),
	}}
	if len(r.Header) == 0 && !m.is("empty header is not nil") {
		r.Header = nil
	}
	if m.is("delay of a put is ignored") {
		r.Due = now
	}
	switch m.defect {
	case "numbers are the clock":
		r.Version = outbox.Version(now.UnixMicro())
	case "numbers are counted by channel":
		r.Version = outbox.Version(len(t.of(channel)) + 1)
	}
	if begin > 0 && !m.is("begin of a put is ignored") {
		t.db.token++
		r.Token, r.LeaseUntil, r.State, r.claimed = t.db.token, later(now, begin), outbox.StateSending, true
		if r.Attempt = 1; m.is("begun put does not count an attempt") {
			r.Attempt = 0
		}
	}
	return r
}

func (m *memory) BeginMessage(ctx context.Context, tx outbox.Tx, channel, key string, lease time.Duration) (outbox.Row, error) {
	return within(ctx, m, tx, "begin", func(t *memoryTx) (outbox.Row, error) {
		id := m.messageID(channel, key)
		r, there := t.message(id)
		g := m.groupID(channel, r.Group)
		var refused error
		switch {
		case !there && !m.is("begin of no message is a state"):
			refused = outbox.ErrNotFound
		case r.State != outbox.StatePending && r.State != outbox.StateFailed && !(m.is("lapsed message is begun") && !m.leasedMessage(r)):
			refused = outbox.ErrState
		case r.Group != "" && m.behind(t, channel, r.Group, r.Version) && !m.is("begin ignores the group"):
			refused = outbox.ErrBlocked
		case t.held(id) || r.Group != "" && t.held(g) && !m.is("begin overrides a held group"):
			refused = outbox.ErrBusy
		case m.is("begin waits until due") && r.Due.After(m.now()):
			refused = outbox.ErrState
		}
		if refused != nil && m.is("refusal spoils the transaction") {
			t.spoilt = true
		}
		if refused != nil {
			return outbox.Row{}, fmt.Errorf("begin key %q: %w", key, refused)
		}
		t.db.token++
		r = m.lease(r, t.db.token, later(m.now(), lease))
		if r.Due.After(m.now()) && !m.is("message begun early stays away") {
			r.Due = m.now() // so that it comes back when its lease lapses
		}
		t.setMessage(id, r)
		if r.Group != "" && !m.is("begun message does not hold its group") {
			t.setGroup(g, memoryGroup{until: r.LeaseUntil, token: r.Token})
		}
		return r.Row, nil
	})
}

// lease gives a message to a holder.
func (m *memory) lease(r memoryMessage, token outbox.Token, until time.Time) memoryMessage {
	counts := !r.claimed || r.lapses >= 2
	switch m.defect {
	case "lapse in company counts":
		counts = true
	case "lapse never counts":
		counts = !r.claimed
	case "attempts of messages are not counted":
		counts = false
	}
	if counts {
		r.Attempt++
	}
	if r.claimed {
		r.lapses++
	}
	if r.Ambiguous, r.Alone = r.lapses > 0, r.lapses > 1; r.claimed && m.is("lapsed message is not ambiguous") {
		r.Ambiguous = false
	}
	if !m.is("tokens of messages stay") || r.Token == 0 {
		r.Token = token
	}
	r.LeaseUntil, r.State, r.claimed, r.ended = until, outbox.StateSending, true, 0
	if m.is("claim is not sending") {
		r.State = outbox.StatePending
	}
	return r
}

func (m *memory) leasedMessage(r memoryMessage) bool {
	switch m.defect {
	case "leases of messages never lapse":
		return r.claimed
	case "leases of messages are ignored":
		return false
	}
	return r.LeaseUntil.After(m.now())
}

func (m *memory) ListMessages(ctx context.Context, tx outbox.Tx, channel string, l outbox.MessageList) ([]outbox.Row, error) {
	if m.is("list is outside the transaction") {
		tx = nil
	}
	read := func(t *memoryTx) ([]outbox.Row, error) {
		rows := []outbox.Row{}
		for _, r := range t.of(channel) {
			if r.Version <= l.After && !(m.is("page repeats its first message") && r.Version == l.After) || !m.matches(r, l.MessageFilter) {
				continue
			}
			r.Ambiguous, r.Alone = false, false
			if !l.Payloads && !m.is("list of messages has payloads") {
				r.Payload = nil
			}
			rows = append(rows, r.Row)
		}
		slices.SortFunc(rows, func(a, b outbox.Row) int {
			if m.is("listed by key") {
				return cmp.Compare(a.Key, b.Key)
			}
			return cmp.Compare(a.Version, b.Version)
		})
		return rows[:min(len(rows), l.Limit)], nil
	}
	if tx != nil {
		return within(ctx, m, tx, "list", read)
	}
	var rows []outbox.Row
	err := m.db.view(func() (err error) {
		rows, err = read(newMemoryTx(m.db))
		return err
	})
	return rows, err
}

// matches returns whether a filter selects a message.
func (m *memory) matches(r memoryMessage, f outbox.MessageFilter) bool {
	switch {
	case f.Key != "" && r.Key != f.Key && !m.is("key filter is a prefix"):
		return false
	case f.Key != "" && m.is("key filter is a prefix") && r.Key[:min(len(r.Key), len(f.Key))] != f.Key:
		return false
	case f.Group != "" && r.Group != f.Group && !m.is("group filter is ignored"):
		return false
	case f.Code != "" && r.Code != f.Code && !m.is("code filter is ignored"):
		return false
	}
	return len(f.States) == 0 || slices.Contains(f.States, r.State) || m.is("state filter is ignored")
}
