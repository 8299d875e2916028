package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
)

// Put writes m as part of tx, unless a message of its key exists: then that
// one is answered, unchanged, with Created false. It commits or rolls back
// with tx; a grouped message makes other transactions that put into its group
// wait until then.
//
// What is refused is refused before anything is written: ErrInvalid for a bad
// key, group, header, delay or payload, ErrTx for a transaction that is nil or
// finished. An outbox that is not installed is ErrSchema. The driver's error
// stays reachable with errors.As; after one, roll back.
func (j *Journal) Put(ctx context.Context, tx *sql.Tx, m Message) (PutResult, error) {
	return j.putOne(ctx, SQL(tx), m, 0)
}

// PutMany puts any number of messages and answers in their order. Of a key
// given twice the first is put, and the second answered as one that exists.
// Messages of a group are sent in the order in which they are given. Nothing is written
// if any message is refused. Errors are those of [Journal.Put].
func (j *Journal) PutMany(ctx context.Context, tx *sql.Tx, ms []Message) ([]PutResult, error) {
	return j.putIn(ctx, SQL(tx), ms, 0)
}

// PutBegun puts m already begun, attempt 1, leased to the caller for lease
// from now (100 ms to 1 h): after the commit, send it with [Journal.Deliver].
// Should the caller die, a relay sends it once the lease has lapsed, and is
// told that it is ambiguous. A lease must outlast the rest of the transaction.
// A message that existed comes without a lease: do not send it. ErrBlocked
// where a grouped message is not the first to be sent of its group; Put it
// then. Other errors are those of [Journal.Put].
func (j *Journal) PutBegun(ctx context.Context, tx *sql.Tx, m Message, lease time.Duration) (PutResult, error) {
	if err := checkLease(lease); err != nil {
		return PutResult{}, fmt.Errorf("outbox: put %s: %w", j.name(m.Key), err)
	}
	return j.putOne(ctx, SQL(tx), m, lease)
}

// PutIn is [Journal.PutMany] for a transaction of any kind; see [Tx].
func (j *Journal) PutIn(ctx context.Context, tx Tx, ms ...Message) ([]PutResult, error) {
	return j.putIn(ctx, tx, ms, 0)
}

// Add puts m in a transaction of its own: it is durable when Add returns. An
// error other than ErrInvalid leaves open whether it was put; Add it again.
func (j *Journal) Add(ctx context.Context, m Message) (PutResult, error) {
	rs, err := j.put(ctx, nil, []Message{m}, 0)
	if err != nil {
		return PutResult{}, err
	}
	return rs[0], nil
}

func checkLease(d time.Duration) error { return checkRange("lease", d, minLease, maxLease) }

func (j *Journal) putOne(ctx context.Context, tx Tx, m Message, begin time.Duration) (PutResult, error) {
	rs, err := j.putIn(ctx, tx, []Message{m}, begin)
	if err != nil {
		return PutResult{}, err
	}
	return rs[0], nil
}

func (j *Journal) putIn(ctx context.Context, tx Tx, ms []Message, begin time.Duration) ([]PutResult, error) {
	if tx == nil {
		return nil, fmt.Errorf("outbox: put in channel %q: %w: it is nil", j.o.Channel, ErrTx)
	}
	return j.put(ctx, tx, ms, begin)
}

func (j *Journal) put(ctx context.Context, tx Tx, ms []Message, begin time.Duration) ([]PutResult, error) {
	rows := make([]PutRow, 0, len(ms)) // distinct
	place := make([]int, len(ms))      // of each message in rows
	all := make([]PutRow, len(ms))
	seen := make(map[string]int, len(ms))
	for i := range ms {
		row, err := j.encode(ctx, &ms[i])
		if err != nil {
			return nil, fmt.Errorf("outbox: put %s: %w", j.name(ms[i].Key), err)
		}
		at, again := seen[row.Key]
		if !again {
			at = len(rows)
			seen[row.Key] = at
			rows = append(rows, row)
		}
		all[i], place[i] = row, at
	}
	answers, err := j.putRows(ctx, tx, rows, begin)
	if err != nil {
		return nil, fmt.Errorf("outbox: %w", err) // the store names key and channel
	}
	results := make([]PutResult, len(ms))
	given := make([]bool, len(rows))
	for i, at := range place {
		results[i] = j.result(answers[at], &rows[at], &all[i], given[at])
		given[at] = true
	}
	return results, nil
}

// result is the answer for the message all of whose fields are in asked: what
// was put or found in its place is in put and a. again: this call has put a
// message of the key before.
func (j *Journal) result(a PutAnswer, put, asked *PutRow, again bool) PutResult {
	if a.Created {
		a.Row.Payload, a.Row.Header = slices.Clone(put.Payload), maps.Clone(put.Header)
		if a.Row.Payload == nil {
			a.Row.Payload = []byte{}
		}
	}
	created := a.Created && !again
	res := PutResult{Record: recordOf(j.o.Channel, a.Row, created), Created: created, Differs: a.Differs}
	if again {
		res.Differs = asked.differs(a.Row.Group, a.Row.Payload)
	}
	return res
}

// encode makes the row of a message, or says why it is refused.
func (j *Journal) encode(ctx context.Context, m *Message) (PutRow, error) {
	row := PutRow{Key: m.Key, Group: m.Group, Payload: m.Payload, Delay: m.Delay}
	if err := checkKey(m.Key); err != nil {
		return row, err
	}
	if m.Group != "" {
		if err := checkGroup(m.Group); err != nil {
			return row, err
		}
	}
	if err := checkRange("Delay", m.Delay, 0, maxPutDelay); err != nil {
		return row, err
	}
	if len(m.Payload) > j.o.MaxPayload {
		return row, invalid("payload has %d bytes, at most %d are allowed", len(m.Payload), j.o.MaxPayload)
	}
	if len(m.Header) > 0 || j.o.Headers != nil {
		row.Header = make(Header, len(m.Header))
		maps.Copy(row.Header, m.Header)
	}
	if j.o.Headers != nil {
		j.o.Headers(ctx, row.Header)
	}
	if len(row.Header) == 0 {
		row.Header = nil
	}
	return row, checkHeader(row.Header)
}

// putRows hands rows to the store, in chunks where there are many, and returns
// the answers in the order of rows.
func (j *Journal) putRows(ctx context.Context, tx Tx, rows []PutRow, begin time.Duration) ([]PutAnswer, error) {
	n := chunkLen(rows, payloadSize)
	if n == len(rows) {
		return j.putChunk(ctx, tx, rows, begin)
	}
	order := lockOrder(rows)
	sorted := make([]PutRow, len(rows))
	for at, i := range order {
		sorted[at] = rows[i]
	}
	answers := make([]PutAnswer, len(rows))
	for len(sorted) > 0 {
		n := chunkLen(sorted, payloadSize)
		as, err := j.putChunk(ctx, tx, sorted[:n], begin)
		if err != nil {
			return nil, err
		}
		for at, a := range as {
			answers[order[at]] = a
		}
		sorted, order = sorted[n:], order[n:]
	}
	return answers, nil
}

// lockOrder is the order in which rows are put in chunks: a chunk holds its
// locks while the next one takes its own, so the order is one for all callers.
// Within a group it is that of the rows.
func lockOrder(rows []PutRow) []int {
	order := make([]int, len(rows))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int {
		if rows[a].Group == "" && rows[b].Group == "" {
			return strings.Compare(rows[a].Key, rows[b].Key)
		}
		return strings.Compare(rows[a].Group, rows[b].Group)
	})
	return order
}

func payloadSize(r *PutRow) int { return len(r.Payload) }

func (j *Journal) putChunk(ctx context.Context, tx Tx, rows []PutRow, begin time.Duration) ([]PutAnswer, error) {
	if len(rows) == 0 {
		return nil, nil
	}
	as, err := j.store.PutRows(ctx, tx, j.o.Channel, rows, begin)
	if err != nil {
		return nil, err
	}
	if len(as) != len(rows) {
		return nil, fmt.Errorf("put in channel %q: store returned %d answers for %d messages", j.o.Channel, len(as), len(rows))
	}
	return as, nil
}
