package outbox

import (
	"context"
	"errors"
	"fmt"
)

// Pass counts what RunOnce or Flush did with entries and messages.
type Pass struct {
	Claimed   int // leased
	Published int // acknowledged, or sent
	Retried   int // to be tried again
	Released  int // given back, the attempt not counted
	Dead      int // messages that ended so
	Unknown   int // messages that ended so: nobody knows whether they were sent
	LeaseLost int // settled too late: others have them
	Left      int // not settled: they are published again when their leases have lapsed
}

// RunOnce makes one pass: it claims one batch of each channel, in the order of
// attachment, publishes it, and settles it before it goes on. It looks at
// every row, so what is due is found. A channel that its store pauses gives
// nothing; a relay's own slowing of failing channels does not count here.
//
// An entry that fails is no error, see Pass.Retried. Errors are those of the
// store, and entries that could not be settled: where a transaction holds
// them, RunOnce waits until it ends, their leases lapse or ctx ends. When ctx
// ends no more is claimed, and the publication under way is let finish as in
// [Relay.Run]. ErrState while the relay is running.
func (r *Relay) RunOnce(ctx context.Context) (Pass, error) {
	pass, err := r.passes(ctx, true)
	if err != nil {
		return pass, fmt.Errorf("outbox: run once: %w", err)
	}
	return pass, nil
}

// Flush repeats [Relay.RunOnce] until nothing is due. Entries that failed are
// due after their backoff, which is not waited for; a channel that gives
// nothing but entries that this Flush has tried before is done.
func (r *Relay) Flush(ctx context.Context) (Pass, error) {
	pass, err := r.passes(ctx, false)
	if err != nil {
		return pass, fmt.Errorf("outbox: flush: %w", err)
	}
	return pass, nil
}

func (r *Relay) passes(ctx context.Context, once bool) (pass Pass, err error) {
	release, err := r.begin()
	if err != nil {
		return pass, err
	}
	defer release()
	n := r.newRun(ctx)
	n.alone = true
	defer func() { err = errors.Join(err, n.end()) }()
	open := make([]*drain, len(r.channels))
	for i, c := range r.channels {
		open[i] = &drain{c: c, tried: map[Version]bool{}}
	}
	for len(open) > 0 {
		var still []*drain
		var unsettled []error
		for _, d := range open {
			batch, err := d.pass(n)
			if err != nil {
				return pass, fmt.Errorf("channel %q: %w", d.c.name.Name, err)
			}
			pass.add(batch)
			if batch.err != nil {
				unsettled = append(unsettled, fmt.Errorf("settle entries of channel %q: %w", d.c.name.Name, batch.err))
			}
			if batch.more {
				still = append(still, d)
			}
		}
		if open = still; once || len(unsettled) > 0 {
			return pass, errors.Join(unsettled...)
		}
	}
	return pass, nil
}

// A drain is a channel being flushed.
type drain struct {
	c     *channel
	tried map[Version]bool // not published by this Flush
}

// drained is what one pass did in a channel.
type drained struct {
	tally
	claimed int
	more    bool // there were entries not tried before
}

func (p *Pass) add(d drained) {
	p.Claimed += d.claimed
	p.Published += d.published
	p.Retried += d.retried
	p.Released += d.released
	p.Dead += d.dead
	p.Unknown += d.unknown
	p.LeaseLost += d.lost
	p.Left += d.left
}

// pass claims one batch and returns when it is settled.
func (d *drain) pass(n *run) (res drained, err error) {
	if n.stopping() {
		return res, n.ctx.Err()
	}
	if !d.c.occupy() {
		return res, errNoSlot
	}
	b, err := d.c.take(n, d.c.o.BatchSize, true)
	if err != nil || len(b.rows) == 0 {
		d.c.release()
		return res, err
	}
	res.claimed = len(b.rows)
	res.tally = b.process(n)
	for _, s := range b.verdict.ss {
		res.more = res.more || !d.tried[s.Row.Version]
		if s.Outcome != OutcomeDone {
			d.tried[s.Row.Version] = true
		}
	}
	return res, nil
}
