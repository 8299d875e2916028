package outbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"
)

// A batch is what one claim gave, until it is settled.
type batch struct {
	c         *channel
	rows      []Row
	probe     bool // the store asks whether the destination is up
	trial     bool // so does this relay
	hold      hold
	avoided   []Row // kept from being published once more meanwhile
	isAvoided map[string]bool
	lost      map[string]bool // by the last extension
	parcels   []*parcel       // of messages
	downs     int             // how often the destination had been found down, before the claim
	job       job
	verdict   verdict
	began     time.Time // of the publication
	cut       context.CancelCauseFunc
	state     atomic.Int32
}

// The call of user code: whoever changes it from running knows that the other
// side has not.
const (
	callRunning int32 = iota
	callReturned
	callAbandoned
)

// take claims up to limit rows. Their leases are counted from before the claim
// was sent.
func (c *channel) take(n *run, limit int, full bool) (*batch, error) {
	b := &batch{c: c}
	if c.crew != nil {
		b.downs = c.downs()
	}
	var sent time.Time
	// A claim that takes as long as its lease is worth nothing.
	err := n.ask(n.reads, c.o.Lease, func(ctx context.Context) error {
		sent = time.Now()
		claimed, err := c.claim(ctx, Claim{Channel: c.name.Name, Limit: limit, Lease: c.o.Lease, Full: full})
		b.rows, b.probe = claimed.Rows, claimed.Probe
		return err
	})
	if err != nil {
		return nil, err
	}
	b.hold = newHold(b.rows, c.o.Lease, sent)
	if c.crew != nil {
		b.parcels = c.crew.parcels(b.rows)
		c.unstarted(len(b.parcels))
	}
	c.r.observe(Event{Kind: EventClaim, Channel: c.name, Rows: len(b.rows), Duration: time.Since(sent)})
	return b, nil
}

// process publishes a claimed batch and settles it. Its slot is given back
// however it ends, unless the publication goes on by itself.
func (b *batch) process(n *run) tally {
	hung := false
	defer func() {
		if !hung {
			b.c.release()
		}
	}()
	if b.c.crew != nil {
		return b.dispatch(n)
	}
	if n.stopping() {
		return b.settle(n, giveBack(b.rows, 0))
	}
	if !time.Now().Before(b.hold.surely()) { // the process stood still since the claim: others may have them
		b.c.r.log.Warn("outbox: leases all but over before the publication, entries are given back",
			"channel", b.c.name.Name, "entries", len(b.rows))
		return b.settle(n, giveBack(b.rows, 0))
	}
	t := b.setAside(n)
	if len(b.rows) == 0 {
		return t
	}
	b.job = b.c.prepare(b.rows)
	end := b.publish(n)
	hung = end.hung
	b.c.let(b.avoided)
	v := b.job.judge(end, b.c.backoff)
	b.verdict = v
	b.c.learn(b, v, end)
	b.report(v, end)
	b.reportDestination(n, v, end)
	settled := b.settle(n, v)
	if errors.Is(end.cause, errShutdown) && settled.left == 0 {
		n.leave(b.c.name, v.failed, end.reason())
	}
	t.add(settled)
	return t
}

// giveBack releases rows that were not published.
func giveBack(rows []Row, delay time.Duration) verdict {
	v := verdict{ss: make([]Settlement, len(rows)), released: len(rows)}
	for i, r := range rows {
		v.ss[i] = Settlement{Row: r, Outcome: OutcomeRelease, Delay: delay, Error: ErrorText(r.LastError)}
	}
	return v
}

// report tells people and metrics how a publication went.
func (b *batch) report(v verdict, end ending) {
	r, ch := b.c.r, b.c.name
	took := time.Since(b.began)
	if len(b.rows) > v.broken {
		r.observe(Event{Kind: EventPublish, Channel: ch, Rows: len(b.rows) - v.broken, Duration: took, Err: end.reason()})
	}
	if v.failed > 0 {
		r.observe(Event{Kind: EventRetry, Channel: ch, Rows: v.failed, Delay: v.soonest, Err: v.cause})
	}
	if v.released > 0 {
		r.observe(Event{Kind: EventRelease, Channel: ch, Rows: v.released, Err: v.cause})
	}
	if v.broken > 0 {
		r.observe(Event{Kind: EventUnread, Channel: ch, Rows: v.broken, Err: v.unread})
		b.logUnread(v)
	}
	if v.failed > 0 && !end.ours() && !end.hung {
		b.logFailed(v, end, took)
	}
}

func (b *batch) logFailed(v verdict, end ending, took time.Duration) {
	p, panicked := end.err.(*panicError)
	seldom := &b.c.failed
	if panicked {
		seldom = &b.c.panicked // a plain failure just before must not hide the stack
	}
	ok, skipped := seldom.allow(time.Now())
	if !ok {
		return
	}
	args := []any{
		"channel", b.c.name.Name, "entries", len(b.rows), "failed", v.failed,
		"took", took.Round(time.Microsecond), "error", errorText(v.cause),
	}
	if skipped > 0 {
		args = append(args, "unlogged_failures", skipped)
	}
	if panicked {
		b.c.r.log.Error("outbox: publish function panicked, trying again", append(args, "stack", string(p.stack))...)
		return
	}
	b.c.r.log.Warn("outbox: publishing failed, trying again", args...)
}

// logUnread names the first of the rows that cannot be read; List and the last
// error of each tell of the others.
func (b *batch) logUnread(v verdict) {
	if ok, _ := b.c.unread.allow(time.Now()); !ok {
		return
	}
	s := v.ss[slices.IndexFunc(v.ss, func(s Settlement) bool { return s.Error == errorText(v.unread) })]
	b.c.r.log.Error("outbox: entry cannot be read, discard or repair it",
		"channel", b.c.name.Name, "key", s.Row.Key, "version", int64(s.Row.Version), "entries", v.broken, "error", s.Error)
}

// reportDestination tells the store whether the destination is up, where the
// batch has found out.
//
// A probe that fails plainly was answered, so the destination is up; one that
// timed out, panicked or is of unknown outcome was not.
func (b *batch) reportDestination(n *run, v verdict, end ending) {
	switch {
	case v.down != nil:
		b.outage(n, true, v.down)
	case !b.probe || end.ours() || v.mute:
	case v.done+v.settled > 0 || v.missed() > 0 && !v.unknown:
		b.outage(n, false, nil)
	case v.missed() > 0:
		b.outage(n, true, v.cause)
	}
}

func (b *batch) outage(n *run, down bool, cause error) {
	r, ch := b.c.r, b.c.name
	reason := ""
	if down {
		reason = errorText(cause)
	}
	err := b.insist(n, opOutage, func(ctx context.Context) error {
		return r.store.Outage(ctx, ch, down, reason)
	})
	switch {
	case err != nil && down:
		b.c.slow()
		return
	case err != nil:
		return // the next probe will tell
	case down:
		r.log.Warn("outbox: destination is unavailable, channel pauses in all relays", "channel", ch.Name, "error", reason)
		r.observe(Event{Kind: EventOutage, Channel: ch, Err: cause})
		return
	}
	r.log.Info("outbox: destination answers again, channel goes on", "channel", ch.Name)
	r.observe(Event{Kind: EventResume, Channel: ch})
	b.c.wakeUp()
}

// insist makes a call to the store until it works or the batch's leases end.
func (b *batch) insist(n *run, o op, call func(context.Context) error) error {
	for failures := 1; ; failures++ {
		// Not all of the lease: a connection that is dead without a word must leave time for another.
		limit := max(time.Until(b.hold.until)/2, b.c.o.Lease/3)
		err := n.ask(n.settling, limit, call)
		if err == nil {
			b.c.r.healthy(o)
			return nil
		}
		if n.settling.Err() != nil {
			return fmt.Errorf("%w: %w", context.Cause(n.settling), err)
		}
		b.c.r.troubled(o, b.c.name, err)
		pause := jitter(exponential(settlePause, time.Second, failures))
		if time.Now().Add(pause).After(b.hold.until) {
			return err
		}
		sleep(n.settling, pause)
	}
}
