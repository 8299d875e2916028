package sqlstore

import (
	"encoding/json"
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// rowScan scans rows as dialect.Pending orders their columns: of one statement
// all into the same place, or each destination were an allocation for each row.
type rowScan struct {
	row                outbox.Row
	staged, due, until int64
	headers            string
	dest               []any
}

// newRowScan scans what follows the columns into more.
func newRowScan(more ...any) *rowScan {
	s := &rowScan{}
	r := &s.row
	s.dest = append([]any{
		(*dialect.Place)(&r.ID), &r.Key, (*int64)(&r.Version), (*int64)(&r.Token), &r.Attempt, &r.Payload, &s.headers,
		&r.Deleted, &s.staged, &s.due, &s.until, &r.LastError,
	}, more...)
	return s
}

func (s *rowScan) scan(row dialect.Scanner, to *outbox.Row) error {
	s.row, s.headers = outbox.Row{}, "" // not all are set, where they are empty
	if err := row.Scan(s.dest...); err != nil {
		return err
	}
	*to = s.row
	to.StagedAt, to.Due = instant(s.staged), instant(s.due)
	switch {
	case s.until > 0:
		to.LeaseUntil = instant(s.until)
	case s.until == 0: // never leased: what is in token is no lease's
		to.Token = 0
	}
	finish(to, s.headers)
	return nil
}

// another appends a row to those of a claim: most have few, and a full one
// grows once.
func another(rows []outbox.Row, limit int) []outbox.Row {
	if len(rows) == cap(rows) {
		more := min(limit, 32)
		if len(rows) > 0 {
			more = max(1, limit-len(rows))
		}
		rows = slices.Grow(rows, more)
	}
	return append(rows, outbox.Row{})
}

// messageScan does so for messages, see dialect.MessageColumnCount.
type messageScan struct {
	row                            outbox.Row
	created, due, until, completed int64
	outcome                        int16
	lapses                         int
	headers                        string
	dest                           []any
}

func newMessageScan(more ...any) *messageScan {
	s := &messageScan{}
	r := &s.row
	s.dest = append([]any{
		(*dialect.Place)(&r.ID), &r.Key, (*int64)(&r.Version), (*int64)(&r.Token), &r.Attempt, &r.Payload, &s.headers,
		&s.created, &s.due, &s.until, &r.LastError, &r.Group, &s.outcome, &s.completed, &r.Ref, &r.Code, &s.lapses,
	}, more...)
	return s
}

func (s *messageScan) scan(row dialect.Scanner, to *outbox.Row) error {
	s.row, s.headers, s.outcome, s.completed = outbox.Row{}, "", 0, 0 // those of a claim have neither outcome nor end
	if err := row.Scan(s.dest...); err != nil {
		return err
	}
	*to = s.row
	to.StagedAt, to.Due = instant(s.created), instant(s.due)
	to.Ambiguous, to.Alone = s.lapses > 0, s.lapses > 1
	if s.completed > 0 {
		to.CompletedAt = instant(s.completed)
	}
	switch {
	case s.outcome == dialect.OutcomeDone:
		to.State = outbox.StateSent
	case s.outcome == dialect.OutcomeDead:
		to.State = outbox.StateDead
	case s.outcome == dialect.OutcomeUnknown:
		to.State = outbox.StateUnknown
	case s.until > 0:
		to.State, to.LeaseUntil = outbox.StateSending, instant(s.until)
	case to.Attempt > 0:
		to.State = outbox.StateFailed
	default:
		to.State = outbox.StatePending
	}
	finish(to, s.headers)
	return nil
}

func finish(r *outbox.Row, headers string) {
	if r.Payload == nil {
		r.Payload = []byte{}
	}
	if headers != "" {
		if err := readHeader(headers, &r.Header); err != nil {
			r.Broken = fmt.Errorf("read headers of key %q: not a JSON object of strings", r.Key)
		}
	}
}

func readHeader(text string, h *outbox.Header) error { return json.Unmarshal([]byte(text), h) }

func instant(micros int64) time.Time { return time.UnixMicro(micros).UTC() }
