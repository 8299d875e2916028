package filestore

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// ListMessages implements outbox.JournalStore.
func (s *Store) ListMessages(ctx context.Context, tx outbox.Tx, channel string, l outbox.MessageList) ([]outbox.Row, error) {
	rows, err := read(ctx, s, tx, func(st *state, _ time.Time) ([]outbox.Row, error) {
		var rows []outbox.Row
		for _, m := range st.matching(channel, &l.MessageFilter, l.After) {
			if len(rows) == l.Limit {
				break
			}
			r := m.out()
			if !l.Payloads {
				r.Payload = nil
			}
			rows = append(rows, r)
		}
		return rows, nil
	})
	if err != nil {
		return nil, fmt.Errorf("list channel %q: %w", channel, err)
	}
	return rows, nil
}

// matching yields what a filter selects, after a number.
func (st *state) matching(channel string, f *outbox.MessageFilter, after outbox.Version) func(func(*slot, *message) bool) {
	return func(yield func(*slot, *message) bool) {
		if f.Key != "" {
			if sl := st.find(channel, f.Key); sl != nil && sl.m.row.Version > after && sl.m.matches(f) {
				yield(sl, sl.m)
			}
			return
		}
		for sl, m := range st.of(channel) {
			if m.row.Version > after && m.matches(f) && !yield(sl, m) {
				return
			}
		}
	}
}

// matches leaves the key out.
func (m *message) matches(f *outbox.MessageFilter) bool {
	return (f.Group == "" || f.Group == m.row.Group) && (f.Code == "" || f.Code == m.row.Code) &&
		(len(f.States) == 0 || slices.Contains(f.States, m.row.State))
}

// AmendMessages implements outbox.JournalStore.
func (s *Store) AmendMessages(ctx context.Context, tx outbox.Tx, channel string, a outbox.Amendment) (outbox.Amended, error) {
	do := change[outbox.Amended]
	if a.DryRun {
		do = read
	}
	done, err := do(ctx, s, tx, func(st *state, now time.Time) (outbox.Amended, error) {
		var done outbox.Amended
		var last outbox.Version
		for sl, m := range st.matching(channel, &a.MessageFilter, a.After) {
			amended, ok := m.amend(&a, now)
			if !ok {
				continue
			}
			if done.Count == a.Limit { // there is more
				done.Last = last
				break
			}
			if last = m.row.Version; !a.DryRun {
				st.set(sl, amended)
			}
			done.Count++
		}
		return done, nil
	})
	if err != nil {
		return outbox.Amended{}, fmt.Errorf("amend messages of channel %q: %w", channel, err)
	}
	if done.Count > 0 && !a.DryRun { // what was amended may have blocked others
		s.hinter.Tell(outbox.Hint{Channel: journal(channel)})
	}
	return done, nil
}

// amend returns what an amendment makes of the message, nil where it goes, and
// whether the message's state allows it.
func (m *message) amend(a *outbox.Amendment, now time.Time) (*message, bool) {
	r := *m
	r.ended = 0
	switch state := m.row.State; a.Action {
	case outbox.ActionDiscard:
		return nil, true
	case outbox.ActionRetry:
		r.row.Attempt, r.row.Due = 0, now
		r.open()
		return &r, state == outbox.StateFailed || state == outbox.StateDead || state == outbox.StateUnknown
	case outbox.ActionSent:
		r.row.Ref = strings.ToValidUTF8(a.Ref, "?")
		r.end(outbox.StateSent, now)
	case outbox.ActionDead:
		r.end(outbox.StateDead, now)
	case outbox.ActionPending:
		r.row.Due = now
		r.open()
	default:
		return nil, false
	}
	return &r, m.row.State == outbox.StateUnknown
}

// PurgeMessages implements outbox.JournalStore.
func (s *Store) PurgeMessages(ctx context.Context, channel string, p outbox.Purge) (int, error) {
	do := change[int]
	if p.DryRun {
		do = read
	}
	n, err := do(ctx, s, nil, func(st *state, now time.Time) (int, error) {
		before := p.Before
		if before.IsZero() {
			before = now.Add(-p.Age)
		}
		var old []*slot
		for sl, m := range st.of(channel) {
			if m.hasEnded() && slices.Contains(p.States, m.row.State) && m.row.CompletedAt.Before(before) {
				old = append(old, sl)
			}
		}
		slices.SortStableFunc(old, func(a, b *slot) int { return a.m.row.CompletedAt.Compare(b.m.row.CompletedAt) })
		old = old[:min(len(old), p.Limit)]
		for _, sl := range old {
			if !p.DryRun {
				st.set(sl, nil)
			}
		}
		return len(old), nil
	})
	if err != nil {
		return 0, fmt.Errorf("purge channel %q: %w", channel, err)
	}
	return n, nil
}
