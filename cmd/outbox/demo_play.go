package main

import (
	"context"
	"fmt"
	"time"
)

const (
	demoLease    = time.Second
	strikeWithin = 10 * time.Second // for the relay to call the index
	drainWithin  = time.Minute
	restartAfter = 300 * time.Millisecond
)

// play lets things go wrong while the shop works. The moments are parts of the
// shop's transactions rather than of time, so that a slow machine sees the
// same story.
func (d *demo) play(ctx context.Context) error {
	d.story.say("shop", "%d clerks begin: %s transactions, each changes an order and stages its new state",
		len(d.shop.clerks), number(d.shop.total))
	for _, act := range []struct {
		at  float64
		run func(context.Context) error
	}{
		{0.20, d.killAfterIndex},
		{0.40, d.indexDown},
		{0.65, d.killBeforeIndex},
		{0.85, d.indexBroken},
		{1, d.shopClosed},
	} {
		if err := d.shop.reach(ctx, act.at); err != nil {
			return err
		}
		if err := act.run(ctx); err != nil {
			return err
		}
	}
	return nil
}

func (d *demo) killAfterIndex(ctx context.Context) error {
	return d.kill(ctx, strikeAfter, "killed relay process %d (SIGKILL) after the index took %s, before the outbox knew: they, or newer, go again")
}

func (d *demo) killBeforeIndex(ctx context.Context) error {
	return d.kill(ctx, strikeBefore, "killed relay process %d (SIGKILL) with %s on the way to the index: not lost")
}

// kill kills the relay's process at a chosen moment of a publication, and
// starts another one.
func (d *demo) kill(ctx context.Context, at moment, what string) error {
	pid, batch, err := d.index.strike(ctx, at, d.relays.kill)
	if err != nil {
		return err
	}
	if pid == 0 {
		d.story.say("demo", "the relay has not called the index for %s: not killed", strikeWithin)
		return nil
	}
	d.story.say("demo", what, pid, entries(batch))
	if at == strikeAfter { // the first time
		d.story.say("demo", "what else it held comes free when its lease lapses: %s here, 15s by default", demoLease)
	}
	if err := pause(ctx, restartAfter); err != nil {
		return err
	}
	return d.relays.start()
}

func (d *demo) indexDown(ctx context.Context) error {
	d.index.set(indexDown)
	d.story.say("index", "down: it answers 503 to everything")
	if err := d.shop.reach(ctx, 0.50); err != nil {
		return err
	}
	d.index.set(indexUp)
	d.story.say("index", "up again; %s transactions went on meanwhile", number(d.shop.total/10))
	return nil
}

func (d *demo) indexBroken(ctx context.Context) error {
	d.index.set(indexBroken)
	d.story.say("index", "broken: it answers 500 to everything, a plain error: entries are tried again after a backoff")
	if err := d.shop.reach(ctx, 0.92); err != nil {
		return err
	}
	d.index.set(indexUp)
	d.story.say("index", "repaired")
	return nil
}

func (d *demo) shopClosed(ctx context.Context) error {
	waiting, err := d.site.waiting(ctx)
	if err != nil {
		return err
	}
	d.story.say("shop", "closed: %s transactions ended; %s still to be published", number(d.shop.total), entries(waiting))
	return nil
}

// drain waits until nothing is left in the outbox nor on its way. What takes
// too long shows in the comparison.
func (d *demo) drain(ctx context.Context) error {
	deadline := time.Now().Add(drainWithin)
	for time.Now().Before(deadline) {
		waiting, err := d.site.waiting(ctx)
		if err != nil {
			return err
		}
		if waiting == 0 && d.index.quiet() {
			return nil
		}
		if err := pause(ctx, 50*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// finish stops the relay and compares.
func (d *demo) finish(ctx context.Context) (*summary, error) {
	if err := d.relays.stop(); err != nil {
		return nil, err
	}
	if d.beforeCompare != nil {
		if err := d.beforeCompare(ctx, d.site); err != nil {
			return nil, err
		}
	}
	waiting, err := d.site.waiting(ctx)
	if err != nil {
		return nil, err
	}
	d.story.say("demo", "comparing index and shop row by row")
	sum := d.summarise(waiting)
	if err := d.compare(ctx, sum); err != nil {
		return nil, fmt.Errorf("compare index and shop: %w", err)
	}
	sum.Converged = len(sum.Problems) == 0
	return sum, nil
}

func pause(ctx context.Context, d time.Duration) error {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}
