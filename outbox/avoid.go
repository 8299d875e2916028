package outbox

import (
	"errors"
	"time"
)

// A relay publishes a key in one call at a time. Leases see to that, but not
// where a publish function goes on after its context has ended, nor where a
// lease lapses under a call: while a transaction holds the row, or when the
// store was out of reach. The keys concerned are avoided as long as their call
// runs.

var errNoSlot = errors.New("all publications ignore their cancelled contexts")

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

// setAside gives back the rows whose keys this relay is still publishing
// although their leases have lapsed: a key has one call at a time, and one
// that hangs must not take slot after slot. Other relays are free to.
func (b *batch) setAside(n *run) tally {
	free, taken := b.c.apart(b.rows)
	if len(taken) == 0 {
		return tally{}
	}
	t := b.settle(n, giveBack(taken, jitter(asidePause)))
	b.rows, b.hold.live = free, free
	return t
}

// asidePause is how long such rows are not due.
const asidePause = 5 * time.Second

// avoidTwice keeps rows of the batch, whose leases may lapse, from being
// published by this relay once more while it does so already.
func (b *batch) avoidTwice(rows []Row) {
	if b.isAvoided == nil {
		b.isAvoided = map[string]bool{}
	}
	var fresh []Row
	for _, r := range rows {
		if !b.isAvoided[r.Key] {
			b.isAvoided[r.Key] = true
			fresh = append(fresh, r)
		}
	}
	b.c.keep(fresh)
	b.avoided = append(b.avoided, fresh...)
}
