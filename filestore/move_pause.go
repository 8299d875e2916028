package filestore

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// movePause is how long a channel is paused for a move. A pause that ended by
// itself, after a move was cut short, would let the database send what the
// file still holds.
const movePause = 10 * 365 * 24 * time.Hour

// MovePause begins the reason of each pause that MoveTo sets. Who resumes such
// a channel by hand, in the middle of a move, may have messages sent twice.
const MovePause = "run outbox import again"

// Reasons of pauses. They say first what to do, since they may be cut off, and
// keep what a later run has to know.
const (
	reasonMove   = MovePause + ": messages are being moved out of "
	reasonFormer = "; paused before until "
)

// channelPause is how a channel is paused.
type channelPause struct {
	move   bool      // for a move, of this file
	until  time.Time // by an operator, before the move; zero: it was not
	reason string    // why
}

// pausing is the part of a source or target that pauses.
type pausing interface {
	Stats(ctx context.Context) ([]outbox.ChannelStats, error)
	Pause(ctx context.Context, channel string, d time.Duration, reason string) error
}

// paused tells how a channel of a store is paused. An outage of its
// destination is no pause: it shows again by itself.
func (m *mover) paused(ctx context.Context, s pausing, channel string) (p channelPause, err error) {
	stats, err := s.Stats(ctx)
	if err != nil {
		return p, err
	}
	for _, st := range stats {
		if st.Channel != (outbox.Channel{System: outbox.SystemJournal, Name: channel}) || st.Paused <= 0 || st.Outage {
			continue
		}
		mine := m.reason(channelPause{})
		switch rest, found := strings.CutPrefix(st.Reason, mine); {
		case found:
			p = formerPause(rest)
			p.move = true
		case strings.HasPrefix(st.Reason, reasonMove):
			return p, fmt.Errorf("%w: the channel is paused: %s; finish that first, or end it: outbox resume %q", outbox.ErrState, st.Reason, channel)
		default:
			p = channelPause{until: m.now().Add(st.Paused), reason: st.Reason}
		}
	}
	return p, nil
}

// reason is that of a move's pause, with the pause before it.
func (m *mover) reason(before channelPause) string {
	text := outbox.ErrorText(fmt.Sprintf("%s%q", reasonMove, m.path))
	if before.until.IsZero() {
		return text
	}
	return outbox.ErrorText(text + reasonFormer + before.until.UTC().Format(time.RFC3339) + ": " + before.reason)
}

// formerPause reads the pause before the move's from what follows in its reason.
func formerPause(rest string) (p channelPause) {
	rest, found := strings.CutPrefix(rest, reasonFormer)
	if !found {
		return p
	}
	at, reason, _ := strings.Cut(rest, ": ")
	if until, err := time.Parse(time.RFC3339, at); err == nil {
		p = channelPause{until: until, reason: reason}
	}
	return p
}

// pause pauses a channel for the move, unless it is already.
func (m *mover) pause(ctx context.Context, s pausing, channel string) error {
	p, err := m.paused(ctx, s, channel)
	if err != nil || p.move {
		return err
	}
	return s.Pause(ctx, channel, movePause, m.reason(p))
}

// resume ends the pauses: the target's first, so that a move which is cut
// short in between finds the file's, and goes on here.
func (m *mover) resume(ctx context.Context, channel string) error {
	from, err := m.paused(ctx, m.from, channel)
	if err != nil {
		return err
	}
	to, err := m.paused(ctx, m.to, channel)
	if err != nil {
		return fmt.Errorf("target: %w", err)
	}
	if to.move { // else an operator has decided meanwhile
		if from.until.After(to.until) {
			to.until, to.reason = from.until, from.reason
		}
		if err := m.to.Pause(ctx, channel, max(0, to.until.Sub(m.now())), to.reason); err != nil {
			return fmt.Errorf("target: %w", err)
		}
	}
	rest, err := m.from.ListMessages(ctx, nil, channel, outbox.MessageList{Limit: 1})
	if err != nil || len(rest) > 0 {
		return err
	}
	return m.from.Pause(ctx, channel, 0, "")
}
