package outboxtest

import (
	"sync"
	"time"
)

// Clock is a clock that moves only when it is told to. Give its Now to a store
// as that store's clock. It is safe for concurrent use.
type Clock struct {
	mu  sync.Mutex
	now time.Time
}

// NewClock returns a clock that stands at start, in UTC and whole
// microseconds, as stores keep times; the zero time stands for noon of
// 1 January 2030.
func NewClock(start time.Time) *Clock {
	if start.IsZero() {
		start = time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)
	}
	return &Clock{now: start.Round(0).UTC().Truncate(time.Microsecond)}
}

// Now returns the clock's time.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.now
}

// Advance moves the clock by d, rounded down to microseconds, and returns its
// new time. A negative d sets it back, as an operator might.
func (c *Clock) Advance(d time.Duration) time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.now = c.now.Add(d.Truncate(time.Microsecond))
	return c.now
}
