package sqlstore

import (
	"math"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A cursor remembers from which due time on a channel has rows. On Postgres a
// snapshot held open somewhere (a long report, a backup) keeps the dead entries
// of published rows at the head of the due index, and each claim would walk
// over all of them. Claims therefore start a slack below what was claimed
// last. That alone would lose rows: of a transaction that commits late, of a
// lease that lapsed, of a row that was locked. So full passes come as often as
// what they cost allows, and at least every five seconds.
type cursor struct {
	mu     sync.Mutex
	bound  bounds        // due times below it wait for a full pass
	passAt time.Time     // when the last full pass ended
	cost   time.Duration // of that pass
}

const (
	cursorSlack   = int64(50 * time.Millisecond / time.Microsecond)
	passesAtLeast = 5 * time.Second
	passesShare   = 20 // full passes take at most 1/20 of the time
)

// bounds are lower bounds of due times, in microseconds: of rows, and of the
// groups of messages, which take turns by times of their own.
type bounds struct{ due, group int64 }

// from returns where to scan from, and whether that is a full pass.
func (c *cursor) from(full bool) (bounds, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if full || time.Since(c.passAt) >= min(passesShare*c.cost, passesAtLeast) {
		return bounds{math.MinInt64, math.MinInt64}, true // rows of a broken clock included
	}
	return c.bound, false
}

// claimed moves the bound to below the last due time claimed, also back.
func (c *cursor) claimed(due int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bound.due = max(due, 0) - cursorSlack
}

// reached does so for the last due time of a group claimed.
func (c *cursor) reached(due int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.bound.group = max(due, 0) - cursorSlack
}

// passed notes a full pass and what it cost.
func (c *cursor) passed(cost time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.passAt, c.cost = time.Now(), cost
}

// reset makes the next scan a full pass.
func (c *cursor) reset() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.passAt = time.Time{}
}

// cursors are the cursors of the channels that relays of this store serve.
type cursors struct{ m sync.Map }

func (cs *cursors) of(ch outbox.Channel) *cursor {
	if c, ok := cs.m.Load(ch); ok {
		return c.(*cursor)
	}
	c, _ := cs.m.LoadOrStore(ch, new(cursor))
	return c.(*cursor)
}
