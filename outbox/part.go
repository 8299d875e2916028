package outbox

import (
	"context"
	"slices"
	"time"
)

// settlePart reports and settles messages of a batch that have been decided
// over, while others of it may still be being sent.
func (b *batch) settlePart(n *run, v verdict, end ending) tally {
	if v.empty() {
		return tally{}
	}
	b.reportPart(v, end)
	b.reportDestination(n, v, end)
	t := tally{published: v.settled}
	began := time.Now()
	var busy []Settlement
	if len(v.ss) > 0 {
		u, locked := b.settleOnce(n, v.ss)
		t.add(u)
		busy = locked
	}
	b.settled(t, v, time.Since(began))
	b.goOnWithGroups(v.ss)
	if len(busy) == 0 {
		return t
	}
	b.c.r.observe(Event{Kind: EventBusy, Channel: b.c.name, Rows: len(busy), Err: ErrBusy})
	if n.alone {
		t.add(b.settleInsisting(n, busy))
		return t
	}
	b.c.settleLater(n, busy)
	return t
}

// goOnWithGroups asks for a claim where groups were let go: their next
// messages may be due, which no hint tells.
func (b *batch) goOnWithGroups(ss []Settlement) {
	if slices.ContainsFunc(ss, func(s Settlement) bool { return s.Row.Group != "" }) {
		b.c.claimAt(time.Now())
	}
}

// reportPart tells people and metrics what was decided.
func (b *batch) reportPart(v verdict, end ending) {
	r, ch := b.c.r, b.c.name
	if v.failed > 0 {
		r.observe(Event{Kind: EventRetry, Channel: ch, Rows: v.failed, Delay: v.soonest, Err: v.cause})
		b.logRetried(v, end)
	}
	if v.released > 0 {
		r.observe(Event{Kind: EventRelease, Channel: ch, Rows: v.released, Err: v.cause})
	}
	if v.dead > 0 {
		b.reportEnded(v, EventDead, OutcomeDead, v.dead)
	}
	if v.parked > 0 {
		b.reportEnded(v, EventUnknown, OutcomeUnknown, v.parked)
	}
}

func (b *batch) logRetried(v verdict, end ending) {
	if end.ours() {
		return
	}
	ok, skipped := b.c.failed.allow(time.Now())
	if !ok {
		return
	}
	args := []any{"channel", b.c.name.Name, "failed", v.failed, "sent", v.done, "error", errorText(v.cause)}
	if skipped > 0 {
		args = append(args, "unlogged_failures", skipped)
	}
	b.c.r.log.Warn("outbox: sending failed, trying again", args...)
}

// reportEnded names the first of the messages that ended so: List tells of the
// others.
func (b *batch) reportEnded(v verdict, kind EventKind, o Outcome, rows int) {
	s := v.ss[slices.IndexFunc(v.ss, func(s Settlement) bool { return s.Outcome == o })]
	c := b.c
	c.r.observe(Event{Kind: kind, Channel: c.name, Rows: rows, Err: v.cause})
	seldom := &c.crew.dead
	if o == OutcomeUnknown {
		seldom = &c.crew.parked
	}
	ok, skipped := seldom.allow(time.Now())
	if !ok {
		return
	}
	args := []any{"channel", c.name.Name, "key", s.Row.Key, "attempt", s.Row.Attempt, "messages", rows, "error", s.Error}
	if skipped > 0 {
		args = append(args, "unlogged", skipped)
	}
	if o == OutcomeDead {
		c.r.log.Error("outbox: message is dead, retry or discard it", args...)
		return
	}
	c.r.log.Warn("outbox: nobody knows whether the message was sent, resolve, retry or discard it", args...)
}

// reportCall tells people and metrics how a call of user code went.
func (d *dispatch) reportCall(k *call) {
	c := d.c
	kind := EventPublish
	if k.asks {
		kind = EventProbe
	}
	c.r.observe(Event{Kind: kind, Channel: c.name, Rows: len(k.items), Duration: time.Since(k.began), Err: k.end.reason()})
	p, panicked := k.end.err.(*panicError)
	if !panicked {
		return
	}
	if ok, skipped := c.panicked.allow(time.Now()); ok {
		c.r.log.Error("outbox: send function panicked", "channel", c.name.Name, "key", k.items[0].row.Key,
			"error", p.text, "unlogged_panics", skipped, "stack", string(p.stack))
	}
}

// Pauses before messages are settled again that were locked: shorter than
// for entries, since Puts hold the rows of groups as a rule.
const (
	latePauseCap = 200 * time.Millisecond
	lateBatch    = 1000
)

// settleInsisting settles messages that were locked, until they are free or
// their leases lapse. Those that are settled, and only their groups locked,
// need not be waited for: the groups go on when their leases lapse.
func (b *batch) settleInsisting(n *run, busy []Settlement) (t tally) {
	ctx, cancel := context.WithDeadline(n.ctx, b.hold.until)
	defer cancel()
	for try := 1; len(busy) > 0; try++ {
		sleep(ctx, jitter(exponential(settlePause, latePauseCap, try)))
		if ctx.Err() != nil || try%busyTries == 0 {
			u, still := b.c.sift(n, busy)
			b.settled(u, verdict{}, 0)
			t.add(u)
			busy = still
		}
		if ctx.Err() != nil && len(busy) > 0 {
			b.leave(n, len(busy), ErrBusy)
			t.add(tally{left: len(busy), err: ErrBusy})
			return t
		}
		if len(busy) == 0 {
			return t
		}
		u, still := b.settleOnce(n, again(busy))
		b.settled(u, verdict{}, 0)
		t.add(u)
		busy = still
	}
	return t
}

// again marks settlements that may have been taken, all but the group's part.
func again(ss []Settlement) []Settlement {
	for i := range ss {
		ss[i].Again = true
	}
	return ss
}

// sift tells the settlements that were taken, though their groups are locked,
// from those of messages that are locked.
func (c *channel) sift(n *run, busy []Settlement) (t tally, still []Settlement) {
	for i := range busy {
		s := &busy[i]
		err := ErrBusy
		if s.Row.Group != "" {
			err = n.ask(n.settling, readTimeout, func(ctx context.Context) error {
				return c.crew.sending.journal.stillBusy(ctx, Lease{Channel: c.name.Name, Key: s.Row.Key, Token: s.Row.Token})
			})
		}
		if err != nil {
			still = append(still, *s)
			continue
		}
		t.count(s.Outcome, ResultDone)
	}
	return t, still
}
