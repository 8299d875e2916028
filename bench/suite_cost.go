package main

import (
	"context"
	"errors"
	"fmt"
	"sync/atomic"
	"time"
)

// cost counts what one message costs: statements and WAL, which do not depend
// on the machine, and the CPU of both sides.
func (b *bench) cost() error {
	var c counter
	counted, err := openSite(b.ctx, b.site.dsn, &c)
	if err != nil {
		return err
	}
	staging := costTable(fmt.Sprintf("What staging one message costs, %s transactions, 4 writers", count(float64(b.size.cost))),
		"The application's own insert, BEGIN and COMMIT included.", "WAL bytes are those of the whole transaction.")
	for _, p := range counted.peers(func(p *peer) bool { return p.stage != nil }) {
		if err := errors.Join(b.stageSome(p, 16), b.site.clear(b.ctx, p), b.site.exec(b.ctx, `CHECKPOINT`)); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		x, err := b.spent(&c, b.size.cost, func() error { return b.stageSome(p, b.size.cost) })
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		staging.rows = append(staging.rows, x.row(p.name))
	}
	if err := counted.close(); err != nil {
		return err
	}
	b.add(staging)

	draining := costTable("What draining one message costs, one process, best settings of each",
		"A relay's start is in it; what a peer keeps of a finished message is not deleted.")
	for _, p := range b.site.peers(func(p *peer) bool { return p.relay != nil }) {
		n := max(1, b.size.drain/2/max(1, p.share))
		if err := b.site.prepare(b.ctx, p, n); err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		x, err := b.spent(&c, n, func() error {
			_, err := drainOne(b.ctx, p, relayOptions{relays: 1, count: &c}, n, b.site.left(b.ctx, p))
			return err
		})
		if err != nil {
			return fmt.Errorf("%s: %w", p.name, err)
		}
		draining.rows = append(draining.rows, x.row(p.name))
	}
	b.add(draining)
	return nil
}

func costTable(title string, notes ...string) *table {
	return &table{title: title, notes: notes, head: []string{"", "statements", "WAL bytes", "database CPU µs", "client CPU µs"}}
}

// stageSome stages n messages from four writers.
func (b *bench) stageSome(p *peer, n int) error {
	var left atomic.Int64
	left.Store(int64(n))
	_, err := b.writers(4, patience, func(ctx context.Context, seq int64) error {
		if left.Add(-1) < 0 {
			return errEnough
		}
		return p.stage(ctx, seq)
	})
	if all, ok := err.(interface{ Unwrap() []error }); ok { // each writer has ended by errEnough
		for _, err := range all.Unwrap() {
			if err := root(err); err != nil {
				return err
			}
		}
	}
	return nil
}

var errEnough = errors.New("enough")

// root drops errEnough from what writers return, a chain of joined errors.
func root(err error) error {
	if err == errEnough {
		return nil
	}
	if all, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range all.Unwrap() {
			if err := root(err); err != nil {
				return err
			}
		}
		return nil
	}
	return err
}

// spent is what n messages cost, each.
type spent struct{ statements, wal, server, client float64 }

func (x spent) row(name string) []string {
	return []string{name, digits(x.statements), count(x.wal), digits(x.server), digits(x.client)}
}

// spent measures what f costs, for each of n messages.
func (b *bench) spent(c *counter, n int, f func() error) (x spent, err error) {
	before, err := wal(b.ctx, b.site.std)
	if err != nil {
		return x, err
	}
	statements, server, client := c.n.Load(), b.server.cpu(), clientCPU()
	if err := f(); err != nil {
		return x, err
	}
	x.client, x.server, x.statements = clientCPU()-client, b.server.cpu()-server, float64(c.n.Load()-statements)
	after, err := wal(b.ctx, b.site.std)
	x.wal = after - before
	for _, v := range []*float64{&x.statements, &x.wal, &x.server, &x.client} {
		*v /= float64(n)
	}
	x.server, x.client = x.server*1e6, x.client*1e6
	return x, err
}

// idle counts the statements of relays that have nothing to do, all at once:
// as they come, and with the settings of the other suites.
func (b *bench) idle() error {
	ps := b.site.peers(func(p *peer) bool { return p.relay != nil && p.kind != limit })
	for _, p := range ps {
		if err := b.site.clear(b.ctx, p); err != nil {
			return err
		}
	}
	t := &table{title: "An idle relay: statements a second", head: []string{"", "as it comes", "as measured above"}}
	rates := make([][]string, len(ps))
	for _, lazy := range []bool{true, false} {
		counters := make([]counter, len(ps))
		var stops []func() error
		var err error
		for i, p := range ps {
			var stop func() error
			stop, err = p.relay(b.ctx, relayOptions{relays: 1, lazy: lazy, count: &counters[i]}, func(int64, []byte) {})
			if err != nil {
				err = fmt.Errorf("%s: %w", p.name, err)
				break
			}
			stops = append(stops, stop)
		}
		if err == nil {
			err = b.pause(b.size.idle / 5) // starting is no part of it
		}
		before := make([]int64, len(ps))
		for i := range counters {
			before[i] = counters[i].n.Load()
		}
		if err == nil {
			err = b.pause(b.size.idle)
		}
		for i := range counters {
			rates[i] = append(rates[i], digits(float64(counters[i].n.Load()-before[i])/b.size.idle.Seconds()))
		}
		for _, stop := range stops {
			err = errors.Join(err, stop())
		}
		if err != nil {
			return err
		}
	}
	for i, p := range ps {
		t.rows = append(t.rows, append([]string{p.name}, rates[i]...))
	}
	b.add(t)
	return nil
}

// pause is for what is measured by the clock alone.
func (b *bench) pause(d time.Duration) error {
	select {
	case <-b.ctx.Done():
		return b.ctx.Err()
	case <-time.After(d):
		return nil
	}
}
