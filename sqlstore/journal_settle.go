package sqlstore

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// SettleMessages implements outbox.JournalStore.
func (s *Store) SettleMessages(ctx context.Context, tx outbox.Tx, channel string, ss []outbox.Settlement) ([]outbox.Result, error) {
	if tx == nil {
		return nil, fmt.Errorf("settle messages of channel %q: %w: it is nil", channel, outbox.ErrTx)
	}
	return s.settleMessages(ctx, tx, channel, ss)
}

// settleMessages makes one call for those that are kept once they are sent, and
// one for those that are not: nearly always there is only one kind.
func (s *Store) settleMessages(ctx context.Context, tx outbox.Tx, channel string, ss []outbox.Settlement) ([]outbox.Result, error) {
	var parts [2][]int
	for i, x := range ss {
		kind := 0
		if x.Keep && x.Outcome == outbox.OutcomeDone {
			kind = 1
		}
		parts[kind] = append(parts[kind], i)
	}
	results := make([]outbox.Result, len(ss))
	err := s.doing(ctx, tx, func(ctx context.Context, run dialect.Runner) error {
		for kind, part := range parts {
			if len(part) == 0 {
				continue
			}
			some, err := s.d.SettleMessages(ctx, run, settlements(channel, ss, part, kind == 1), s.now())
			if err != nil {
				return err
			}
			for j, i := range part {
				results[i] = outbox.Result(some[j])
			}
		}
		return nil
	}, "settle %d messages of channel %q", len(ss), channel)
	if err != nil {
		return nil, err
	}
	return results, nil
}

// settlements are those of ss that part names, as the dialect takes them.
func settlements(channel string, ss []outbox.Settlement, part []int, keep bool) dialect.SettleMessages {
	n := len(part)
	end := dialect.SettleMessages{
		Channel: channel, Keep: keep,
		Places: make([]dialect.Place, n), Keys: make([]string, n), Tokens: make([]int64, n),
	}
	plain := true
	for j, i := range part {
		x := &ss[i]
		end.Places[j], end.Keys[j], end.Tokens[j] = dialect.Place(x.Row.ID), x.Row.Key, int64(x.Row.Token)
		if x.Row.Group != "" {
			if end.Groups == nil {
				end.Groups = make([]string, n)
			}
			end.Groups[j] = x.Row.Group
		}
		plain = plain && x.Outcome == outbox.OutcomeDone && x.Ref == ""
		if x.Doubt != outbox.DoubtKept && end.Doubts == nil {
			end.Doubts = make([]int16, n)
		}
		if x.Doubt != outbox.DoubtKept {
			end.Doubts[j] = int16(x.Doubt)
		}
		if x.Again && end.Again == nil {
			end.Again = make([]bool, n)
		}
		if x.Again {
			end.Again[j] = true
		}
	}
	if plain {
		return end
	}
	end.Outcomes, end.Delays = make([]int16, n), make([]int64, n)
	end.Errors, end.Refs, end.Codes = make([]string, n), make([]string, n), make([]string, n)
	for j, i := range part {
		x := &ss[i]
		end.Outcomes[j], end.Delays[j] = int16(x.Outcome), micros(x.Delay)
		end.Errors[j], end.Refs[j], end.Codes[j] = outbox.ErrorText(x.Error), x.Ref, x.Code
	}
	return end
}

// ExtendMessages implements outbox.JournalStore.
func (s *Store) ExtendMessages(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	if tx == nil {
		return nil, fmt.Errorf("extend the leases of messages of channel %q: %w: it is nil", channel, outbox.ErrTx)
	}
	return s.extendMessages(ctx, tx, channel, rows, d)
}

func (s *Store) extendMessages(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	n := len(rows)
	if n == 0 {
		return nil, nil
	}
	ask := dialect.ExtendMessages{
		Channel: channel, Lease: micros(d), Keys: make([]string, n), Tokens: make([]int64, n),
	}
	for i, r := range rows {
		ask.Keys[i], ask.Tokens[i] = r.Key, int64(r.Token)
	}
	var results []int16
	err := s.doing(ctx, tx, func(ctx context.Context, run dialect.Runner) (err error) {
		results, err = s.d.ExtendMessages(ctx, run, ask, s.now())
		return err
	}, "extend the leases of %d messages of channel %q", n, channel)
	if err != nil {
		return nil, err
	}
	return asResults(results), nil
}
