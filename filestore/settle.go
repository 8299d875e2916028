package filestore

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// Settle implements outbox.RelayStore.
func (s *Store) Settle(ctx context.Context, ch outbox.Channel, ss []outbox.Settlement) ([]outbox.Result, error) {
	if err := onlyJournal(ch); err != nil {
		return nil, fmt.Errorf("settle %d messages: %w", len(ss), err)
	}
	results, err := change(ctx, s, nil, func(st *state, now time.Time) ([]outbox.Result, error) {
		results := make([]outbox.Result, len(ss))
		for i := range ss {
			results[i] = st.settle(ch.Name, &ss[i], now)
		}
		return results, nil
	})
	if err != nil {
		return nil, fmt.Errorf("settle %d messages of channel %q: %w", len(ss), ch.Name, err)
	}
	return results, nil
}

func (st *state) settle(channel string, s *outbox.Settlement, now time.Time) outbox.Result {
	sl := st.find(channel, s.Row.Key)
	switch {
	case sl == nil && s.Again:
		return outbox.ResultDone
	case sl == nil, sl.m.row.Token != s.Row.Token:
		return outbox.ResultStale
	case !sl.m.sending() && sl.m.ended == s.Outcome: // the same again
		return outbox.ResultDone
	case !sl.m.sending():
		return outbox.ResultStale
	case s.Outcome == outbox.OutcomeDone && !s.Keep:
		st.set(sl, nil)
	default:
		st.set(sl, sl.m.settle(s, now))
	}
	return outbox.ResultDone
}

// settle returns what a settlement makes of a message that stays.
func (m *message) settle(s *outbox.Settlement, now time.Time) *message {
	r := *m
	r.ended, r.lapses, r.row.LeaseUntil = s.Outcome, 0, time.Time{}
	if s.Outcome != outbox.OutcomeDone && s.Error != "" {
		r.row.LastError, r.row.Code = outbox.ErrorText(s.Error), strings.ToValidUTF8(s.Code, "?")
	}
	switch s.Outcome {
	case outbox.OutcomeRetry, outbox.OutcomeRelease:
		if s.Outcome == outbox.OutcomeRelease {
			r.row.Attempt--
		}
		switch s.Doubt {
		case outbox.DoubtKept:
			r.lapses = min(m.lapses, 1)
		case outbox.DoubtRaised:
			r.lapses = 1
		}
		r.row.Due = later(now, s.Delay)
		r.open()
	case outbox.OutcomeDone:
		r.row.Ref = strings.ToValidUTF8(s.Ref, "?")
		r.end(outbox.StateSent, now)
	case outbox.OutcomeDead:
		r.end(outbox.StateDead, now)
	case outbox.OutcomeUnknown:
		r.end(outbox.StateUnknown, now)
	}
	return &r
}

// open makes the message pending, or failed where it has attempts.
func (m *message) open() {
	m.row.CompletedAt = time.Time{}
	if m.row.State = outbox.StateFailed; m.row.Attempt == 0 {
		m.row.State = outbox.StatePending
	}
}

func (m *message) end(s outbox.State, now time.Time) { m.row.State, m.row.CompletedAt = s, now }

// Extend implements outbox.RelayStore.
func (s *Store) Extend(ctx context.Context, ch outbox.Channel, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	if err := onlyJournal(ch); err != nil {
		return nil, fmt.Errorf("extend %d leases: %w", len(rows), err)
	}
	results, err := change(ctx, s, nil, func(st *state, now time.Time) ([]outbox.Result, error) {
		results := make([]outbox.Result, len(rows))
		var groups map[string]*group // read only if a message has one
		for i := range rows {
			results[i] = outbox.ResultStale
			sl := st.find(ch.Name, rows[i].Key)
			if sl == nil || sl.m.row.Token != rows[i].Token || !sl.m.sending() {
				continue
			}
			if name := sl.m.row.Group; name != "" {
				if groups == nil {
					groups = st.groups(ch.Name)
				}
				if groups[name].token != sl.m.row.Token { // somebody took the group since
					continue
				}
			}
			m := *sl.m
			m.row.LeaseUntil = later(now, d)
			st.set(sl, &m)
			results[i] = outbox.ResultDone
		}
		return results, nil
	})
	if err != nil {
		return nil, fmt.Errorf("extend the leases of %d messages of channel %q: %w", len(rows), ch.Name, err)
	}
	return results, nil
}

// SettleMessages implements outbox.JournalStore: it is refused by outbox.ErrTx,
// for a file has no transactions of its callers. Use Settle.
func (s *Store) SettleMessages(_ context.Context, _ outbox.Tx, channel string, _ []outbox.Settlement) ([]outbox.Result, error) {
	return nil, fmt.Errorf("settle messages of channel %q: %w", channel, errNoTx)
}

// ExtendMessages is refused as SettleMessages is. Use Extend.
func (s *Store) ExtendMessages(_ context.Context, _ outbox.Tx, channel string, _ []outbox.Row, _ time.Duration) ([]outbox.Result, error) {
	return nil, fmt.Errorf("extend the leases of messages of channel %q: %w", channel, errNoTx)
}
