package outbox

import (
	"sync"
	"sync/atomic"
	"time"
)

// How fast failing calls to the store are repeated, and how often they are logged.
const (
	troubleBase = 100 * time.Millisecond
	troubleCap  = 10 * time.Second

	quietBase = time.Second
	quietCap  = 30 * time.Second
)

// troubleBackoff is the pause after the n-th failed call in a row.
func troubleBackoff(n int) time.Duration {
	return jitter(exponential(troubleBase, troubleCap, n))
}

// A throttle lets a log line through when it is the first for long, and then
// at pauses that double from one to thirty seconds.
type throttle struct {
	mu      sync.Mutex
	next    time.Time
	pause   time.Duration
	skipped int
}

// allow reports whether to log, and how many lines were held back before.
func (t *throttle) allow(now time.Time) (ok bool, skipped int) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if now.Before(t.next) {
		t.skipped++
		return false, 0
	}
	if now.After(t.next.Add(quietCap)) {
		t.pause = 0 // quiet for long: begin anew
	}
	t.pause = min(max(2*t.pause, quietBase), quietCap)
	t.next = now.Add(t.pause)
	skipped, t.skipped = t.skipped, 0
	return true, skipped
}

// op is a kind of call to the store. Trouble is told apart by it: reads may
// work while writes do not.
type op uint8

const (
	opCheck op = iota
	opLook
	opClaim
	opSettle
	opExtend
	opOutage
	opPurge
	opCount
)

var opNames = [opCount]string{"check", "look", "claim", "settle", "extend", "report outage", "purge"}

// A trouble follows one kind of call from its first failure to its recovery.
type trouble struct {
	throttle throttle
	failing  atomic.Bool
	failures atomic.Int64
}

// troubled records that a call failed.
func (r *Relay) troubled(o op, ch Channel, err error) {
	t := &r.troubles[o]
	t.failing.Store(true)
	n := t.failures.Add(1)
	if ok, _ := t.throttle.allow(time.Now()); ok {
		args := []any{"call", opNames[o], "failures", n, "error", errorText(err)}
		switch {
		case o == opCheck:
			r.log.Error("outbox: relay has not started, the store cannot be used yet; trying again", args...)
		case ch.Name == "":
			r.log.Warn("outbox: store call failed, trying again", args...)
		default:
			r.log.Warn("outbox: store call failed, trying again", append(args, "channel", ch.Name)...)
		}
	}
	r.observe(Event{Kind: EventTrouble, Channel: ch, Err: err})
}

// healthy records that a call worked.
func (r *Relay) healthy(o op) {
	t := &r.troubles[o]
	if !t.failing.Load() || !t.failing.CompareAndSwap(true, false) {
		return
	}
	n := t.failures.Swap(0)
	r.log.Info("outbox: store call works again", "call", opNames[o], "failures", n)
	r.observe(Event{Kind: EventRecover})
}
