package outbox

import (
	"context"
	"fmt"
	"time"
)

// Pauses before a settlement is tried again: of rows that were locked, and of
// a call that failed.
const (
	settlePause    = 20 * time.Millisecond
	settlePauseCap = 500 * time.Millisecond
)

// A tally counts what became of the rows of a batch.
type tally struct {
	published, retried, released int
	dead, unknown                int
	superseded, lost, left       int
	err                          error // why rows were left
}

func (t *tally) add(u tally) {
	t.published += u.published
	t.retried += u.retried
	t.released += u.released
	t.dead += u.dead
	t.unknown += u.unknown
	t.superseded += u.superseded
	t.lost += u.lost
	t.left += u.left
	if t.err == nil {
		t.err = u.err
	}
}

// settle records a verdict. Rows that a transaction holds are settled later,
// behind the slot, as long as there are not too many such batches.
func (b *batch) settle(n *run, v verdict) tally {
	if len(v.ss) == 0 {
		return tally{}
	}
	began := time.Now()
	t, busy := b.settleOnce(n, v.ss)
	b.settled(t, v, time.Since(began))
	if len(busy) == 0 {
		return t
	}
	b.c.r.observe(Event{Kind: EventBusy, Channel: b.c.name, Rows: len(busy), Err: ErrBusy})
	if n.alone {
		ctx, cancel := context.WithDeadline(n.ctx, b.hold.until)
		defer cancel()
		t.add(b.settleLate(ctx, n, busy))
		return t
	}
	select {
	case b.c.late <- struct{}{}:
		n.wg.Go(func() {
			defer func() { <-b.c.late }()
			b.settleLate(n.work, n, busy)
		})
	default:
		t.add(b.settleLate(n.work, n, busy))
	}
	return t
}

// settleOnce settles all rows that are not locked and returns those that are.
// A database that fails is asked again while the leases last; a settlement
// that may have taken effect says so.
func (b *batch) settleOnce(n *run, ss []Settlement) (t tally, busy []Settlement) {
	var results []Result
	err := b.insist(n, opSettle, func(ctx context.Context) (err error) {
		results, err = b.c.r.store.Settle(ctx, b.c.name, ss)
		if err == nil && len(results) != len(ss) {
			err = fmt.Errorf("store returned %d results for %d settlements", len(results), len(ss))
		}
		if err != nil {
			for i := range ss {
				ss[i].Again = true
			}
		}
		return err
	})
	if err != nil {
		b.leave(n, len(ss), err)
		return tally{left: len(ss), err: err}, nil
	}
	for i, res := range results {
		switch res {
		case ResultBusy:
			busy = append(busy, ss[i])
		case ResultStale:
			t.lost++
		default:
			t.count(ss[i].Outcome, res)
		}
	}
	return t, busy
}

func (t *tally) count(o Outcome, res Result) {
	if res == ResultSuperseded {
		t.superseded++
	}
	switch o {
	case OutcomeDone:
		t.published++
	case OutcomeRetry:
		t.retried++
	case OutcomeRelease:
		t.released++
	case OutcomeDead:
		t.dead++
	case OutcomeUnknown:
		t.unknown++
	}
}

// settled lets the channel and its observers follow.
func (b *batch) settled(t tally, v verdict, took time.Duration) {
	if t.published > 0 {
		b.c.r.observe(Event{Kind: EventSettle, Channel: b.c.name, Rows: t.published, Duration: took})
	}
	if t.lost > 0 {
		b.c.lostLeases(t.lost)
	}
	if t.superseded > 0 {
		b.c.claimAt(time.Now())
	}
	if v.failed > 0 && v.soonest <= b.c.r.o.PollInterval {
		b.c.claimAt(time.Now().Add(v.soonest))
	}
}

// settleLate settles rows that were locked, until they are free: nobody else
// can claim them before. What is still locked when ctx ends is left.
func (b *batch) settleLate(ctx context.Context, n *run, busy []Settlement) tally {
	var t tally
	for try := 1; len(busy) > 0; try++ {
		sleep(ctx, jitter(exponential(settlePause, settlePauseCap, try)))
		if ctx.Err() != nil {
			b.leave(n, len(busy), ErrBusy)
			t.add(tally{left: len(busy), err: ErrBusy})
			break
		}
		u, still := b.settleOnce(n, busy)
		b.settled(u, verdict{}, 0)
		t.add(u)
		busy = still
	}
	return t
}

// leave tells that rows were not settled. Their leases lapse, and they are
// published again.
func (b *batch) leave(n *run, rows int, err error) {
	n.leave(b.c.name, rows, err)
	b.c.r.log.Warn("outbox: entries not settled, they will be published again",
		"channel", b.c.name.Name, "entries", rows, "error", errorText(err))
	b.c.r.observe(Event{Kind: EventLeft, Channel: b.c.name, Rows: rows, Err: err})
}
