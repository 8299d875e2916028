package outbox

import "time"

// slowAfter is how many whole batches must fail in a row before a relay slows
// a channel by itself.
const slowAfter = 3

// health slows a channel whose batches keep failing, so that values staged
// anew, due at once and with fresh attempts, do not hammer a sink that is
// down: after slowAfter failures the channel pauses, for longer each time, and
// then publishes a single row to find out. When a row gets through, batches
// grow again from one row, one at a time, up to their full size.
//
// A batch counts as failed when none of its rows was acknowledged, or refused
// for good, and one of them was at its first attempt. Rows tried again are
// slowed by their own backoff: one key that fails for ever must not slow the
// others.
type health struct {
	failures int       // in a row
	pauses   int       // since a row last got through
	until    time.Time // no claim before
	limit    int       // of rows in a batch, one batch at a time; 0: no limit
}

// size is how many rows to claim.
func (h *health) size(full int) int {
	if h.limit > 0 {
		return min(h.limit, full)
	}
	return full
}

// careful reports whether one batch at a time is to be published.
func (h *health) careful() bool { return h.limit > 0 }

// slowed reports whether the channel is paused, or about to publish one row.
func (h *health) slowed() bool { return h.pauses > 0 }

// ramp makes batches start from one row.
func (h *health) ramp() { h.limit = 1 }

// succeeded records that a row got through, in a batch of at most full.
func (h *health) succeeded(full int) (resumed bool) {
	resumed = h.slowed()
	h.failures, h.pauses, h.until = 0, 0, time.Time{}
	if h.limit > 0 {
		h.limit *= 2
	}
	if h.limit >= full {
		h.limit = 0
	}
	return resumed
}

// failed records that a whole batch failed, and returns how long the channel
// pauses, 0 where it does not. While it is slowed only a trial counts: batches
// that were in flight tell nothing new.
func (h *health) failed(now time.Time, trial bool) time.Duration {
	h.failures++
	if h.failures < slowAfter || (h.slowed() && !trial) {
		return 0
	}
	return h.pause(now)
}

// pause begins a pause, or a longer one.
func (h *health) pause(now time.Time) time.Duration {
	h.pauses++
	h.limit = 1
	d := defaultBackoff(h.pauses)
	h.until = now.Add(d)
	return d
}

// learn lets what became of a batch decide how fast the channel goes on.
func (c *channel) learn(b *batch, v verdict, end ending) {
	now := time.Now()
	c.mu.Lock()
	var pause time.Duration
	var resumed bool
	switch {
	case v.down != nil:
		c.holdBack(now)
	case v.answered:
		resumed = c.health.succeeded(c.o.BatchSize)
	case end.ours() || v.mute:
	case v.missed() > 0 && (v.fresh || b.trial), v.hasty:
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

// holdBack is for a destination that is down: the store holds the claims back,
// and is asked before the next one.
func (c *channel) holdBack(now time.Time) {
	c.health.ramp()
	c.paused = now.Add(c.r.o.PollInterval)
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
