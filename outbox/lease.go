package outbox

import (
	"context"
	"fmt"
	"time"
)

// hold is what a batch knows of its leases. Times are this process's, on the
// monotonic clock, counted from before the store was asked: whatever the
// store's clock says, the leases last at least that long.
type hold struct {
	lease time.Duration
	until time.Time // every row but those in busy and those lost
	next  time.Time // when to extend
	full  time.Time // when to extend every row; before, only those in busy
	live  []Row     // not lost
	busy  []Row     // locked by a transaction when they were last extended
}

func newHold(rows []Row, lease time.Duration, sent time.Time) hold {
	next := sent.Add(lease / 3)
	return hold{lease: lease, until: sent.Add(lease), next: next, full: next, live: rows}
}

// surely is until when the rows are held by all means: what has to end before
// the leases do, must end by then.
func (h *hold) surely() time.Time { return h.until.Add(-h.lease / 10) }

// Pauses before rows are extended again that were locked, or whose extension
// failed; both less where leases are short.
const (
	busyExtendPause = 200 * time.Millisecond
	extendRetry     = 500 * time.Millisecond
)

// extend lets the leases run on. An error says that they can no longer be
// relied on: all rows are lost, or the database has been out of reach for too
// long. A row that a transaction holds is no reason: nobody can claim it.
func (b *batch) extend(n *run) error {
	h := &b.hold
	now := time.Now()
	if !now.Before(h.surely()) {
		return fmt.Errorf("%w: store out of reach for most of the lease of %s", ErrLeaseLost, h.lease)
	}
	rows, all := h.busy, !now.Before(h.full)
	if all {
		rows = h.live
	}
	limit := min(h.lease/3, h.surely().Sub(now))
	sent, results, err := b.sendExtend(n, rows, limit)
	if err != nil {
		if n.settling.Err() == nil {
			b.c.r.troubled(opExtend, b.c.name, err)
		}
		h.next = earlier(time.Now().Add(min(extendRetry, h.lease/20)), h.surely())
		return nil
	}
	b.c.r.healthy(opExtend)
	if all {
		h.until, h.full = sent.Add(h.lease), sent.Add(h.lease/3)
	}
	b.extended(rows, results)
	h.next = h.full
	if len(h.busy) > 0 {
		h.next = earlier(h.full, time.Now().Add(jitter(min(busyExtendPause, h.lease/10))))
	}
	if len(h.live) == 0 {
		return fmt.Errorf("%w: every entry was claimed or discarded by others", ErrLeaseLost)
	}
	return nil
}

func (b *batch) sendExtend(n *run, rows []Row, limit time.Duration) (sent time.Time, results []Result, err error) {
	ctx, cancel := context.WithTimeout(n.settling, limit)
	defer cancel()
	leave, err := b.c.r.gate.enterExtend(ctx)
	if err != nil {
		return sent, nil, err
	}
	defer leave()
	sent = time.Now()
	results, err = b.c.r.store.Extend(ctx, b.c.name, rows, b.hold.lease)
	if err == nil && len(results) != len(rows) {
		err = fmt.Errorf("store returned %d results for %d rows", len(results), len(rows))
	}
	return sent, results, err
}

// extended sorts out the rows that are lost and those that are locked. Batches
// have neither as a rule, and then copy nothing.
func (b *batch) extended(rows []Row, results []Result) {
	var busy []Row
	var lost map[string]bool
	for i, res := range results {
		switch res {
		case ResultBusy:
			busy = append(busy, rows[i])
		case ResultStale:
			if lost == nil {
				lost = map[string]bool{}
			}
			lost[rows[i].Key] = true
		}
	}
	b.hold.busy = busy
	if len(busy) > 0 {
		b.avoidTwice(busy)
	}
	if len(lost) == 0 {
		return
	}
	live := make([]Row, 0, len(b.hold.live))
	for _, r := range b.hold.live {
		if !lost[r.Key] {
			live = append(live, r)
		}
	}
	b.hold.live, b.lost = live, lost
	b.c.lostLeases(len(lost))
}

// lostLeases tells that rows are no longer this relay's.
func (c *channel) lostLeases(rows int) {
	c.r.log.Warn("outbox: leases lost, the entries may be published by others", "channel", c.name.Name, "entries", rows)
	c.r.observe(Event{Kind: EventLost, Channel: c.name, Rows: rows, Err: ErrLeaseLost})
}

func earlier(a, b time.Time) time.Time {
	if a.Before(b) {
		return a
	}
	return b
}
