package filestore

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// PutRows implements outbox.JournalStore, for outbox.Journal.Add: a file has no
// transactions of its callers, so a tx is refused by outbox.ErrTx. Where the
// new messages would take the file over a limit of the [Options], none is
// written: [ErrFull].
func (s *Store) PutRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.PutRow, begin time.Duration) ([]outbox.PutAnswer, error) {
	if err := checkText(channel, rows); err != nil {
		return nil, fmt.Errorf("put in channel %q: %w", channel, err)
	}
	answers, err := change(ctx, s, tx, func(st *state, now time.Time) ([]outbox.PutAnswer, error) {
		if begin > 0 {
			if key, blocked := st.blockedPut(channel, rows, now); blocked {
				return nil, fmt.Errorf("begin key %q: %w", key, outbox.ErrBlocked)
			}
		}
		answers := make([]outbox.PutAnswer, len(rows))
		for i := range rows {
			answers[i] = st.put(channel, &rows[i], begin, now)
		}
		return answers, s.o.full(st, answers)
	})
	if err != nil {
		return nil, fmt.Errorf("put %s: %w", putting(channel, rows), err)
	}
	s.hinter.TellPut(channel, rows, answers)
	return answers, nil
}

func putting(channel string, rows []outbox.PutRow) string {
	if len(rows) == 1 {
		return fmt.Sprintf("key %q in channel %q", rows[0].Key, channel)
	}
	return fmt.Sprintf("%d messages in channel %q", len(rows), channel)
}

// checkText refuses what JSON would not give back as it was.
func checkText(channel string, rows []outbox.PutRow) error {
	if err := outbox.ValidChannel(channel); err != nil {
		return err
	}
	for i := range rows {
		r := &rows[i]
		valid := utf8.ValidString(r.Key) && utf8.ValidString(r.Group)
		for name, value := range r.Header {
			valid = valid && utf8.ValidString(name) && utf8.ValidString(value)
		}
		if !valid {
			return fmt.Errorf("%w: key, group or header of row %d is not UTF-8", outbox.ErrInvalid, i)
		}
	}
	return nil
}

// blockedPut returns the key of a new message that cannot be begun.
func (st *state) blockedPut(channel string, rows []outbox.PutRow, now time.Time) (string, bool) {
	var groups map[string]*group // read only if a new message has one
	taken := map[string]bool{}
	for i := range rows {
		r := &rows[i]
		if r.Group == "" || st.find(channel, r.Key) != nil {
			continue
		}
		if groups == nil {
			groups = st.groups(channel)
		}
		g := groups[r.Group]
		if taken[r.Group] || g != nil && !g.next(0, now) {
			return r.Key, true
		}
		taken[r.Group] = true
	}
	return "", false
}

func (st *state) put(channel string, p *outbox.PutRow, begin time.Duration, now time.Time) outbox.PutAnswer {
	if sl := st.find(channel, p.Key); sl != nil {
		r := sl.m.out()
		return outbox.PutAnswer{Row: r, Differs: r.Group != p.Group || !bytes.Equal(r.Payload, p.Payload)}
	}
	m := &message{channel: channel, row: outbox.Row{
		Key: p.Key, Group: p.Group, Version: st.nextNumber(now), State: outbox.StatePending,
		Payload: slices.Clone(p.Payload), Header: maps.Clone(p.Header), StagedAt: now, Due: later(now, p.Delay),
	}}
	if len(m.row.Header) == 0 {
		m.row.Header = nil
	}
	m.encodeFixed()
	if begin > 0 {
		m = m.lease(st.nextToken(now), now, begin)
		m.row.Due = now // so that it comes back when its lease lapses
	}
	st.add(m)
	answer := m.row
	answer.Payload, answer.Header = nil, nil // the caller has them
	return outbox.PutAnswer{Row: answer, Created: true}
}

// full returns an ErrFull if what was created takes the file over a limit.
func (o *Options) full(st *state, answers []outbox.PutAnswer) error {
	if !slices.ContainsFunc(answers, func(a outbox.PutAnswer) bool { return a.Created }) {
		return nil
	}
	const remedy = "let a relay send what waits, purge what was sent (or send with outbox.DeleteOnSent), move to a database, or raise the limit"
	switch {
	case len(st.byID) > o.MaxEntries:
		return fmt.Errorf("%w: it would hold %d messages, Options.MaxEntries is %d: %s", ErrFull, len(st.byID), o.MaxEntries, remedy)
	case st.bytes > o.MaxBytes:
		return fmt.Errorf("%w: its messages would take %d bytes, Options.MaxBytes is %d: %s", ErrFull, st.bytes, o.MaxBytes, remedy)
	}
	return nil
}
