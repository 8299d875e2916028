package main

import (
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const (
	demoLease    = 2 * time.Second
	strikeWithin = 10 * time.Second // for the relay to call the index
	drainWithin  = time.Minute
	restartAfter = 300 * time.Millisecond
)

// play lets things go wrong while the shop works. The moments are parts of the
// shop's transactions rather than of time, so that a slow machine sees the
// same story.
func (d *demo) play(ctx context.Context) error {
	d.story.say("shop", "%d clerks begin: %s transactions, each changes an order, stages its new state and puts a mail",
		len(d.shop.clerks), number(d.shop.total))
	for _, act := range []struct {
		at  float64
		run func(context.Context) error
	}{
		{0.10, d.mailDies},
		{0.20, d.killAfterIndex},
		{0.30, d.mailUnanswered},
		{0.40, d.indexDown},
		{0.55, d.mailRetried},
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
	d.story.say("shop", "closed: %s transactions ended; to be published: %s, mails to be sent: %s",
		number(d.shop.total), entries(waiting), number(d.unsent()))
	return nil
}

// drain waits until nothing is left in the outbox nor on its way. What takes
// too long shows in the comparison.
func (d *demo) drain(ctx context.Context) error {
	deadline := time.Now().Add(drainWithin)
	for time.Now().Before(deadline) {
		if err := d.mailRetried(ctx); err != nil { // if it was too early before
			return err
		}
		done, err := d.drained(ctx)
		if done || err != nil {
			return err
		}
		if err := pause(ctx, 100*time.Millisecond); err != nil {
			return err
		}
	}
	return nil
}

// drained reports whether nothing is left to be published or sent.
func (d *demo) drained(ctx context.Context) (bool, error) {
	waiting, err := d.site.waiting(ctx)
	if err != nil || waiting > 0 || !d.index.quiet() {
		return false, err
	}
	open, _, err := d.shop.mails.List(ctx, outbox.Filter{
		States: []outbox.State{outbox.StatePending, outbox.StateFailed, outbox.StateSending}, Limit: 1,
	})
	return len(open) == 0, err
}

// unsent returns how many mails the mailer has yet to take.
func (d *demo) unsent() int { return max(0, d.shop.mailsPut()-d.mailer.taken()) }

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
	d.story.say("demo", "comparing index and shop row by row, and journal and mailer mail by mail")
	sum := d.summarise(waiting)
	d.summariseMails(sum)
	if err := d.compare(ctx, sum); err != nil {
		return nil, fmt.Errorf("compare index and shop: %w", err)
	}
	if err := d.compareMails(ctx, sum); err != nil {
		return nil, fmt.Errorf("compare journal and mailer: %w", err)
	}
	slices.Sort(sum.Problems)
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
