package filestore

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

var errOnlyAsked = errors.New("only asked")

// conflicts returns the keys of rows under which the target holds something
// else. It puts them in transactions that it rolls back: the target itself
// tells what it would answer.
func (m *mover) conflicts(ctx context.Context, channel string, rows []outbox.Row) (keys []string, err error) {
	for len(rows) > 0 && err == nil {
		part := rows[:min(len(rows), moveBatch)]
		rows = rows[len(part):]
		err = m.to.Transact(ctx, nil, func(tx *sql.Tx) error {
			answers, err := m.to.PutRows(ctx, outbox.SQL(tx), channel, m.putRows(part), 0)
			if err != nil {
				return err
			}
			for i, a := range answers {
				if conflicting(part[i], a) {
					keys = append(keys, part[i].Key)
				}
			}
			return errOnlyAsked
		})
		if errors.Is(err, errOnlyAsked) {
			err = nil
		}
	}
	if err != nil {
		return nil, fmt.Errorf("look for the keys in the target: %w", err)
	}
	return keys, nil
}

// conflicting tells whether the target holds another message under the key of r.
// One that was sent may have had to arrive without its group.
func conflicting(r outbox.Row, a outbox.PutAnswer) bool {
	if r.State == outbox.StateSent && !a.Created && a.Row.State == outbox.StateSent && a.Row.Group == "" {
		return !bytes.Equal(r.Payload, a.Row.Payload)
	}
	return a.Differs
}

func (m *mover) putRows(rows []outbox.Row) []outbox.PutRow {
	now := m.now()
	put := make([]outbox.PutRow, len(rows))
	for i, r := range rows {
		put[i] = outbox.PutRow{Key: r.Key, Group: r.Group, Payload: r.Payload, Header: r.Header}
		if r.State == outbox.StatePending || r.State == outbox.StateFailed {
			put[i].Delay = max(0, r.Due.Sub(now))
		}
	}
	return put
}

// put puts messages into the target, each in the state in which it arrives, in
// one transaction: no message is ever seen there half arrived. It returns those
// that the target now has; the groups of others are blocked there.
func (m *mover) put(ctx context.Context, channel string, rows []outbox.Row, blocked map[string]bool) ([]outbox.Row, error) {
	var taken []outbox.Row
	err := m.to.Transact(ctx, nil, func(tx *sql.Tx) error {
		p := &moveTx{m, outbox.SQL(tx), channel, blocked}
		var err error
		taken, err = p.all(ctx, rows)
		return err
	})
	return taken, err
}

// moveTx is the transaction of one batch.
type moveTx struct {
	*mover
	tx      outbox.Tx
	channel string
	blocked map[string]bool // groups
}

// all puts what has ended before what is open, which may come behind it.
func (p *moveTx) all(ctx context.Context, rows []outbox.Row) ([]outbox.Row, error) {
	var open, ended, ordered []outbox.Row
	for _, r := range rows {
		switch {
		case arrival(&r, p.o.Resend) == outbox.StatePending:
			open = append(open, r)
		case r.Group == "":
			ended = append(ended, r)
		default:
			ordered = append(ordered, r)
		}
	}
	if err := p.ended(ctx, ended); err != nil {
		return nil, err
	}
	taken := ended
	for _, r := range ordered { // one by one: a group has one lease
		err := p.ended(ctx, []outbox.Row{r})
		if errors.Is(err, outbox.ErrBlocked) && r.State == outbox.StateSent {
			r.Group = "" // its order does not matter any more; that its key is known does
			err = p.ended(ctx, []outbox.Row{r})
		}
		switch {
		case errors.Is(err, outbox.ErrBlocked):
			p.blocked[r.Group] = true
		case err != nil:
			return nil, err
		default:
			taken = append(taken, r)
		}
	}
	var may []outbox.Row
	for _, r := range open {
		if !p.blocked[r.Group] {
			may = append(may, r)
		}
	}
	_, err := p.rows(ctx, may, 0)
	return append(taken, may...), err
}

// rows puts rows and refuses those that conflict, which others have put since
// the move began.
func (p *moveTx) rows(ctx context.Context, rows []outbox.Row, begin time.Duration) ([]outbox.PutAnswer, error) {
	if len(rows) == 0 {
		return nil, nil
	}
	answers, err := p.to.PutRows(ctx, p.tx, p.channel, p.putRows(rows), begin)
	if err != nil {
		return nil, err
	}
	for i, a := range answers {
		if conflicting(rows[i], a) {
			return nil, fmt.Errorf("%w: somebody has put another message with key %q meanwhile: discard the wrong one", outbox.ErrState, rows[i].Key)
		}
	}
	return answers, nil
}

// ended puts messages that have ended, and ends them. One that the target had
// already and has not sent is ended too: it would be sent otherwise.
func (p *moveTx) ended(ctx context.Context, rows []outbox.Row) error {
	answers, err := p.rows(ctx, rows, moveLease)
	if err != nil {
		return err
	}
	var ends []outbox.Settlement
	for i, a := range answers {
		held := a.Row
		if !a.Created {
			if a.Row.State != outbox.StatePending && a.Row.State != outbox.StateFailed {
				continue // it has ended there, or is being sent: the target knows better
			}
			if held, err = p.to.BeginMessage(ctx, p.tx, p.channel, a.Row.Key, moveLease); err != nil {
				return err
			}
		}
		ends = append(ends, p.end(rows[i], held))
	}
	if len(ends) == 0 {
		return nil
	}
	results, err := p.to.SettleMessages(ctx, p.tx, p.channel, ends)
	if err != nil {
		return err
	}
	for i, r := range results {
		if r != outbox.ResultDone {
			return fmt.Errorf("end key %q: %w", ends[i].Row.Key, outbox.ErrBusy)
		}
	}
	return nil
}

// end ends the message that is held as r has ended.
func (p *moveTx) end(r, held outbox.Row) outbox.Settlement {
	s := outbox.Settlement{Row: held, Outcome: outbox.OutcomeUnknown, Error: r.LastError, Code: r.Code}
	switch r.State {
	case outbox.StateDead:
		s.Outcome = outbox.OutcomeDead
	case outbox.StateSent:
		s = outbox.Settlement{Row: held, Outcome: outbox.OutcomeDone, Ref: r.Ref, Keep: true}
	}
	return s
}
