package integration

import (
	"cmp"
	"slices"
	"time"

	"pgregory.net/rapid"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A model is what a channel of a journal must hold, without a database, other
// transactions or locks.
type model struct {
	now      func() time.Time
	messages map[string]*modelMessage
	// Groups whose leased message was discarded: a store may let them go at
	// once, or when that lease would have ended.
	unsure map[string]time.Time
	tokens map[string]outbox.Token // who had a group last
}

type modelMessage struct {
	outbox.Row
	leased bool           // though the lease may have lapsed
	ended  outbox.Outcome // of the present token; 0: none
	lapses int
}

// alone returns whether a message is to be claimed without company.
func (m *modelMessage) alone() bool { return m.leased && m.lapses+1 >= 2 }

func (w *model) out(m *modelMessage) bool { return m.leased && m.LeaseUntil.After(w.now()) }

func (m *modelMessage) over() bool { return m.State >= outbox.StateSent }

// sorted returns the messages of a group, or all, in the order of their numbers.
func (w *model) sorted(group string) []*modelMessage {
	all := []*modelMessage{}
	for _, m := range w.messages {
		if group == "" || m.Group == group {
			all = append(all, m)
		}
	}
	slices.SortFunc(all, func(a, b *modelMessage) int { return cmp.Compare(a.Version, b.Version) })
	return all
}

func (w *model) rows() []outbox.Row {
	rows := []outbox.Row{}
	for _, m := range w.sorted("") {
		rows = append(rows, m.Row)
	}
	return rows
}

// groupOut returns whether a run of a group is out.
func (w *model) groupOut(group string) bool { return slices.ContainsFunc(w.sorted(group), w.out) }

// behind returns whether a message of a group cannot be begun.
func (w *model) behind(group string, number outbox.Version) bool {
	for _, m := range w.sorted(group) {
		if m.Version < number && m.State != outbox.StateSent {
			return true
		}
	}
	return w.groupOut(group)
}

func (w *model) put(t *rapid.T, p outbox.PutRow, begin time.Duration, a outbox.PutAnswer) {
	old := w.messages[p.Key]
	if a.Created != (old == nil) {
		t.Fatalf("put of %s: created %t, want %t", p.Key, a.Created, old == nil)
	}
	if old != nil {
		if want := string(old.Payload) != string(p.Payload) || old.Group != p.Group; a.Differs != want || a.Row.Version != old.Version {
			t.Fatalf("put of %s: differs %t, number %d; want %t, %d", p.Key, a.Differs, a.Row.Version, want, old.Version)
		}
		return
	}
	if group := w.sorted(p.Group); p.Group != "" && len(group) > 0 && group[len(group)-1].Version >= a.Row.Version {
		t.Fatalf("put of %s: number %d does not exceed the last of group %s", p.Key, a.Row.Version, p.Group)
	}
	now := w.now()
	m := &modelMessage{Row: outbox.Row{
		Key: p.Key, Group: p.Group, Version: a.Row.Version, Payload: p.Payload, State: outbox.StatePending, StagedAt: now, Due: now.Add(p.Delay),
	}}
	w.messages[p.Key] = m
	if begin > 0 {
		w.lease(t, m, a.Row, begin)
	}
}

// lease gives a message to the holder of r's token.
func (w *model) lease(t *rapid.T, m *modelMessage, r outbox.Row, length time.Duration) {
	if r.Token <= m.Token {
		t.Fatalf("%s: token %d does not exceed its predecessor %d", m.Key, r.Token, m.Token)
	}
	if !m.leased || m.lapses >= 2 {
		m.Attempt++
	}
	if m.leased {
		m.lapses++
	}
	if ambiguous, alone := m.lapses > 0, m.lapses > 1; r.Ambiguous != ambiguous || r.Alone != alone {
		t.Fatalf("%s: ambiguous %t, want %t; alone %t, want %t", m.Key, r.Ambiguous, ambiguous, r.Alone, alone)
	}
	if m.Due.After(w.now()) && !r.Due.After(m.Due) {
		m.Due = r.Due // begun early
	}
	m.leased, m.ended, m.State, m.Token, m.LeaseUntil = true, 0, outbox.StateSending, r.Token, w.now().Add(length)
	w.tokens[m.Group] = r.Token
	delete(w.unsure, m.Group)
}

// due returns the runs that can be claimed, single messages among them, and
// those of groups that may be leased still.
func (w *model) due(skipEnded bool) (due, optional [][]*modelMessage) {
	groups := map[string]bool{}
	for _, m := range w.sorted("") {
		switch {
		case m.Group != "":
			groups[m.Group] = true
		case w.claimable(m):
			due = append(due, []*modelMessage{m})
		}
	}
	for group := range groups {
		run := w.run(group, skipEnded)
		switch until, unsure := w.unsure[group]; {
		case len(run) == 0 || w.groupOut(group):
		case unsure && until.After(w.now()):
			optional = append(optional, run)
		default:
			due = append(due, run)
		}
	}
	return due, optional
}

func (w *model) claimable(m *modelMessage) bool {
	return !m.over() && !m.Due.After(w.now()) && !w.out(m)
}

func (w *model) run(group string, skipEnded bool) (run []*modelMessage) {
	for _, m := range w.sorted(group) {
		switch {
		case m.State == outbox.StateSent, m.over() && skipEnded:
			continue
		case !w.claimable(m), m.alone() && len(run) > 0:
			return run
		}
		if run = append(run, m); m.alone() {
			return run
		}
	}
	return run
}

// soonest returns how long it is until something can be claimed.
func (w *model) soonest() (wait time.Duration, any bool) {
	consider := func(at time.Time) {
		if d := max(0, at.Sub(w.now())); !any || d < wait {
			wait, any = d, true
		}
	}
	heads := map[string]bool{}
	for _, m := range w.sorted("") {
		switch {
		case m.State == outbox.StateSent, m.Group == "" && m.over(), m.Group != "" && heads[m.Group]:
			continue
		case m.Group != "" && (m.over() || w.groupOut(m.Group) || !w.unsure[m.Group].IsZero()):
			heads[m.Group] = true // blocked, or out, or perhaps out
			continue
		}
		heads[m.Group] = m.Group != ""
		if at := m.Due; m.leased && m.LeaseUntil.After(at) {
			consider(m.LeaseUntil)
		} else {
			consider(at)
		}
	}
	return wait, any
}

func (w *model) settle(s outbox.Settlement) outbox.Result {
	m := w.messages[s.Row.Key]
	switch {
	case m == nil && s.Again:
		return outbox.ResultDone
	case m == nil, m.Token != s.Row.Token:
		return outbox.ResultStale
	case !m.leased && m.ended == s.Outcome:
		return outbox.ResultDone
	case !m.leased:
		return outbox.ResultStale
	case s.Outcome == outbox.OutcomeDone && !s.Keep:
		delete(w.messages, m.Key)
		return outbox.ResultDone
	}
	now := w.now()
	m.leased, m.ended, m.LeaseUntil = false, s.Outcome, time.Time{}
	switch open := s.Outcome == outbox.OutcomeRetry || s.Outcome == outbox.OutcomeRelease; {
	case !open, s.Doubt == outbox.DoubtCleared:
		m.lapses = 0
	case s.Doubt == outbox.DoubtRaised:
		m.lapses = 1
	default:
		m.lapses = min(m.lapses, 1)
	}
	if s.Error != "" {
		m.LastError, m.Code = s.Error, s.Code
	}
	switch s.Outcome {
	case outbox.OutcomeRelease:
		m.Attempt--
		fallthrough
	case outbox.OutcomeRetry:
		m.Due = now.Add(s.Delay)
		m.reopen()
	case outbox.OutcomeDone:
		m.State, m.CompletedAt, m.Ref = outbox.StateSent, now, s.Ref
	case outbox.OutcomeDead:
		m.State, m.CompletedAt = outbox.StateDead, now
	case outbox.OutcomeUnknown:
		m.State, m.CompletedAt = outbox.StateUnknown, now
	}
	return outbox.ResultDone
}

func (m *modelMessage) reopen() {
	m.State, m.CompletedAt = outbox.StateFailed, time.Time{}
	if m.Attempt == 0 {
		m.State = outbox.StatePending
	}
}

func (w *model) extend(r outbox.Row, length time.Duration) outbox.Result {
	m := w.messages[r.Key]
	if m == nil || m.Token != r.Token || !m.leased || m.Group != "" && w.tokens[m.Group] != r.Token {
		return outbox.ResultStale
	}
	m.LeaseUntil = w.now().Add(length)
	return outbox.ResultDone
}

func (w *model) amend(a outbox.Amendment) (count int) {
	for _, m := range w.sorted("") {
		allowed := m.State == outbox.StateUnknown
		switch a.Action {
		case outbox.ActionRetry:
			allowed = m.State == outbox.StateFailed || m.over() && m.State != outbox.StateSent
		case outbox.ActionDiscard:
			allowed = true
		}
		if !allowed || count == a.Limit || !selects(a.MessageFilter, m) {
			continue
		}
		if count++; !a.DryRun {
			w.change(m, a)
		}
	}
	return count
}

func selects(f outbox.MessageFilter, m *modelMessage) bool {
	return (f.Key == "" || f.Key == m.Key) && (f.Group == "" || f.Group == m.Group) && (f.Code == "" || f.Code == m.Code) &&
		(len(f.States) == 0 || slices.Contains(f.States, m.State))
}

func (w *model) change(m *modelMessage, a outbox.Amendment) {
	now := w.now()
	m.ended = 0
	switch a.Action {
	case outbox.ActionDiscard:
		if delete(w.messages, m.Key); m.Group != "" && m.leased {
			w.unsure[m.Group] = m.LeaseUntil
		}
	case outbox.ActionRetry:
		m.Attempt, m.Due = 0, now
		m.reopen()
	case outbox.ActionPending:
		m.Due = now
		m.reopen()
	case outbox.ActionSent:
		m.State, m.CompletedAt, m.Ref = outbox.StateSent, now, a.Ref
	case outbox.ActionDead:
		m.State, m.CompletedAt = outbox.StateDead, now
	}
}

func (w *model) purge(p outbox.Purge) (count int) {
	for _, m := range w.sorted("") {
		if slices.Contains(p.States, m.State) && m.CompletedAt.Before(w.now().Add(-p.Age)) {
			delete(w.messages, m.Key)
			count++
		}
	}
	return count
}
