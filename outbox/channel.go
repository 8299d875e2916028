package outbox

import (
	"sync"
	"time"
)

// A channel is an attachment being served: when to claim, and how much.
type channel struct {
	source
	r        *Relay
	name     Channel
	o        PublishOptions
	backoff  backoffFunc
	failed   throttle      // of log lines about failed publications
	panicked throttle      // about panics, which have a stack to show
	unread   throttle      // and about entries that cannot be read
	wake     chan struct{} // makes the loop think again
	late     chan struct{} // bounds settlements that go on behind the slots
	crew     *crew         // of a Journal channel

	mu       sync.Mutex
	now      bool      // claim at once
	dueAt    time.Time // claim then: something is known to fall due; zero: nothing is
	paused   time.Time // no claim before: the store said so
	troubled time.Time // no claim before: the last one failed
	failures int       // of claims, in a row
	hints    hints
	health   health
	busy     int            // publications, those included that are hung
	hung     int            // publications that ignore their cancelled context
	avoid    map[string]int // keys being published whose leases may have lapsed, by how often
	sleeping time.Time      // until when the loop sleeps; zero: it is awake
}

// maxLate is how many batches of a channel may wait for locked rows while
// their slots go on.
const maxLate = 8

func newChannel(r *Relay, src source, o PublishOptions) *channel {
	c := &channel{
		source: src, r: r, name: src.channel(), o: o, backoff: bounded(o.Backoff),
		wake: make(chan struct{}, 1), late: make(chan struct{}, maxLate),
	}
	c.hints = newHints(r.o.PollInterval)
	if s, ok := src.(*sending); ok {
		c.crew = newCrew(s, o.InFlight)
	}
	return c
}

// reset forgets what a former run knew, except publications that still hang.
func (c *channel) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now, c.dueAt, c.paused, c.troubled, c.failures = false, time.Time{}, time.Time{}, time.Time{}, 0
	c.health = health{}
	c.hints.clear()
}

// loop claims batches and lets them be published, until the run stops.
func (c *channel) loop(n *run) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for !n.stopping() {
		now := time.Now()
		at := c.rest(now)
		if !at.After(now) {
			c.claimNext(n, now)
			continue
		}
		timer.Reset(at.Sub(now))
		select {
		case <-n.ctx.Done():
		case <-c.wake:
		case <-timer.C:
		}
	}
}

// never is far enough away.
const never = 1000 * time.Hour

// rest decides when to claim next, now at the earliest, and records it, so
// that a hint wakes the loop only where it asks for an earlier look.
func (c *channel) rest(now time.Time) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	at := c.nextClaim(now)
	c.sleeping = at
	if !at.After(now) {
		c.sleeping = time.Time{}
	}
	return at
}

func (c *channel) nextClaim(now time.Time) time.Time {
	at := now.Add(never)
	if !c.free() {
		return at // the batch that makes room wakes the loop
	}
	if hinted, ok := c.hints.next(); ok {
		at = hinted
	}
	if !c.dueAt.IsZero() && c.dueAt.Before(at) {
		at = c.dueAt
	}
	if c.now {
		at = now
	}
	return c.barred(at)
}

// barred is the first time from at on at which a claim is allowed.
func (c *channel) barred(at time.Time) time.Time {
	return later(later(at, c.paused), later(c.troubled, c.health.until))
}

// free reports whether another batch may be published.
func (c *channel) free() bool {
	if c.crew != nil {
		return c.crew.free(c.health.careful(), c.busy)
	}
	if c.health.careful() && c.busy > c.hung {
		return false
	}
	return c.busy < c.o.InFlight
}

// signal makes the loop think again.
func (c *channel) signal() {
	select {
	case c.wake <- struct{}{}:
	default:
	}
}

// claimNext claims a batch and has it published.
func (c *channel) claimNext(n *run, now time.Time) {
	limit, trial := c.aboutToClaim(now)
	b, err := c.take(n, limit, false)
	if err != nil {
		c.claimFailed(n, err)
		return
	}
	b.trial = trial
	c.claimed(b, limit)
	if len(b.rows) > 0 {
		n.wg.Go(func() { b.process(n) })
	}
}

// aboutToClaim takes a slot. What asks for a claim from here on is about what
// the claim may not see.
func (c *channel) aboutToClaim(now time.Time) (limit int, trial bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.busy++
	c.now = false
	if !c.dueAt.After(now) {
		c.dueAt = time.Time{}
	}
	c.hints.look(now)
	return c.health.size(c.o.BatchSize), c.health.slowed()
}

// occupy takes a slot for a pass; false: publications that hang have them all.
func (c *channel) occupy() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.crew != nil && c.crew.hung >= c.o.InFlight || c.crew == nil && c.busy >= c.o.InFlight {
		return false
	}
	c.busy++
	return true
}

func (c *channel) claimFailed(n *run, err error) {
	c.mu.Lock()
	c.busy--
	c.now = true
	c.failures++
	c.troubled = time.Now().Add(troubleBackoff(c.failures))
	c.mu.Unlock()
	if !n.stopping() {
		c.r.troubled(opClaim, c.name, err)
	}
}

func (c *channel) claimed(b *batch, limit int) {
	c.r.healthy(opClaim)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.failures = 0
	c.hints.seen(b.rows)
	if len(b.rows) == 0 {
		c.busy--
		return
	}
	if len(b.rows) >= limit || b.suspect() {
		c.now = true // there may be more
	}
	if b.probe {
		c.health.ramp()
	}
	if b.suspect() {
		c.crew.suspect = true
	}
}

// release gives a slot back.
func (c *channel) release() {
	c.mu.Lock()
	c.busy--
	if c.crew != nil && c.busy == 0 {
		c.crew.suspect = false
	}
	c.mu.Unlock()
	c.signal()
}

// claimAt asks for a claim at a time.
func (c *channel) claimAt(at time.Time) {
	c.mu.Lock()
	if c.dueAt.IsZero() || at.Before(c.dueAt) {
		c.dueAt = at
	}
	c.mu.Unlock()
	c.signal()
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}
