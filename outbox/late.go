package outbox

import (
	"sync"
	"time"
)

// late are settlements of a Journal channel that found their message locked,
// or, as a rule, its group, by a Put whose transaction takes its time. One
// goroutine settles all of a channel again until they are free, so that they
// keep neither a worker nor a batch.
type late struct {
	mu      sync.Mutex
	list    []Settlement
	running bool
}

// settleLater hands over settlements.
func (c *channel) settleLater(n *run, busy []Settlement) {
	l := &c.crew.late
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, again(busy)...)
	if !l.running {
		l.running = true
		n.wg.Go(func() { c.settleLate(n) })
	}
}

// take takes up to lateBatch settlements; none: the goroutine is to end.
func (l *late) take() []Settlement {
	l.mu.Lock()
	defer l.mu.Unlock()
	k := min(len(l.list), lateBatch)
	ss := l.list[:k:k]
	l.list = append([]Settlement(nil), l.list[k:]...)
	l.running = k > 0
	return ss
}

func (l *late) put(ss []Settlement) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, ss...)
}

func (c *channel) settleLate(n *run) {
	for try := 1; ; try++ {
		sleep(n.ctx, jitter(exponential(settlePause, latePauseCap, try)))
		ss := c.crew.late.take()
		if len(ss) == 0 {
			return
		}
		b := &batch{c: c, hold: hold{lease: c.o.Lease, until: time.Now().Add(c.o.Lease)}}
		t, busy := b.settleOnce(n, ss)
		b.settled(t, verdict{}, 0)
		if len(busy) < len(ss) {
			b.goOnWithGroups(ss)
		}
		if n.stopping() && len(busy) > 0 {
			t, busy = c.sift(n, busy)
			b.settled(t, verdict{}, 0)
			if n.work.Err() != nil && len(busy) > 0 {
				b.leave(n, len(busy), ErrBusy)
				busy = nil
			}
			sleep(n.work, settlePause)
		}
		c.crew.late.put(busy)
	}
}
