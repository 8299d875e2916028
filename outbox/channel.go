package outbox

import (
	"errors"
	"sync"
	"time"
)

// A channel is an attachment being served: when to claim, and how much.
type channel struct {
	source
	r       *Relay
	name    Channel
	o       PublishOptions
	backoff backoffFunc
	failed  throttle      // of log lines about failed publications
	wake    chan struct{} // makes the loop think again
	late    chan struct{} // bounds settlements that go on behind the slots

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
	if c.busy >= c.o.InFlight {
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
	if len(b.rows) >= limit {
		c.now = true // there may be more
	}
	if b.probe {
		c.health.ramp()
	}
}

// release gives a slot back.
func (c *channel) release() {
	c.mu.Lock()
	c.busy--
	c.mu.Unlock()
	c.signal()
}

// abandon counts a publication that goes on although its context has ended;
// its slot stays taken. False: it has returned just now.
func (c *channel) abandon(b *batch) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if !b.state.CompareAndSwap(callRunning, callAbandoned) {
		return false
	}
	c.hung++
	c.avoids(b.rows, 1)
	return true
}

// avoids keeps the keys of rows from being published by this relay (by 1), or
// lets them go again (by -1).
func (c *channel) avoids(rows []Row, by int) {
	if c.avoid == nil {
		c.avoid = map[string]int{}
	}
	for _, r := range rows {
		if c.avoid[r.Key] += by; c.avoid[r.Key] == 0 {
			delete(c.avoid, r.Key)
		}
	}
}

// keep avoids the keys of rows until let.
func (c *channel) keep(rows []Row) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.avoids(rows, 1)
}

func (c *channel) let(rows []Row) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.avoids(rows, -1)
}

// apart tells the rows that may be published from those to avoid.
func (c *channel) apart(rows []Row) (free, taken []Row) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.avoid) == 0 {
		return rows, nil
	}
	for _, r := range rows {
		if c.avoid[r.Key] > 0 {
			taken = append(taken, r)
		} else {
			free = append(free, r)
		}
	}
	return free, taken
}

// returned gives back the slot of a publication that was abandoned.
func (c *channel) returned(b *batch) {
	c.mu.Lock()
	c.hung--
	c.avoids(b.rows, -1)
	c.mu.Unlock()
	c.release()
	c.r.log.Info("outbox: publish function that ignored its cancelled context has returned",
		"channel", c.name.Name, "after", time.Since(b.began).Round(time.Millisecond))
	c.r.observe(Event{Kind: EventReturned, Channel: c.name, Rows: len(b.rows), Duration: time.Since(b.began)})
}

func (c *channel) hungCount() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.hung
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

// hinted tells the channel that a version was staged and when it falls due.
func (c *channel) hinted(v Version, now, due time.Time) {
	c.mu.Lock()
	at := c.hints.add(v, now, due)
	wake := c.free() && c.barred(at).Before(c.sleeping) // zero where awake
	c.mu.Unlock()
	if wake {
		c.signal()
	}
}

// wakeUp asks for a claim at once. The store was told to look: a pause that it
// had may be over.
func (c *channel) wakeUp() {
	c.mu.Lock()
	c.now, c.paused = true, time.Time{}
	c.mu.Unlock()
	c.signal()
}

// hinted is what the store calls when something was staged.
func (r *Relay) hinted(h Hint) {
	now := time.Now()
	for _, c := range r.channels {
		switch {
		case h.Channel != (Channel{}) && h.Channel != c.name:
		case h.Version == 0 || h.Channel == (Channel{}):
			c.wakeUp()
		default:
			c.hinted(h.Version, now, now.Add(h.Wait))
		}
	}
}

// learn lets what became of a batch decide how fast the channel goes on.
func (c *channel) learn(b *batch, v verdict, end ending) {
	now := time.Now()
	c.mu.Lock()
	var pause time.Duration
	var resumed bool
	switch {
	case v.down != nil:
		// The store holds the claims back; ask it before the next one.
		c.health.ramp()
		c.paused = now.Add(c.r.o.PollInterval)
	case v.done > 0:
		resumed = c.health.succeeded(c.o.BatchSize)
	case end.ours():
	case v.failed > 0 && (v.fresh || b.trial), v.hasty:
		pause = c.health.failed(now, b.trial)
		c.now = c.now || pause > 0 // try when the pause is over
	}
	c.mu.Unlock()
	c.signal()
	if pause > 0 {
		c.r.log.Warn("outbox: batches keep failing, channel slowed",
			"channel", c.name.Name, "pause", pause.Round(time.Millisecond), "error", errorText(v.cause))
		c.r.observe(Event{Kind: EventSlow, Channel: c.name, Delay: pause, Err: v.cause})
	}
	if resumed {
		c.r.log.Info("outbox: publishing works again", "channel", c.name.Name)
		c.r.observe(Event{Kind: EventResume, Channel: c.name})
	}
}

// slow pauses the channel in this relay: its destination is down and the store
// cannot be told.
func (c *channel) slow() {
	c.mu.Lock()
	c.health.pause(time.Now())
	c.now = true
	c.mu.Unlock()
	c.signal()
}

func later(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

var errNoSlot = errors.New("all publications ignore their cancelled contexts")
