package outboxtest_test

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func (m *memory) SettleMessages(ctx context.Context, tx outbox.Tx, channel string, ss []outbox.Settlement) ([]outbox.Result, error) {
	if tx == nil && !m.is("settling needs no transaction") {
		return nil, fmt.Errorf("settle: %w", outbox.ErrTx)
	}
	return m.settleMessages(ctx, tx, channel, ss)
}

func (m *memory) ExtendMessages(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	if tx == nil && !m.is("settling needs no transaction") {
		return nil, fmt.Errorf("extend: %w", outbox.ErrTx)
	}
	return m.extendMessages(ctx, tx, channel, rows, d)
}

func (m *memory) settleMessages(ctx context.Context, tx outbox.Tx, channel string, ss []outbox.Settlement) ([]outbox.Result, error) {
	if m.is("settle of a message does not wait") {
		m.db.writer = nil
	}
	return within(ctx, m, tx, "settle", func(t *memoryTx) ([]outbox.Result, error) {
		results, groups := []outbox.Result{}, []string{}
		for _, s := range ss {
			id := m.messageID(channel, s.Row.Key)
			r, there := t.message(id)
			if groups = append(groups, cmp.Or(s.Row.Group, r.Group)); m.is("group of a settlement is needed") {
				groups[len(groups)-1] = s.Row.Group
			}
			results = append(results, m.settleMessage(t, id, r, there, s))
		}
		out := m.heldRuns(t, channel)
		for i, s := range ss {
			if results[i] == outbox.ResultDone && groups[i] != "" && !m.letGo(t, m.groupID(channel, groups[i]), s.Row.Token, out) {
				results[i] = outbox.ResultBusy
			}
		}
		if m.is("results of messages are sorted") {
			slices.Sort(results)
		}
		return results, nil
	})
}

type heldRun struct {
	group groupID
	token outbox.Token
}

// heldRuns returns of which runs messages are still leased.
func (m *memory) heldRuns(t *memoryTx, channel string) map[heldRun]bool {
	out := map[heldRun]bool{}
	for _, r := range t.of(channel) {
		if r.Group != "" && r.claimed {
			out[heldRun{m.groupID(channel, r.Group), r.Token}] = true
		}
	}
	return out
}

// letGo ends the lease of a group unless messages of its run are out. It
// returns false where another transaction holds the group.
func (m *memory) letGo(t *memoryTx, id groupID, token outbox.Token, out map[heldRun]bool) bool {
	g := t.group(id)
	switch {
	case g.token != token || g.until.IsZero():
		return true
	case out[heldRun{id, token}] && !m.is("group is let go before its last"):
		return true
	case m.is("group is never let go"):
		return true
	case t.held(id):
		return m.is("held group is not busy")
	}
	t.setGroup(id, memoryGroup{token: token})
	return true
}

func (m *memory) settleMessage(t *memoryTx, id messageID, r memoryMessage, there bool, s outbox.Settlement) outbox.Result {
	switch {
	case !there && (s.Again && !m.is("again is ignored for messages") || m.is("gone message is done")):
		return outbox.ResultDone
	case !there:
		return outbox.ResultStale
	case r.Token != s.Row.Token && !m.is("token of a message is not compared"):
		return outbox.ResultStale
	case t.held(id) && !m.is("settle overrides held messages"):
		return outbox.ResultBusy
	case m.is("lapsed message is stale") && !m.leasedMessage(r):
		return outbox.ResultStale
	case !r.claimed && r.ended == s.Outcome && !m.has("same settlement of a message is stale", "message is settled twice"):
		return outbox.ResultDone
	case !r.claimed && !m.has("other settlement of a message is done", "message is settled twice", "token of a message is not compared"):
		return outbox.ResultStale
	}
	if s.Outcome == outbox.OutcomeDone && (!s.Keep || m.is("sent messages are not kept")) && !m.is("done messages are kept") {
		t.deleteMessage(id)
		return outbox.ResultDone
	}
	t.setMessage(id, m.settledMessage(r, s))
	return outbox.ResultDone
}

// settledMessage returns what a settlement makes of a message.
func (m *memory) settledMessage(r memoryMessage, s outbox.Settlement) memoryMessage {
	now := m.now()
	r.claimed, r.ended, r.LeaseUntil, r.Ambiguous, r.Alone = false, s.Outcome, time.Time{}, false, false
	open := s.Outcome == outbox.OutcomeRetry || s.Outcome == outbox.OutcomeRelease
	switch {
	case m.is("lapses are never forgotten"):
	case !open, s.Doubt == outbox.DoubtKept && m.is("doubt is forgotten"), s.Doubt == outbox.DoubtCleared && !m.is("doubt is never cleared"):
		r.lapses = 0
	case s.Doubt == outbox.DoubtRaised && !m.is("doubt is not raised"):
		r.lapses = 1
	default:
		r.lapses = min(r.lapses, 1)
	}
	if s.Outcome != outbox.OutcomeDone && s.Error != "" && !m.is("error of a message is dropped") {
		r.LastError, r.Code = s.Error, s.Code
	}
	if m.is("code is dropped") {
		r.Code = ""
	}
	switch s.Outcome {
	case outbox.OutcomeRelease:
		if !m.is("release counts") {
			r.Attempt--
		}
		fallthrough
	case outbox.OutcomeRetry:
		r.State = outbox.StateFailed
		if r.Attempt == 0 && !m.is("released message is failed") {
			r.State = outbox.StatePending
		}
		switch r.Due = later(now, s.Delay); m.defect {
		case "delay of a retry is ignored":
			r.Due = now
		case "delays of messages are doubled":
			r.Due = later(now, 2*s.Delay)
		}
	case outbox.OutcomeDone:
		if r.State, r.Ref, r.CompletedAt = outbox.StateSent, s.Ref, now; m.is("ref is dropped") {
			r.Ref = ""
		}
	case outbox.OutcomeDead:
		r.State, r.CompletedAt = outbox.StateDead, now
	case outbox.OutcomeUnknown:
		if r.State, r.CompletedAt = outbox.StateUnknown, now; m.is("unknown is dead") {
			r.State = outbox.StateDead
		}
	}
	if m.is("completion has no time") {
		r.CompletedAt = time.Time{}
	}
	return r
}

func (m *memory) extendMessages(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	return within(ctx, m, tx, "extend", func(t *memoryTx) ([]outbox.Result, error) {
		results := []outbox.Result{}
		for _, row := range rows {
			id := m.messageID(channel, row.Key)
			r, there := t.message(id)
			switch {
			case !there, r.Token != row.Token && !m.is("extend of a message ignores the token"), !r.claimed && !m.is("settled message is extended"):
				results = append(results, outbox.ResultStale)
			case r.Group != "" && t.group(m.groupID(channel, r.Group)).token != r.Token && !m.is("lost run is extended"):
				results = append(results, outbox.ResultStale)
			case t.held(id):
				results = append(results, outbox.ResultBusy)
			case m.is("lapsed message is not extended") && !m.leasedMessage(r):
				results = append(results, outbox.ResultStale)
			default:
				if !m.is("extend of a message does nothing") {
					r.LeaseUntil = later(m.now(), d)
				}
				t.setMessage(id, r)
				results = append(results, m.extendGroup(t, channel, r))
			}
		}
		if m.is("results of extensions are sorted") {
			slices.Sort(results)
		}
		return results, nil
	})
}

// extendGroup lets a group be held as long as its message.
func (m *memory) extendGroup(t *memoryTx, channel string, r memoryMessage) outbox.Result {
	id := m.groupID(channel, r.Group)
	switch g := t.group(id); {
	case r.Group == "" || g.token != r.Token || m.is("extend forgets the group"):
	case t.held(id):
		return outbox.ResultBusy
	default:
		t.setGroup(id, memoryGroup{until: r.LeaseUntil, token: r.Token})
	}
	return outbox.ResultDone
}

// allowed are the states from which an action leads.
var allowed = map[outbox.Action][]outbox.State{
	outbox.ActionRetry:   {outbox.StateFailed, outbox.StateDead, outbox.StateUnknown},
	outbox.ActionDiscard: {outbox.StatePending, outbox.StateFailed, outbox.StateSending, outbox.StateSent, outbox.StateDead, outbox.StateUnknown},
	outbox.ActionSent:    {outbox.StateUnknown},
	outbox.ActionDead:    {outbox.StateUnknown},
	outbox.ActionPending: {outbox.StateUnknown},
}

func (m *memory) AmendMessages(ctx context.Context, tx outbox.Tx, channel string, a outbox.Amendment) (outbox.Amended, error) {
	return within(ctx, m, tx, "amend", func(t *memoryTx) (outbox.Amended, error) {
		rows := []memoryMessage{}
		for id, r := range t.of(channel) {
			if r.Version <= a.After || !m.matches(r, a.MessageFilter) || t.held(id) && !m.is("amend overrides held messages") {
				continue
			}
			if slices.Contains(allowed[a.Action], r.State) || m.is("amend ignores the state") {
				rows = append(rows, r)
			}
		}
		slices.SortFunc(rows, func(a, b memoryMessage) int { return cmp.Compare(a.Version, b.Version) })
		more := len(rows) > a.Limit
		if more && !m.is("limit of an amendment is ignored") {
			rows = rows[:a.Limit]
		}
		answer := outbox.Amended{Count: len(rows)}
		if more {
			answer.Last = rows[len(rows)-1].Version
		}
		if a.DryRun && !m.is("dry run is real") {
			return answer, nil
		}
		for _, r := range rows {
			m.amend(t, m.messageID(channel, r.Key), r, a)
		}
		out := m.heldRuns(t, channel)
		for _, r := range rows {
			if id := m.groupID(channel, r.Group); r.Group != "" && !t.held(id) {
				if m.letGo(t, id, r.Token, out); m.is("discarded message keeps its group") {
					t.setGroup(id, memoryGroup{until: m.now().AddDate(1, 0, 0)})
				}
			}
		}
		return answer, nil
	})
}

func (m *memory) amend(t *memoryTx, id messageID, r memoryMessage, a outbox.Amendment) {
	now := m.now()
	switch a.Action {
	case outbox.ActionDiscard:
		t.deleteMessage(id)
		if m.is("tokens of messages restart after a discard") {
			t.db.token = 0
		}
		return
	case outbox.ActionRetry:
		r.State, r.Due, r.CompletedAt = outbox.StatePending, now, time.Time{}
		if r.Attempt = 0; m.is("retry by hand keeps the attempts") {
			r.Attempt, r.State = 1, outbox.StateFailed
		}
		if m.is("retry by hand is not due") {
			r.Due = now.Add(time.Hour)
		}
		if m.is("retry by hand clears the error") {
			r.LastError = ""
		}
	case outbox.ActionSent:
		r.State, r.CompletedAt, r.Ref = outbox.StateSent, now, a.Ref
	case outbox.ActionDead:
		r.State, r.CompletedAt = outbox.StateDead, now
	case outbox.ActionPending:
		r.State, r.Due, r.CompletedAt = outbox.StateFailed, now, time.Time{}
		if r.Attempt == 0 {
			r.State = outbox.StatePending
		}
	}
	r.ended = 0
	t.setMessage(id, r)
}

func (m *memory) PurgeMessages(ctx context.Context, channel string, p outbox.Purge) (int, error) {
	return within(ctx, m, nil, "purge", func(t *memoryTx) (int, error) {
		before := p.Before
		if before.IsZero() {
			before = m.now().Add(-p.Age)
		}
		rows := []memoryMessage{}
		for id, r := range t.of(channel) {
			state := slices.Contains(p.States, r.State) || m.is("purge ignores the state") && ended(r.State)
			if state && (r.CompletedAt.Before(before) || m.is("purge ignores the age")) && (!t.held(id) || m.is("purge overrides held messages")) {
				rows = append(rows, r)
			}
		}
		slices.SortFunc(rows, func(a, b memoryMessage) int {
			if m.is("purge begins with the newest") {
				return -a.CompletedAt.Compare(b.CompletedAt)
			}
			return a.CompletedAt.Compare(b.CompletedAt)
		})
		if !m.is("limit of a purge is ignored") {
			rows = rows[:min(len(rows), p.Limit)]
		}
		for _, r := range rows {
			if r.Group != "" && m.is("purged head blocks") {
				r.Payload, r.CompletedAt = nil, time.Time{}
				t.setMessage(m.messageID(channel, r.Key), r)
				continue
			}
			if !p.DryRun || m.is("dry run is real") {
				t.deleteMessage(m.messageID(channel, r.Key))
			}
		}
		return len(rows), nil
	})
}
