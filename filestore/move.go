package filestore

import (
	"bytes"
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// ErrLeft: messages stay in the file, where they are as safe as before; the
// [Moved] beside it tells which and why. Settle that, and move again.
var ErrLeft = errors.New("messages stay in the file")

// Target is a database to move to: a *sqlstore.Store, on Postgres or SQLite.
type Target interface {
	outbox.JournalStore
	// Transact runs f once in a transaction and commits it.
	Transact(ctx context.Context, o *sql.TxOptions, f func(tx *sql.Tx) error) error
	// Pause pauses a channel in every relay for d, or ends its pause where d is 0.
	Pause(ctx context.Context, channel string, d time.Duration, reason string) error
}

// MoveOptions say how to move. The zero value works.
type MoveOptions struct {
	// Resend: a message that was being sent when its process died, or of an
	// earlier attempt of which nobody knows the end, arrives as pending, to be
	// sent (perhaps a second time). Defaults to false: it arrives as unknown,
	// for somebody to find out.
	Resend bool
	// NoRelay: nothing in this process sends messages of the file, so whoever
	// was given a lease has ended, since the file is locked. Defaults to false:
	// a lease in force, 15 s by default, is waited for.
	NoRelay bool
	// DryRun: only tell what would be moved; nothing is changed.
	DryRun bool
	// Progress, where set, is told after each batch how many messages have
	// been moved, from the goroutine of MoveTo.
	Progress func(moved int)
}

// Moved tells what a move came to, channel by channel, in the order of their
// names. With MoveOptions.DryRun it tells what it would come to.
type Moved struct {
	Channels []MovedChannel
}

// Messages is how many messages were moved, of all channels.
func (m Moved) Messages() int {
	n := 0
	for _, c := range m.Channels {
		n += c.Pending + c.Sent + c.Dead + c.Unknown
	}
	return n
}

// MovedChannel is one channel of a Moved.
type MovedChannel struct {
	Channel string
	// How many messages were moved, by the state in which they arrived.
	Pending, Sent, Dead, Unknown int
	// Interrupted is how many had been left behind by a process that died while
	// it was sending them.
	Interrupted int
	// Conflicts are keys under which the target holds another message, with
	// another payload or group. Where there is any, nothing of the channel is
	// moved: discard the wrong one of each pair, and move again.
	Conflicts []string
	// Left are groups that stay in the file, whole, so that their order does too.
	Left []LeftGroup
}

// LeftGroup is a group of messages that stays in the file.
type LeftGroup struct {
	Group    string
	Messages int
	// Ended are the keys of its dead and unknown messages. A database takes such
	// a message only as the first of its group: retry, resolve or discard the
	// others in the file. None: the first one here is dead or unknown, and the
	// target holds earlier messages of the group: have those sent, or settle them.
	Ended []string
}

// MoveTo moves all messages of the file into a database, in the order of their
// numbers, so that the program can go on with that. It may fail, or its process
// die, at any instruction: moving again goes on where it was left, and nothing
// is lost, and nothing sent twice, also where a program runs on the file or
// relays run on the database in between.
//
// That is so since a channel is paused while its messages move, first in the
// file and then in the database, under a reason that tells of the move; since
// a batch is deleted from the file only once the database has committed it; and
// since a message that the database has already, equal in payload and group,
// is taken for the same. At the end the database's channel is resumed, and the
// file's if it is empty; a pause that an operator had set on either, the longer
// one, goes on in the database.
//
// Pending and failed messages arrive as pending, due when they were, their
// attempts counted anew; dead and unknown ones as such, with their last error
// and its code; sent ones that are still kept arrive as sent, with their
// reference, so that their keys cannot be put anew. What the database counts
// itself starts anew: numbers, times of creation and of ending, and so the
// retention. A relay of this process finishes what it is sending, and sends
// nothing more from the file while messages are in it.
//
// Stop what adds to the file first: what comes too late stays there, paused,
// for the next move. Do not run two moves into one channel at the same time,
// and move before the program puts messages of the same groups into the
// database: they would be sent first.
//
// Errors: ErrLeft where messages stay, after everything else was moved;
// outbox.ErrState where another file is being moved into the channel; else
// what a store says. The Moved tells what was done also beside an error.
func (s *Store) MoveTo(ctx context.Context, to Target, o MoveOptions) (Moved, error) {
	m := &mover{from: s, to: to, path: s.Path(), now: s.o.Clock, o: o}
	moved, err := m.move(ctx)
	if err != nil {
		return moved, fmt.Errorf("move the messages of %q: %w", s.Path(), err)
	}
	return moved, nil
}

// forget deletes messages, by key and number, in one write.
func (s *Store) forget(ctx context.Context, channel string, rows []outbox.Row) error {
	_, err := change(ctx, s, nil, func(st *state, _ time.Time) (struct{}, error) {
		for _, r := range rows {
			if sl := st.find(channel, r.Key); sl != nil && sl.m.row.Version == r.Version {
				st.set(sl, nil)
			}
		}
		return struct{}{}, nil
	})
	return err
}

// moveSource is what a move asks of the file.
type moveSource interface {
	outbox.JournalStore
	Pause(ctx context.Context, channel string, d time.Duration, reason string) error
	forget(ctx context.Context, channel string, rows []outbox.Row) error
}

// mover is one run of MoveTo.
type mover struct {
	from moveSource
	to   Target
	path string
	now  func() time.Time // the clock of from
	o    MoveOptions

	moved int
}

const (
	// moveBatch is how many messages a transaction of the target takes: each
	// batch costs a write of what is left of the file.
	moveBatch = 500
	// moveLease is that of messages which are put begun to be settled in the
	// same transaction: nobody sees it.
	moveLease = time.Minute
)

func (m *mover) move(ctx context.Context) (moved Moved, err error) {
	if err := m.from.Check(ctx); err != nil {
		return moved, err
	}
	if err := m.to.Check(ctx); err != nil {
		return moved, fmt.Errorf("target: %w", err)
	}
	stats, err := m.from.Stats(ctx)
	if err != nil {
		return moved, err
	}
	left := 0
	for _, st := range stats {
		if st.Channel.System != outbox.SystemJournal {
			continue
		}
		c, err := m.channel(ctx, st.Channel.Name)
		moved.Channels = append(moved.Channels, c)
		if err != nil {
			return moved, fmt.Errorf("channel %q: %w; nothing is lost, and nothing will be sent twice: move again, to go on", c.Channel, err)
		}
		left += len(c.Conflicts) + len(c.Left)
	}
	if left > 0 {
		return moved, fmt.Errorf("%w: %s", ErrLeft, moved.left())
	}
	return moved, nil
}

// left tells what stays in the file, for an error.
func (m Moved) left() string {
	var text []byte
	for _, c := range m.Channels {
		for i, key := range c.Conflicts {
			if i == 0 {
				text = fmt.Appendf(text, "; nothing of channel %q was moved, since the target holds other messages under its keys", c.Channel)
			}
			if i == 10 {
				text = fmt.Appendf(text, " and %d more", len(c.Conflicts)-i)
				break
			}
			text = fmt.Appendf(text, " %q", key)
		}
		if len(c.Left) > 0 {
			text = fmt.Appendf(text, "; of channel %q group %q", c.Channel, c.Left[0].Group)
		}
		if n := len(c.Left) - 1; n > 0 {
			text = fmt.Appendf(text, " and %d more", n)
		}
	}
	return string(bytes.TrimPrefix(text, []byte("; ")))
}

// channel moves one channel.
func (m *mover) channel(ctx context.Context, name string) (MovedChannel, error) {
	c := MovedChannel{Channel: name}
	rows, err := m.list(ctx, name)
	if err != nil {
		return c, err
	}
	if c.Conflicts, err = m.conflicts(ctx, name, rows); err != nil || len(c.Conflicts) > 0 {
		return c, err
	}
	if m.o.DryRun {
		m.foretell(&c, rows)
		return c, nil
	}
	paused, err := m.paused(ctx, m.from, name)
	if err != nil || len(rows) == 0 && !paused.move {
		return c, err // nothing to move, nor to finish
	}
	if err := m.pause(ctx, m.from, name); err != nil {
		return c, err
	}
	if c.Interrupted, err = m.endLeases(ctx, name); err != nil {
		return c, err
	}
	if err := m.pause(ctx, m.to, name); err != nil {
		return c, fmt.Errorf("target: %w", err)
	}
	if err := m.drain(ctx, &c); err != nil {
		return c, err
	}
	return c, m.resume(ctx, name)
}

// drain moves what can be moved, until there is no more.
func (m *mover) drain(ctx context.Context, c *MovedChannel) error {
	blocked := map[string]bool{}
	for {
		rows, err := m.list(ctx, c.Channel)
		if err != nil {
			return err
		}
		var batch []outbox.Row
		batch, c.Left = m.plan(rows, blocked)
		if len(batch) == 0 {
			return nil
		}
		batch = batch[:min(len(batch), moveBatch)]
		taken, err := m.put(ctx, c.Channel, batch, blocked)
		if err != nil {
			return fmt.Errorf("put %d messages into the target: %w", len(batch), err)
		}
		if err := m.from.forget(ctx, c.Channel, taken); err != nil {
			return fmt.Errorf("delete what was moved from the file: %w", err)
		}
		for _, r := range taken {
			c.count(&r, m.o.Resend)
		}
		m.moved += len(taken)
		if m.o.Progress != nil {
			m.o.Progress(m.moved)
		}
	}
}

// foretell is what drain would do.
func (m *mover) foretell(c *MovedChannel, rows []outbox.Row) {
	var all []outbox.Row
	all, c.Left = m.plan(rows, nil)
	for _, r := range all {
		c.count(&r, m.o.Resend)
		if r.State == outbox.StateSending {
			c.Interrupted++
		}
	}
}

func (c *MovedChannel) count(r *outbox.Row, resend bool) {
	switch arrival(r, resend) {
	case outbox.StatePending:
		c.Pending++
	case outbox.StateSent:
		c.Sent++
	case outbox.StateDead:
		c.Dead++
	case outbox.StateUnknown:
		c.Unknown++
	}
}

// arrival is the state in which a message arrives.
func arrival(r *outbox.Row, resend bool) outbox.State {
	switch {
	case r.State >= outbox.StateSent:
		return r.State
	case !resend && (r.State == outbox.StateSending || r.Ambiguous):
		return outbox.StateUnknown
	}
	return outbox.StatePending
}

// plan returns what can be moved, in its order, and the groups that stay.
//
// What was sent goes first, since a message can be ended only while none of
// its group before it is open; its order does not matter any more. For the
// same reason a dead or unknown message can only be the first of its group.
func (m *mover) plan(rows []outbox.Row, blocked map[string]bool) ([]outbox.Row, []LeftGroup) {
	type group struct {
		messages int // but those that were sent
		ended    []string
		stays    bool
	}
	groups := map[string]*group{}
	for _, r := range rows {
		state := arrival(&r, m.o.Resend)
		if r.Group == "" || state == outbox.StateSent {
			continue
		}
		g := groups[r.Group]
		if g == nil {
			g = &group{stays: blocked[r.Group]}
			groups[r.Group] = g
		}
		g.messages++
		if state != outbox.StatePending {
			g.ended = append(g.ended, r.Key)
			g.stays = g.stays || g.messages > 1
		}
	}
	var sent, open []outbox.Row
	for _, r := range rows {
		switch g := groups[r.Group]; {
		case r.State == outbox.StateSent:
			sent = append(sent, r)
		case g == nil || !g.stays:
			open = append(open, r)
		}
	}
	var left []LeftGroup
	for name, g := range groups {
		if !g.stays {
			continue
		}
		if blocked[name] {
			g.ended = nil
		}
		left = append(left, LeftGroup{Group: name, Messages: g.messages, Ended: g.ended})
	}
	slices.SortFunc(left, func(a, b LeftGroup) int { return cmp.Compare(a.Group, b.Group) })
	return append(sent, open...), left
}

// list returns all messages of a channel of the file.
func (m *mover) list(ctx context.Context, channel string, states ...outbox.State) (rows []outbox.Row, err error) {
	ask := outbox.MessageList{MessageFilter: outbox.MessageFilter{States: states}, Limit: 1000, Payloads: true}
	for {
		page, err := m.from.ListMessages(ctx, nil, channel, ask)
		if err != nil {
			return nil, err
		}
		for _, r := range page {
			if r.Broken != nil {
				return nil, r.Broken
			}
		}
		if rows = append(rows, page...); len(page) < ask.Limit {
			return rows, nil
		}
		ask.After = page[len(page)-1].Version
	}
}
