package outbox

import (
	"math"
	"slices"
	"time"
)

const (
	maxLooks = 20  // for one hint
	maxHints = 256 // kept per channel

	// Timers are no finer than a millisecond where a Go program is idle, and a
	// commit may come sooner: the first looks do not wait at all, they follow
	// each other. Where many stage, hints come close together, and one of them
	// pays for that at a time.
	earlyLooks = 3
	earlyAge   = time.Millisecond
	earlyGap   = 2 * time.Millisecond

	firstLook = time.Millisecond // that is timed, and the shortest pause
)

// hints schedule the looks at a channel in which something was staged whose
// commit cannot be seen: soon after the hint, then at pauses that grow with
// its age, until it is as old as the poll interval and polling finds what it
// announced. One look serves all hints. A hint is dropped when its own version
// was claimed, never because another row was found: that says nothing about
// the hint's transaction.
type hints struct {
	life   time.Duration // the poll interval
	growth float64       // of the pauses, by a hint's age at the last look
	list   []hint
	looked time.Time // the last look, whatever asked for it
	latest time.Time // the last hint
}

type hint struct {
	version Version
	at      time.Time // when the row falls due at the earliest
	early   int       // looks that do not wait
}

// newHints chooses the growth so that a hint costs at most maxLooks: the early
// ones, three at the shortest pause, and then some at ages that grow by a
// constant factor, of which one more would exceed life.
func newHints(life time.Duration) hints {
	const timed, rounding = maxLooks - earlyLooks - 3, 0.001
	factor := math.Pow(float64(life)/float64(3*firstLook), 1/float64(timed+1))
	return hints{life: life, growth: max(factor-1+rounding, 0.4)}
}

// add takes a hint and returns when to look for it. Where there are too many
// the oldest is forgotten: it has had most of its looks, and polling still
// finds its row.
func (h *hints) add(v Version, now, due time.Time) time.Time {
	if len(h.list) == maxHints {
		h.list = slices.Delete(h.list, 0, 1)
	}
	x := hint{version: v, at: due}
	if !due.After(now) && now.Sub(h.latest) >= earlyGap {
		x.early = earlyLooks
	}
	h.latest = now
	h.list = append(h.list, x)
	return h.after(x)
}

// look records that a claim is being sent, and drops the hints whose last
// look this is.
func (h *hints) look(now time.Time) {
	h.looked = now
	for i := range h.list {
		x := &h.list[i]
		if x.early--; now.Sub(x.at) > earlyAge {
			x.early = 0
		}
	}
	h.list = slices.DeleteFunc(h.list, func(x hint) bool {
		return h.after(x).Sub(x.at) > h.life
	})
}

// after is when to look next for x.
func (h *hints) after(x hint) time.Time {
	age := h.looked.Sub(x.at)
	switch {
	case x.early > 0:
		return x.at
	case age < 0:
		return x.at.Add(firstLook)
	}
	pause := time.Duration(float64(age) * h.growth)
	return h.looked.Add(max(pause, firstLook))
}

// next is when to look next; false: no hint asks for a look.
func (h *hints) next() (at time.Time, ok bool) {
	for _, x := range h.list {
		if t := h.after(x); !ok || t.Before(at) {
			at, ok = t, true
		}
	}
	return at, ok
}

// seen drops the hints whose versions were claimed.
func (h *hints) seen(rows []Row) {
	if len(h.list) == 0 || len(rows) == 0 {
		return
	}
	versions := make(map[Version]struct{}, len(rows))
	for _, r := range rows {
		versions[r.Version] = struct{}{}
	}
	h.list = slices.DeleteFunc(h.list, func(x hint) bool {
		_, ok := versions[x.version]
		return ok
	})
}

func (h *hints) clear() { h.list = h.list[:0] }

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

// wakeUp asks for a claim at once. A pause that the store had may be over.
func (c *channel) wakeUp() {
	c.mu.Lock()
	c.now, c.paused = true, time.Time{}
	c.mu.Unlock()
	c.signal()
}

// expecting reports whether a hint's row has not been seen.
func (c *channel) expecting() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.hints.list) > 0
}

// hinted is what the store calls when something was staged.
func (r *Relay) hinted(h Hint) {
	if h.Channel == (Channel{}) {
		r.wakeUp()
		return
	}
	for _, c := range r.channels {
		switch {
		case c.name != h.Channel:
		case h.Version == 0:
			c.wakeUp()
		default:
			now := time.Now()
			c.hinted(h.Version, now, now.Add(h.Wait))
		}
	}
}

// wakeUp makes every channel look at once: something was committed. Where it
// was is known from the hints; the other channels share one look, so that a
// commit costs two statements and not one for each channel.
func (r *Relay) wakeUp() {
	ask := false
	for _, c := range r.channels {
		if len(r.channels) == 1 || c.expecting() {
			c.wakeUp()
		} else {
			ask = true
		}
	}
	if !ask {
		return
	}
	select {
	case r.asked <- struct{}{}:
	default:
	}
}
