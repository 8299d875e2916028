package outbox

import (
	"context"
	"fmt"
	"time"
)

// askedGap is how close together looks may come that commits ask for.
const askedGap = 10 * time.Millisecond

// poll asks the store, once per PollInterval and for all idle channels
// together, what is due. It is how a relay learns of what other processes
// staged, of backoffs and leases that are over, and of pauses.
func (n *run) poll() {
	timer := time.NewTimer(0)
	defer timer.Stop()
	failures, last := 0, time.Time{}
	for {
		asked := n.r.asked
		if failures > 0 {
			asked = nil // no faster than the backoff
		}
		select {
		case <-n.ctx.Done():
		case <-timer.C:
		case <-asked:
			if wait := askedGap - time.Since(last); wait > 0 {
				timer.Reset(wait)
				continue
			}
		}
		if n.stopping() {
			return
		}
		last = time.Now()
		wait := n.r.o.PollInterval
		switch err := n.look(); {
		case err == nil:
			failures = 0
		case !n.stopping():
			n.r.troubled(opLook, Channel{}, err)
			failures++
			wait = troubleBackoff(failures)
		}
		timer.Reset(wait)
	}
}

// look asks once, unless every channel is busy or about to claim anyway.
func (n *run) look() error {
	var idle []*channel
	var names []Channel
	for _, c := range n.r.channels {
		if c.idle() {
			idle, names = append(idle, c), append(names, c.name)
		}
	}
	if len(idle) == 0 {
		return nil
	}
	began := time.Now()
	var looks []Look
	err := n.ask(n.reads, readTimeout, func(ctx context.Context) (err error) {
		looks, err = n.r.store.Look(ctx, names)
		return err
	})
	if err == nil && len(looks) != len(names) {
		err = fmt.Errorf("store returned %d looks for %d channels", len(looks), len(names))
	}
	if err != nil {
		return err
	}
	n.r.healthy(opLook)
	now := time.Now()
	n.r.observe(Event{Kind: EventLook, Rows: len(names), Duration: now.Sub(began)})
	for i, c := range idle {
		c.told(looks[i], now)
	}
	return nil
}

// idle reports whether a look can tell the channel anything.
func (c *channel) idle() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.free() && (!c.now || c.paused.After(time.Now()))
}

// told lets the channel follow what the store said.
func (c *channel) told(l Look, now time.Time) {
	c.mu.Lock()
	c.paused = time.Time{}
	if l.Paused > 0 {
		c.paused = now.Add(l.Paused)
	}
	if l.Outage {
		c.health.ramp() // whoever finds the destination up again, nobody stampedes
	}
	c.mu.Unlock()
	// What falls due later than the next look is told again by then.
	if wait := max(l.Wait, l.Paused); l.Wait >= 0 && wait <= c.r.o.PollInterval {
		c.claimAt(now.Add(wait))
	}
}
