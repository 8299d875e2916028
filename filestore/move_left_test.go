package filestore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// paused tells for how long a channel is paused, and why.
func (m *moving) paused(s outbox.RelayStore) (time.Duration, string) {
	stats, err := s.Stats(m.t.Context())
	require.NoError(m.t, err)
	for _, st := range stats {
		if st.Channel.Name == mails {
			return st.Paused, st.Reason
		}
	}
	return 0, ""
}

func TestMoveRefusesConflictsBeforeAnythingMoves(t *testing.T) {
	m := newMoving(t)
	m.add(m.file, outbox.Message{Key: "a"}, outbox.Message{Key: "b"}, outbox.Message{Key: "c"}, outbox.Message{Key: "d", Group: "g"})
	m.add(m.target, outbox.Message{Key: "b", Payload: []byte("secret")}, outbox.Message{Key: "c"}, outbox.Message{Key: "d"})
	file, target := m.states(m.file), m.states(m.target)
	for _, dry := range []bool{true, false} {
		moved, err := m.move(MoveOptions{DryRun: dry})
		require.ErrorIs(t, err, ErrLeft)
		require.ErrorContains(t, err, `nothing of channel "mails" was moved, since the target holds other messages under its keys "b" "d"`)
		require.NotContains(t, err.Error(), "secret")
		require.Equal(t, []MovedChannel{{Channel: mails, Conflicts: []string{"b", "d"}}}, moved.Channels)
		require.Equal(t, file, m.states(m.file))
		require.Equal(t, target, m.states(m.target))
		d, _ := m.paused(m.file)
		require.Zero(t, d)
	}
	for _, key := range []string{"b", "d"} {
		_, err := journalOf(t, m.target).Discard(t.Context(), outbox.Filter{Key: key})
		require.NoError(t, err)
	}
	_, err := m.move(MoveOptions{})
	require.NoError(t, err)
	m.relay(t.Context(), m.target)
	require.Equal(t, map[string]int{"a": 1, "b": 1, "c": 1, "d": 1}, m.sent)
}

// What has ended in the file is not sent by the database either, where a
// program has put it there again before the move.
func TestMoveEndsWhatTheTargetHadAlready(t *testing.T) {
	m := newMoving(t)
	m.everything(m.file)
	m.add(m.target, outbox.Message{Key: "sent"}, outbox.Message{Key: "sent in g", Group: "g"},
		outbox.Message{Key: "dead"}, outbox.Message{Key: "dead in h", Group: "h"}, outbox.Message{Key: "unknown"}, outbox.Message{Key: "interrupted"})
	_, err := m.move(MoveOptions{})
	require.NoError(t, err)
	m.clock.Advance(3 * time.Hour)
	m.relay(t.Context(), m.target)
	require.Equal(t, map[string]int{"pending": 1, "later": 1, "failed": 1, "g1": 1, "g2": 1}, m.sent)
	require.Equal(t, endsAs, m.states(m.target))
}

// What the target is sending, or has sent, is its own affair.
func TestMoveLeavesToTheTargetWhatItHasBegun(t *testing.T) {
	m := newMoving(t)
	m.everything(m.file)
	m.add(m.target, outbox.Message{Key: "dead"}, outbox.Message{Key: "unknown"})
	_, err := journalOf(t, m.target).Begin(t.Context(), "dead", time.Minute)
	require.NoError(t, err)
	m.end(m.target, "unknown", nil)
	_, err = m.move(MoveOptions{})
	require.NoError(t, err)
	states := m.states(m.target)
	require.Equal(t, "sending   ", states["dead"])
	require.Equal(t, "sent  ref-unknown ", states["unknown"])
}

func TestMoveCanSendInterruptedMessagesAgain(t *testing.T) {
	m := newMoving(t)
	m.everything(m.file)
	foretold, err := m.move(MoveOptions{Resend: true, DryRun: true})
	require.NoError(t, err)
	moved, err := m.move(MoveOptions{Resend: true})
	require.NoError(t, err)
	require.Equal(t, foretold, moved)
	require.Equal(t, []MovedChannel{{Channel: mails, Pending: 8, Sent: 2, Dead: 2, Unknown: 1, Interrupted: 1}}, moved.Channels)
	m.relay(t.Context(), m.target)
	require.Equal(t, 1, m.sent["interrupted"])
}

// A run of a group that was being sent leaves several messages behind that
// nobody knows about. A database would take only the first of them so; the
// group stays whole, and what is resolved in the file can move.
func TestMoveLeavesWholeGroups(t *testing.T) {
	m := newMoving(t)
	for _, key := range []string{"1", "2", "3"} {
		m.add(m.file, outbox.Message{Key: key, Group: "g"})
	}
	rs, err := journalOf(t, m.file).ClaimDue(t.Context(), 2, time.Minute)
	require.NoError(t, err)
	run := []string{"1", "2"}
	require.Len(t, rs, len(run))
	m.add(m.file, outbox.Message{Key: "free"})
	m.clock.Advance(2 * time.Minute)
	left := []LeftGroup{{Group: "g", Messages: 3, Ended: run}}

	foretold, err := m.move(MoveOptions{DryRun: true})
	require.ErrorIs(t, err, ErrLeft)
	require.Equal(t, left, foretold.Channels[0].Left)
	for range 2 { // moving again changes nothing
		moved, err := m.move(MoveOptions{})
		require.ErrorIs(t, err, ErrLeft)
		require.ErrorContains(t, err, `of channel "mails" group "g"`)
		require.Equal(t, left, moved.Channels[0].Left)
		require.Len(t, m.states(m.file), 3)
		require.Len(t, m.states(m.target), 1)
		d, _ := m.paused(m.target)
		require.Zero(t, d, "what has moved is sent")
		d, _ = m.paused(m.file)
		require.Positive(t, d, "what has not is not, in the wrong place")
	}
	for _, key := range run {
		require.NoError(t, journalOf(t, m.file).ResolveUnknown(t.Context(), key, outbox.VerdictNotSent, ""))
	}
	_, err = m.move(MoveOptions{})
	require.NoError(t, err)
	m.relay(t.Context(), m.target)
	require.Equal(t, map[string]int{"1": 1, "2": 1, "3": 1, "free": 1}, m.sent)
	d, _ := m.paused(m.file)
	require.Zero(t, d)
}

func TestMoveLeavesGroupsThatAreBlockedInTheTarget(t *testing.T) {
	m := newMoving(t)
	m.everything(m.file)
	m.add(m.target, outbox.Message{Key: "h0", Group: "h"}, outbox.Message{Key: "g0", Group: "g"})
	moved, err := m.move(MoveOptions{})
	require.ErrorIs(t, err, ErrLeft)
	require.Equal(t, []LeftGroup{{Group: "h", Messages: 2}}, moved.Channels[0].Left)
	require.Len(t, m.states(m.file), 2)
	require.Equal(t, "sent  ref-sent in g ", m.states(m.target)["sent in g"], "known all the same")
	moved, err = m.move(MoveOptions{})
	require.ErrorIs(t, err, ErrLeft)
	require.Empty(t, moved.Channels[0].Conflicts)
	m.relay(t.Context(), m.target) // sends h0
	_, err = m.move(MoveOptions{})
	require.NoError(t, err)
	require.Equal(t, "dead h  ", m.states(m.target)["dead in h"])
}

// A pause that an operator has set goes on in the database, whichever side it
// was on, and also when the move was cut short.
func TestMoveKeepsAnOperatorsPause(t *testing.T) {
	for _, c := range []struct {
		name         string
		file, target time.Duration
		want         time.Duration
		reason       string
	}{
		{"of the file", 2 * time.Hour, 0, 2 * time.Hour, "file: closed"},
		{"of the target", 0, 3 * time.Hour, 3 * time.Hour, "target: closed"},
		{"of both", 2 * time.Hour, time.Hour, 2 * time.Hour, "file: closed"},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := newMoving(t)
			m.add(m.file, outbox.Message{Key: "a"})
			if c.file > 0 {
				require.NoError(t, m.file.Pause(t.Context(), mails, c.file, "file: closed"))
			}
			if c.target > 0 {
				require.NoError(t, m.target.Pause(t.Context(), mails, c.target, "target: closed"))
			}
			crashed := &crash{at: 9, after: true}
			_, err := m.mover(crashingFile{m.file, crashed}, crashingTarget{m.target, crashed}, MoveOptions{}).move(t.Context())
			require.ErrorIs(t, err, errCrash)
			d, reason := m.paused(m.target)
			require.Greater(t, d, 24*time.Hour)
			require.Contains(t, reason, `run outbox import again: messages are being moved out of "/var/lib/agent/outbox.json"`)
			m.clock.Advance(10 * time.Minute)
			_, err = m.move(MoveOptions{})
			require.NoError(t, err)
			d, reason = m.paused(m.target)
			require.Equal(t, c.want-10*time.Minute, d)
			require.Equal(t, c.reason, reason)
			d, _ = m.paused(m.file)
			require.Zero(t, d)
		})
	}
}

func TestMoveRefusesAChannelIntoWhichAnotherFileIsMoved(t *testing.T) {
	m := newMoving(t)
	m.add(m.file, outbox.Message{Key: "a"})
	require.NoError(t, m.target.Pause(t.Context(), mails, time.Hour, `run outbox import again: messages are being moved out of "/var/lib/agent/outbox.json.json"`))
	_, err := m.move(MoveOptions{})
	require.ErrorIs(t, err, outbox.ErrState)
	require.ErrorContains(t, err, "/var/lib/agent/outbox.json.json")
	require.ErrorContains(t, err, `outbox resume "mails"`)
	require.Len(t, m.states(m.file), 1)
}

// A lease in force may be that of a relay of this process, which is sending.
func TestMoveWaitsForLeasesInForce(t *testing.T) {
	m := newMoving(t)
	m.add(m.file, outbox.Message{Key: "sending"}, outbox.Message{Key: "left behind"})
	r, err := journalOf(t, m.file).Begin(t.Context(), "sending", time.Minute)
	require.NoError(t, err)
	_, err = journalOf(t, m.file).Begin(t.Context(), "left behind", time.Minute)
	require.NoError(t, err)
	ctx, cancel := context.WithTimeout(t.Context(), 3*leasePoll)
	defer cancel()
	_, err = m.mover(m.file, m.target, MoveOptions{}).move(ctx)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.ErrorContains(t, err, `2 messages are being sent, the first with key "sending", under a lease until`)
	require.Empty(t, m.states(m.target))

	done := make(chan error)
	go func() {
		_, err := m.move(MoveOptions{})
		done <- err
	}()
	require.NoError(t, journalOf(t, m.file).MarkSent(t.Context(), r.Lease, "ref"))
	m.clock.Advance(2 * time.Minute)
	require.NoError(t, <-done)
	require.Equal(t, map[string]string{"sending": "sent  ref ", "left behind": "unknown   "}, m.states(m.target))
}

func TestMoveWithoutARelayWaitsForNobody(t *testing.T) {
	m := newMoving(t)
	m.add(m.file, outbox.Message{Key: "left behind"})
	_, err := journalOf(t, m.file).Begin(t.Context(), "left behind", time.Hour)
	require.NoError(t, err)
	_, err = m.move(MoveOptions{NoRelay: true})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"left behind": "unknown   "}, m.states(m.target))
}

// Where dead messages are skipped, later ones of their group may have been sent.
func TestMoveTakesWhatWasSentBehindADeadMessage(t *testing.T) {
	m := newMoving(t)
	m.add(m.file, outbox.Message{Key: "dead", Group: "g"}, outbox.Message{Key: "sent", Group: "g"}, outbox.Message{Key: "last", Group: "g"})
	m.end(m.file, "dead", outbox.Permanent(errors.New("refused")))
	claimed, err := m.file.ClaimMessages(t.Context(), nil, outbox.Claim{Channel: mails, Limit: 1, Lease: time.Minute, Full: true, SkipEnded: true})
	require.NoError(t, err)
	require.Len(t, claimed.Rows, 1)
	ch := outbox.Channel{System: outbox.SystemJournal, Name: mails}
	rs, err := m.file.Settle(t.Context(), ch, []outbox.Settlement{{Row: claimed.Rows[0], Outcome: outbox.OutcomeDone, Keep: true, Ref: "ref"}})
	require.NoError(t, err)
	require.Equal(t, []outbox.Result{outbox.ResultDone}, rs)
	_, err = m.move(MoveOptions{})
	require.NoError(t, err)
	require.Equal(t, map[string]string{"dead": "dead g  ", "sent": "sent g ref ", "last": "pending g  "}, m.states(m.target))
}

// Relays of this process may run on both sides all the time.
func TestMoveBetweenRunningRelays(t *testing.T) {
	const n = 300
	m := newMoving(t)
	for i := range n {
		msg := outbox.Message{Key: fmt.Sprintf("%04d", i)}
		if i%2 == 0 {
			msg.Group = fmt.Sprintf("g%d", i%10)
		}
		m.add(m.file, msg)
	}
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	all, some := make(chan struct{}), make(chan struct{})
	last := map[string]string{} // of a group
	send := func(_ context.Context, r *outbox.Record) (string, error) {
		m.mu.Lock()
		defer m.mu.Unlock()
		m.sent[r.Key]++
		if r.Group != "" && r.Key <= last[r.Group] {
			t.Errorf("group %s: %s is sent after %s", r.Group, r.Key, last[r.Group])
		}
		last[r.Group] = r.Key
		switch len(m.sent) {
		case n / 10:
			close(some)
		case n:
			close(all)
		}
		return "", nil
	}
	var relays sync.WaitGroup
	for _, s := range []outbox.JournalStore{m.file, m.target} {
		r, err := outbox.NewRelay(outbox.RelayOptions{PollInterval: 10 * time.Millisecond, Logger: slog.New(slog.DiscardHandler)},
			journalOf(t, s).Sender(send, outbox.SendOptions{BatchSize: 10, Retention: outbox.DeleteOnSent, OnUnknown: outbox.Park}))
		require.NoError(t, err)
		relays.Go(func() {
			if err := r.Run(ctx); err != nil {
				t.Error(err)
			}
		})
	}
	<-some
	moved, err := m.move(MoveOptions{})
	require.NoError(t, err)
	require.Positive(t, moved.Messages(), "there was something left to move")
	<-all
	stop()
	relays.Wait()
	for key, times := range m.sent {
		require.Equal(t, 1, times, key)
	}
	require.Empty(t, m.states(m.file))
	require.Empty(t, m.states(m.target))
}

func TestMoveOfNothing(t *testing.T) {
	m := newMoving(t)
	moved, err := m.move(MoveOptions{})
	require.NoError(t, err)
	require.Zero(t, moved)
}

func TestMoveDryRunChangesNothing(t *testing.T) {
	m := newMoving(t)
	m.everything(m.file)
	before := m.states(m.file)
	moved, err := m.move(MoveOptions{DryRun: true})
	require.NoError(t, err)
	require.Equal(t, []MovedChannel{{Channel: mails, Pending: 6, Sent: 2, Dead: 2, Unknown: 3, Interrupted: 1}}, moved.Channels)
	require.Equal(t, before, m.states(m.file))
	require.Empty(t, m.states(m.target))
	d, _ := m.paused(m.file)
	require.Zero(t, d)
}
