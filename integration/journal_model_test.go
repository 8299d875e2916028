package integration

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"pgregory.net/rapid"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// Random verbs of the journal, on a real database and on a model of forty
// lines, must come to the same messages: one after another, on a set clock.
func TestJournalIsItsModel(t *testing.T) {
	t.Parallel()
	onBoth(t, func(t *testing.T, s *site) { rapid.Check(t, property(s)) })
}

// FuzzJournal looks for verbs that do not:
// go test -run NONE -fuzz FuzzJournal -fuzzminimizetime 1x ./integration.
func FuzzJournal(f *testing.F) {
	for n := range 8 {
		seed := make([]byte, 512*n)
		for i := range seed {
			seed[i] = byte(i * (7*n + 3) >> (n % 5))
		}
		f.Add(seed)
	}
	f.Fuzz(rapid.MakeFuzz(property(onSQLite(f))))
}

var modelChannels atomic.Int64

// property returns what draws verbs, runs them and compares.
func property(s *site) func(*rapid.T) {
	clock := outboxtest.NewClock(time.Now())
	open := func() (*sqlstore.Store, error) {
		return sqlstore.New(s.db, s.dialect, sqlstore.Options{Clock: clock.Now})
	}
	store, err := open()
	require.NoError(s.t, err)
	return func(t *rapid.T) {
		d := &trial{
			T: t, ctx: context.Background(), open: open, store: store, clock: clock,
			ch:    outbox.Channel{System: outbox.SystemJournal, Name: fmt.Sprintf("model-%d", modelChannels.Add(1))},
			model: model{now: clock.Now, messages: map[string]*modelMessage{}, unsure: map[string]time.Time{}, tokens: map[string]outbox.Token{}},
		}
		t.Repeat(map[string]func(*rapid.T){
			"": d.compare, "put": d.put, "put many": d.putMany, "begin": d.begin, "claim": d.claim, "claim again": d.claim,
			"settle": d.settle, "settle a run": d.settleRun, "extend": d.extend, "amend": d.amend, "purge": d.purge, "wait": d.wait,
		})
	}
}

// A trial draws verbs and runs each on both sides.
type trial struct {
	*rapid.T
	ctx   context.Context
	open  func() (*sqlstore.Store, error)
	store outbox.JournalStore
	clock *outboxtest.Clock
	ch    outbox.Channel
	model model
	held  []outbox.Row // leases given out, the newest last; most are stale
}

var (
	modelKeys   = []string{"a", "b", "c", "d", "e", "f", "g", "h"}
	modelGroups = []string{"", "", "x", "y", "z"}
	modelStates = []outbox.State{
		outbox.StatePending, outbox.StateFailed, outbox.StateSending, outbox.StateSent, outbox.StateDead, outbox.StateUnknown,
	}
)

func draw[V any](t *rapid.T, label string, from ...V) V {
	return rapid.SampledFrom(from).Draw(t, label)
}

// span draws a duration, many of them equal.
func span(t *rapid.T, label string) time.Duration {
	return draw(t, label, 0, time.Microsecond, time.Second, time.Minute, time.Minute, time.Hour)
}

func lease(t *rapid.T) time.Duration { return draw(t, "lease", time.Second, time.Minute, time.Hour) }

func (d *trial) check(what string, err error) {
	if err != nil {
		d.Fatalf("%s: %v", what, err)
	}
}

func (d *trial) hold(rows ...outbox.Row) {
	d.held = append(d.held, rows...)
	d.held = d.held[max(0, len(d.held)-12):]
}

func (d *trial) drawPut(t *rapid.T) outbox.PutRow {
	return outbox.PutRow{
		Key: draw(t, "key", modelKeys...), Group: draw(t, "group", modelGroups...),
		Payload: []byte(draw(t, "payload", "", "1", "2")), Delay: span(t, "delay"),
	}
}

func (d *trial) put(t *rapid.T) {
	d.T = t
	p, begin := d.drawPut(t), time.Duration(0)
	if draw(t, "begin", false, true) {
		begin = lease(t)
	}
	if _, unsure := d.model.unsure[p.Group]; unsure {
		begin = 0
	}
	as, err := d.store.PutRows(d.ctx, nil, d.ch.Name, []outbox.PutRow{p}, begin)
	if d.model.messages[p.Key] == nil && begin > 0 && p.Group != "" && d.model.behind(p.Group, 1<<62) {
		if !errors.Is(err, outbox.ErrBlocked) {
			t.Fatalf("put of %s, begun, in group %s: %v, want ErrBlocked", p.Key, p.Group, err)
		}
		return
	}
	d.check("put", err)
	d.model.put(t, p, begin, as[0])
	if begin > 0 && as[0].Created {
		d.hold(as[0].Row)
	}
}

func (d *trial) putMany(t *rapid.T) {
	d.T = t
	rows := []outbox.PutRow{}
	for range 4 {
		if p := d.drawPut(t); !slices.ContainsFunc(rows, func(r outbox.PutRow) bool { return r.Key == p.Key }) {
			rows = append(rows, p)
		}
	}
	as, err := d.store.PutRows(d.ctx, nil, d.ch.Name, rows, 0)
	d.check("put", err)
	for i, a := range as {
		d.model.put(t, rows[i], 0, a)
	}
}

func (d *trial) begin(t *rapid.T) {
	d.T = t
	key, length := draw(t, "key", modelKeys...), lease(t)
	m := d.model.messages[key]
	if m != nil {
		if _, unsure := d.model.unsure[m.Group]; unsure {
			return // its group may or may not be leased
		}
	}
	r, err := d.store.BeginMessage(d.ctx, nil, d.ch.Name, key, length)
	var want error
	switch {
	case m == nil:
		want = outbox.ErrNotFound
	case m.State != outbox.StatePending && m.State != outbox.StateFailed:
		want = outbox.ErrState
	case m.Group != "" && d.model.behind(m.Group, m.Version):
		want = outbox.ErrBlocked
	}
	if !errors.Is(err, want) {
		t.Fatalf("begin of %s: %v, want %v", key, err, want)
	}
	if want == nil {
		d.model.lease(t, m, r, length)
		d.hold(r)
	}
}

func (d *trial) claim(t *rapid.T) {
	d.T = t
	c := outbox.Claim{Channel: d.ch.Name, Limit: draw(t, "limit", 1, 2, 5, 100), Lease: lease(t), Full: true, SkipEnded: draw(t, "skip", false, true)}
	due, optional := d.model.due(c.SkipEnded)
	claimed, err := d.store.ClaimMessages(d.ctx, nil, c)
	d.check("claim", err)
	d.judge(t, c, claimed.Rows, due, optional)
	for _, r := range claimed.Rows {
		d.model.lease(t, d.model.messages[r.Key], r, c.Lease)
	}
	d.hold(claimed.Rows...)
}

// judge compares what was claimed with the runs that were due.
func (d *trial) judge(t *rapid.T, c outbox.Claim, rows []outbox.Row, due, optional [][]*modelMessage) {
	taken := map[string]int{}
	for _, run := range slices.Concat(due, optional) {
		for i, m := range run {
			if j := slices.IndexFunc(rows, func(r outbox.Row) bool { return r.Key == m.Key }); j >= 0 {
				if i > 0 && taken[run[i-1].Key] == 0 {
					t.Fatalf("claimed %s before %s of its group", m.Key, run[i-1].Key)
				}
				if m.alone() && len(rows) > 1 {
					t.Fatalf("claimed %s, that lapsed %d times, beside others", m.Key, m.lapses+1)
				}
				taken[m.Key] = j + 1
			}
		}
	}
	if len(taken) != len(rows) || len(rows) > c.Limit {
		t.Fatalf("claimed %d messages (limit %d), of which %d were due", len(rows), c.Limit, len(taken))
	}
	if len(rows) == 0 && len(due) > 0 {
		t.Fatalf("claimed nothing, though %s of group %q is due", due[0][0].Key, due[0][0].Group)
	}
	lonely := slices.ContainsFunc(slices.Concat(due, optional), func(run []*modelMessage) bool { return run[0].alone() })
	if c.Limit < 100 || lonely {
		return
	}
	for _, run := range due {
		for _, m := range run {
			if taken[m.Key] == 0 && !m.alone() {
				t.Fatalf("%s of group %q was not claimed", m.Key, m.Group)
			}
		}
	}
}

func (d *trial) drawSettlement(t *rapid.T, r outbox.Row) outbox.Settlement {
	s := outbox.Settlement{
		Row: r, Delay: span(t, "delay"), Again: draw(t, "again", false, false, true),
		Outcome: draw(t, "outcome", outbox.OutcomeDone, outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeRelease, outbox.OutcomeDead, outbox.OutcomeUnknown),
	}
	if s.Outcome == outbox.OutcomeDone {
		s.Keep, s.Ref = draw(t, "keep", false, true), "ref"
	} else {
		s.Error, s.Code = draw(t, "error", "x", "y"), draw(t, "code", "", "E1")
		s.Doubt = draw(t, "doubt", outbox.DoubtKept, outbox.DoubtKept, outbox.DoubtRaised, outbox.DoubtCleared)
	}
	return s
}

func (d *trial) settle(t *rapid.T) {
	d.T = t
	if len(d.held) == 0 {
		return
	}
	d.settleAll(t, d.drawSettlement(t, draw(t, "lease", d.held...)))
}

// settleRun settles what was leased last, in one call.
func (d *trial) settleRun(t *rapid.T) {
	d.T = t
	if len(d.held) == 0 {
		return
	}
	ss, last := []outbox.Settlement{}, d.held[len(d.held)-1].Token
	for _, r := range d.held {
		if r.Token == last {
			ss = append(ss, d.drawSettlement(t, r))
		}
	}
	d.settleAll(t, ss...)
}

func (d *trial) settleAll(t *rapid.T, ss ...outbox.Settlement) {
	got, err := d.store.Settle(d.ctx, d.ch, ss)
	d.check("settle", err)
	for i, s := range ss {
		if want := d.model.settle(s); got[i] != want {
			t.Fatalf("settle %s with outcome %d (again %t): result %d, want %d", s.Row.Key, s.Outcome, s.Again, got[i], want)
		}
	}
}

// extend extends all that one claim leased, as a relay does.
func (d *trial) extend(t *rapid.T) {
	d.T = t
	if len(d.held) == 0 {
		return
	}
	// Not shorter than what was leased: only who claims gives something up.
	token, length, rows := draw(t, "lease", d.held...).Token, time.Hour, []outbox.Row{}
	for _, r := range d.held {
		if r.Token == token {
			rows = append(rows, r)
		}
	}
	got, err := d.store.Extend(d.ctx, d.ch, rows, length)
	d.check("extend", err)
	for i, r := range rows {
		if want := d.model.extend(r, length); got[i] != want {
			t.Fatalf("extend %s: result %d, want %d", r.Key, got[i], want)
		}
	}
}

func (d *trial) amend(t *rapid.T) {
	d.T = t
	a := outbox.Amendment{
		Action: draw(t, "action", outbox.ActionRetry, outbox.ActionDiscard, outbox.ActionSent, outbox.ActionDead, outbox.ActionPending),
		Limit:  draw(t, "limit", 1, 2, 100), Ref: "by hand", DryRun: draw(t, "dry run", false, false, false, true),
		MessageFilter: outbox.MessageFilter{
			Key: draw(t, "key", append(modelKeys, "", "", "", "")...), Group: draw(t, "group", "", "", "", "x", "y", "z"), Code: draw(t, "code", "", "", "E1"),
		},
	}
	if draw(t, "by state", false, false, true) {
		a.States = []outbox.State{draw(t, "state", modelStates...)}
	}
	got, err := d.store.AmendMessages(d.ctx, nil, d.ch.Name, a)
	d.check("amend", err)
	if want := d.model.amend(a); got.Count != want {
		t.Fatalf("amend %+v: %d messages, want %d", a, got.Count, want)
	}
}

func (d *trial) purge(t *rapid.T) {
	d.T = t
	p := outbox.Purge{States: []outbox.State{draw(t, "state", modelStates[3:]...)}, Age: span(t, "age"), Limit: 100}
	got, err := d.store.PurgeMessages(d.ctx, d.ch.Name, p)
	d.check("purge", err)
	if want := d.model.purge(p); got != want {
		t.Fatalf("purge %+v: %d messages, want %d", p, got, want)
	}
}

func (d *trial) wait(t *rapid.T) {
	d.T = t
	d.clock.Advance(span(t, "how long") + time.Microsecond)
}

// compare compares all that is stored, and when the store says to look again.
func (d *trial) compare(t *rapid.T) {
	d.T = t
	rows, err := d.store.ListMessages(d.ctx, nil, d.ch.Name, outbox.MessageList{Limit: 100, Payloads: true})
	d.check("list", err)
	want := d.model.rows()
	if len(rows) != len(want) {
		t.Fatalf("%d messages are stored, want %d", len(rows), len(want))
	}
	for i, r := range rows {
		got, want := bareRow(r), bareRow(want[i])
		if fmt.Sprintf("%+v", got) != fmt.Sprintf("%+v", want) {
			t.Fatalf("message %s:\n got %+v\nwant %+v", r.Key, got, want)
		}
	}
	fresh, err := d.open() // one that has claimed before may look at what is recent only
	d.check("open", err)
	looks, err := fresh.Look(d.ctx, []outbox.Channel{d.ch})
	d.check("look", err)
	if soonest, any := d.model.soonest(); any && (looks[0].Wait < 0 || looks[0].Wait > soonest) {
		t.Fatalf("look says to claim in %v, though something is due in %v, at %v: %+v", looks[0].Wait, soonest, d.clock.Now(), want)
	}
}

// bareRow leaves out what a store need not tell.
func bareRow(r outbox.Row) outbox.Row {
	r.ID, r.Ambiguous, r.Alone, r.Header = 0, false, false, nil
	if r.State != outbox.StateSending {
		r.Token = 0
	}
	return r
}
