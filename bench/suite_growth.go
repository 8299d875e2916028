package main

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// population is an outbox with tables of its own, and what lives in it.
type population struct {
	*box
	latest, journal *peer
}

// populate makes an outbox under a prefix.
func (b *bench) populate(prefix string) (population, error) {
	d := dialect.Postgres().In("", prefix)
	if err := installBox(b.ctx, b.site.std, d); err != nil {
		return population{}, err
	}
	x, err := openBox(b.site.std, d)
	if err != nil {
		return population{}, err
	}
	ps := b.site.boxPeers(x)
	return population{x, ps[0], ps[1]}, nil
}

// more leaves n more messages waiting, with numbers of their own.
func (p population) more(ctx context.Context, of *peer, n int) error {
	from := sequence.Add(int64(n)) - int64(n) + 1
	if of == p.latest {
		return p.stageMany(ctx, from, n)
	}
	return p.putMany(ctx, from, n, 0, 0)
}

// growth measures draining beside what must not matter.
func (b *bench) growth() error {
	if err := b.backlog(); err != nil {
		return err
	}
	return b.beside()
}

// backlog drains the head of a great backlog, and a small one as a whole.
func (b *bench) backlog() error {
	few := min(10_000, b.size.backlog/10)
	sizes := slices.Compact([]int{few, b.size.backlog / 10, b.size.backlog})
	var vs []variant
	name := func(p *peer, n int) string { return fmt.Sprintf("%s, %s wait", p.name, count(float64(n))) }
	for i, n := range sizes {
		pop, err := b.populate(fmt.Sprintf("backlog%d_", i))
		if err != nil {
			return err
		}
		for _, p := range []*peer{pop.latest, pop.journal} {
			vs = append(vs, variant{name(p, n), own, func() (float64, error) { return b.head(pop, p, n, b.size.backlog/10) }})
		}
	}
	s, err := b.measure(vs, b.size.rounds)
	if err != nil {
		return err
	}
	b.add(s.compared("Draining with a backlog", "messages/s", name(b.site.peer(ownLatest), few), b.size.rounds,
		fmt.Sprintf("%s messages are drained in each round: from a backlog that is filled up again between the rounds, and, of the least, as a whole again and again.", count(float64(b.size.backlog/10)))).plain())
	of := func(system string) ratio {
		p := b.site.peer(system)
		return newRatio("growth_1m", s, name(p, b.size.backlog), name(p, few))
	}
	b.ratio(worse(of(ownLatest), of(ownJournal)))
	return nil
}

// head fills a backlog up to n and drains a number of messages off its head,
// or all of it as often as that takes.
func (b *bench) head(pop population, p *peer, n, drained int) (float64, error) {
	took, done := time.Duration(0), 0
	for done < drained {
		left, err := b.site.left(b.ctx, p)()
		if err != nil {
			return 0, err
		}
		if err := errors.Join(pop.more(b.ctx, p, n-left), b.site.settle(b.ctx, p)); err != nil {
			return 0, err
		}
		k := min(n, drained)
		d, err := b.some(p, k, n)
		if err != nil {
			return 0, err
		}
		took, done = took+d, done+k
		if b.warm {
			break
		}
	}
	return float64(done) / took.Seconds(), nil
}

// some times how long a relay takes over the first k of n waiting messages,
// and checks that what it handled, and nothing else, is gone afterwards.
func (b *bench) some(p *peer, k, n int) (time.Duration, error) {
	var handled, took atomic.Int64
	done := make(chan struct{})
	start := time.Now()
	stop, err := p.relay(b.ctx, relayOptions{relays: 1}, func(int64, []byte) {
		if handled.Add(1) == int64(k) {
			took.Store(int64(time.Since(start)))
			close(done)
		}
	})
	if err != nil {
		return 0, err
	}
	err = await(b.ctx, done, func() error { return fmt.Errorf("%d of %d messages handled", handled.Load(), k) })
	if err := errors.Join(err, stop()); err != nil {
		return 0, err
	}
	left, err := b.site.left(b.ctx, p)()
	if err == nil && int64(left)+handled.Load() != int64(n) {
		err = fmt.Errorf("%d messages handled and %d left of %d", handled.Load(), left, n)
	}
	return time.Duration(took.Load()), err
}

// beside drains messages that share their table with others, which do not wait.
func (b *bench) beside() error {
	n := b.size.ended / 2
	c := outbox.Claim{Channel: channel + "-messages", Limit: 10_000, Lease: time.Hour, Full: true}
	var vs []variant
	for _, k := range []struct {
		name, prefix string
		others       int
		fill         func(population) error
	}{
		{"alone", "alone_", 0, func(population) error { return nil }},
		{"scheduled for tomorrow", "scheduled_", b.size.backlog, func(p population) error {
			return p.putMany(b.ctx, 1, b.size.backlog, 0, 24*time.Hour)
		}},
		{"dead", "dead_", b.size.ended, func(p population) error {
			return b.claimed(p, c, func(rows []outbox.Row) error {
				ss := make([]outbox.Settlement, len(rows))
				for i, r := range rows {
					ss[i] = outbox.Settlement{Row: r, Outcome: outbox.OutcomeDead, Error: "refused"}
				}
				_, err := p.store.Settle(b.ctx, outbox.Channel{System: outbox.SystemJournal, Name: c.Channel}, ss)
				return err
			})
		}},
		{"leased", "leased_", b.size.ended, func(p population) error {
			return b.claimed(p, c, func([]outbox.Row) error { return nil })
		}},
	} {
		pop, err := b.populate(k.prefix)
		if err != nil {
			return err
		}
		if err := errors.Join(k.fill(pop), b.site.settle(b.ctx, pop.journal)); err != nil {
			return err
		}
		name := k.name
		if k.others > 0 {
			name = count(float64(k.others)) + " " + k.name
		}
		vs = append(vs, variant{name, own, func() (float64, error) {
			n := b.rows(n)
			if err := errors.Join(pop.more(b.ctx, pop.journal, n), b.site.settle(b.ctx, pop.journal)); err != nil {
				return 0, err
			}
			took, err := b.some(pop.journal, n, n+k.others)
			return float64(n) / took.Seconds(), err
		}})
	}
	s, err := b.measure(vs, b.size.few)
	if err != nil {
		return err
	}
	b.add(s.compared("Draining beside others that do not wait", "messages/s", "alone", b.size.few,
		fmt.Sprintf("%s, %s messages are drained in each round.", ownJournal, count(float64(n)))).plain())
	return nil
}

// claimed puts b.size.ended messages and hands them to f as they are claimed.
func (b *bench) claimed(p population, c outbox.Claim, f func([]outbox.Row) error) error {
	if err := p.putMany(b.ctx, 1, b.size.ended, 0, 0); err != nil {
		return err
	}
	for n := 0; n < b.size.ended; {
		got, err := p.store.ClaimMessages(b.ctx, nil, c)
		if err != nil {
			return err
		}
		if len(got.Rows) == 0 {
			return fmt.Errorf("claimed %d of %d messages, and then none", n, b.size.ended)
		}
		if err := f(got.Rows); err != nil {
			return err
		}
		n += len(got.Rows)
	}
	return nil
}
