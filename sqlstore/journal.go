package sqlstore

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

var _ outbox.JournalStore = (*Store)(nil)

func journalChannel(name string) outbox.Channel {
	return outbox.Channel{System: outbox.SystemJournal, Name: name}
}

// doing runs f in the caller's transaction, or in one of the store's own where
// tx is nil, and says what was being done when it failed. f may be run twice:
// it forgets what it has read before.
func (s *Store) doing(ctx context.Context, tx outbox.Tx, f func(ctx context.Context, run dialect.Runner) error, format string, args ...any) error {
	if tx == nil {
		err := s.d.Own(ctx, s.db, func(run dialect.Runner) error { return f(ctx, run) })
		return s.failed(ctx, err, format, args...)
	}
	if err := ctx.Err(); err != nil {
		return fmt.Errorf(format+": %w", append(args, err)...)
	}
	run := func(ctx context.Context, st dialect.Statement, scan func(dialect.Scanner) error) error {
		return s.eachIn(ctx, tx, st, func(rows outbox.Rows) error { return scan(rows) })
	}
	if err := f(s.d.CallerContext(ctx), run); err != nil {
		return s.inTx(ctx, tx, err, format, args...)
	}
	return nil
}

// PutRows implements outbox.JournalStore.
func (s *Store) PutRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.PutRow, begin time.Duration) ([]outbox.PutAnswer, error) {
	answers := make([]outbox.PutAnswer, 0, len(rows))
	var parts []dialect.PutMessages
	for part := range slices.Chunk(rows, s.d.StageLimit()) {
		p, err := putMessages(channel, part, begin)
		if err != nil {
			return nil, fmt.Errorf("put %s: %w", putting{channel, rows}, err)
		}
		parts = append(parts, p)
	}
	blocked := false
	err := s.doing(ctx, tx, func(ctx context.Context, run dialect.Runner) (err error) {
		answers = answers[:0]
		for _, p := range parts {
			if answers, err = s.put(ctx, run, p, answers); err != nil {
				break
			}
		}
		if blocked = errors.Is(err, dialect.ErrBlocked); blocked {
			return nil // the transaction is as good as before
		}
		return err
	}, "put %s", putting{channel, rows})
	switch {
	case err != nil:
		return nil, err
	case blocked:
		return nil, fmt.Errorf("put %s: %w", putting{channel, rows}, outbox.ErrBlocked)
	}
	s.hinter.TellPut(channel, rows, answers)
	return answers, nil
}

// putting is what is being put, for an error: its text is made only then.
type putting struct {
	channel string
	rows    []outbox.PutRow
}

func (p putting) String() string {
	if len(p.rows) == 1 {
		return fmt.Sprintf("key %q in channel %q", p.rows[0].Key, p.channel)
	}
	return fmt.Sprintf("%d messages in channel %q", len(p.rows), p.channel)
}

func putMessages(channel string, rows []outbox.PutRow, begin time.Duration) (dialect.PutMessages, error) {
	n := len(rows)
	p := dialect.PutMessages{
		Channel: channel, Begin: micros(begin),
		Keys: make([]string, n), Groups: make([]string, n), Payloads: make([][]byte, n), Headers: make([]string, n), Delays: make([]int64, n),
	}
	for i, r := range rows {
		p.Keys[i], p.Groups[i], p.Payloads[i], p.Delays[i] = r.Key, r.Group, r.Payload, micros(r.Delay)
		if r.Payload == nil {
			p.Payloads[i] = []byte{}
		}
		if len(r.Header) > 0 {
			text, err := json.Marshal(r.Header)
			if err != nil {
				return p, err
			}
			p.Headers[i] = string(text)
		}
	}
	return p, nil
}

// put writes up to StageLimit messages and appends their answers.
func (s *Store) put(ctx context.Context, run dialect.Runner, p dialect.PutMessages, answers []outbox.PutAnswer) ([]outbox.PutAnswer, error) {
	existing := make(map[int]outbox.Row)
	made, err := s.d.PutMessages(ctx, run, p, s.now(), func(i int, row dialect.Scanner) error {
		var r outbox.Row
		err := newMessageScan().scan(row, &r) // they are few
		existing[i] = r
		return err
	})
	if err != nil {
		return nil, err
	}
	for i, m := range made {
		a := outbox.PutAnswer{Row: existing[i], Created: m.Created, Differs: m.Differs}
		if m.Created {
			a.Row = outbox.Row{
				ID: m.At, Key: p.Keys[i], Group: p.Groups[i], Version: outbox.Version(m.Seq), Token: outbox.Token(m.Token),
				State: outbox.StatePending, StagedAt: instant(m.CreatedAt), Due: instant(m.Due),
			}
			if m.LeaseUntil > 0 {
				a.Row.State, a.Row.Attempt, a.Row.LeaseUntil = outbox.StateSending, 1, instant(m.LeaseUntil)
			}
		}
		answers = append(answers, a)
	}
	return answers, nil
}

// ClaimMessages implements outbox.JournalStore.
func (s *Store) ClaimMessages(ctx context.Context, tx outbox.Tx, c outbox.Claim) (outbox.Claimed, error) {
	cursor := s.cursors.of(journalChannel(c.Channel))
	from, full := cursor.from(c.Full)
	var reached int64
	claim := dialect.ClaimMessages{
		Channel: c.Channel, Limit: c.Limit, Lease: micros(c.Lease), From: from.due, FromGroup: from.group,
		Full: full, SkipEnded: c.SkipEnded, Reached: &reached,
	}
	var claimed outbox.Claimed
	start := time.Now()
	messages := newMessageScan(&claimed.Probe)
	err := s.doing(ctx, tx, func(ctx context.Context, run dialect.Runner) error {
		claimed, reached = outbox.Claimed{}, 0
		return s.d.ClaimMessages(ctx, run, claim, s.now(), func(row dialect.Scanner) error {
			claimed.Rows = another(claimed.Rows, c.Limit)
			return messages.scan(row, &claimed.Rows[len(claimed.Rows)-1])
		})
	}, "claim from channel %q", c.Channel)
	if err != nil {
		return outbox.Claimed{}, err
	}
	inTurn(claimed.Rows)
	for _, r := range slices.Backward(claimed.Rows) {
		if r.Group == "" {
			cursor.claimed(r.Due.UnixMicro())
			break
		}
	}
	if reached > 0 {
		cursor.reached(reached)
	}
	if full {
		cursor.passed(time.Since(start))
	}
	return claimed, nil
}

// inTurn sorts messages by their due times, those of a group by their numbers
// and in the place of the first one.
func inTurn(rows []outbox.Row) {
	slices.SortFunc(rows, func(a, b outbox.Row) int { return cmp.Compare(a.Version, b.Version) })
	heads := make(map[string]outbox.Row)
	for _, r := range rows {
		if _, ok := heads[r.Group]; !ok && r.Group != "" {
			heads[r.Group] = r
		}
	}
	head := func(r outbox.Row) outbox.Row {
		if h, ok := heads[r.Group]; ok {
			return h
		}
		return r
	}
	slices.SortStableFunc(rows, func(a, b outbox.Row) int {
		x, y := head(a), head(b)
		return cmp.Or(x.Due.Compare(y.Due), cmp.Compare(x.Version, y.Version))
	})
}

// BeginMessage implements outbox.JournalStore.
func (s *Store) BeginMessage(ctx context.Context, tx outbox.Tx, channel, key string, lease time.Duration) (outbox.Row, error) {
	var row outbox.Row
	var result int16
	err := s.doing(ctx, tx, func(ctx context.Context, run dialect.Runner) (err error) {
		result, err = s.d.BeginMessage(ctx, run, channel, key, micros(lease), s.now(), func(r dialect.Scanner) error {
			return newMessageScan().scan(r, &row)
		})
		return err
	}, "begin key %q of channel %q", key, channel)
	if err != nil {
		return outbox.Row{}, err
	}
	refused := map[int16]error{
		dialect.ResultNotFound: outbox.ErrNotFound, dialect.ResultState: outbox.ErrState,
		dialect.ResultBusy: outbox.ErrBusy, dialect.ResultBlocked: outbox.ErrBlocked,
	}[result]
	if refused != nil {
		return outbox.Row{}, fmt.Errorf("begin key %q of channel %q: %w", key, channel, refused)
	}
	return row, nil
}

// ListMessages implements outbox.JournalStore.
func (s *Store) ListMessages(ctx context.Context, tx outbox.Tx, channel string, l outbox.MessageList) ([]outbox.Row, error) {
	var list []outbox.Row
	messages := newMessageScan()
	filter := messageFilter(channel, l.MessageFilter, l.After, l.Limit)
	err := s.doing(ctx, tx, func(ctx context.Context, run dialect.Runner) error {
		list = nil
		return s.d.ListMessages(ctx, run, filter, l.Payloads, s.now(), func(row dialect.Scanner) error {
			list = append(list, outbox.Row{})
			r := &list[len(list)-1]
			err := messages.scan(row, r)
			if !l.Payloads {
				r.Payload = nil
			}
			return err
		})
	}, "list channel %q", channel)
	return list, err
}

// AmendMessages implements outbox.JournalStore.
func (s *Store) AmendMessages(ctx context.Context, tx outbox.Tx, channel string, a outbox.Amendment) (outbox.Amended, error) {
	var count, last int64
	amend := dialect.Amend{
		MessageFilter: messageFilter(channel, a.MessageFilter, a.After, a.Limit), Action: int16(a.Action), Ref: a.Ref, DryRun: a.DryRun,
	}
	err := s.doing(ctx, tx, func(ctx context.Context, run dialect.Runner) (err error) {
		count, last, err = s.d.AmendMessages(ctx, run, amend, s.now())
		return err
	}, "amend messages of channel %q", channel)
	if err != nil {
		return outbox.Amended{}, err
	}
	if tx == nil && count > 0 && !a.DryRun && (a.Action == outbox.ActionRetry || a.Action == outbox.ActionPending) {
		s.hinter.Tell(outbox.Hint{Channel: journalChannel(channel)})
	}
	return outbox.Amended{Count: int(count), Last: outbox.Version(last)}, nil
}

// PurgeMessages implements outbox.JournalStore.
func (s *Store) PurgeMessages(ctx context.Context, channel string, p outbox.Purge) (int, error) {
	purge := dialect.PurgeMessages{Channel: channel, Age: micros(p.Age), Limit: p.Limit, DryRun: p.DryRun}
	if !p.Before.IsZero() {
		purge.Before = before(p.Before)
	}
	for _, state := range p.States {
		purge.Outcomes = append(purge.Outcomes, map[outbox.State]int16{
			outbox.StateSent: dialect.OutcomeDone, outbox.StateDead: dialect.OutcomeDead, outbox.StateUnknown: dialect.OutcomeUnknown,
		}[state])
	}
	var n int64
	err := s.doing(ctx, nil, func(ctx context.Context, run dialect.Runner) (err error) {
		n, err = s.d.PurgeMessages(ctx, run, purge, s.now())
		return err
	}, "purge channel %q", channel)
	return int(n), err
}

// before is a time as the dialects take it, to whom 0 is none at all. Where
// microseconds do not reach, it is the nearest that they do.
func before(t time.Time) int64 {
	switch first, last := time.UnixMicro(math.MinInt64), time.UnixMicro(math.MaxInt64); {
	case t.Before(first):
		t = first
	case t.After(last):
		t = last
	}
	return cmp.Or(t.UnixMicro(), -1) // nothing ended within the microsecond between
}

func messageFilter(channel string, f outbox.MessageFilter, after outbox.Version, limit int) dialect.MessageFilter {
	filter := dialect.MessageFilter{
		Channel: channel, Key: f.Key, Group: f.Group, Code: f.Code, After: int64(after), Limit: limit,
	}
	for _, state := range f.States {
		filter.States = append(filter.States, int16(state))
	}
	return filter
}
