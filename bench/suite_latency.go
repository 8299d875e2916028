package main

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"
)

// latency measures the time from the commit to the handler.
func (b *bench) latency() error {
	ps := b.site.peers(func(p *peer) bool {
		return p.stage != nil && p.relay != nil && (p.kind != limit || p.name == rawClaim)
	})
	other := *b.site.peer(ownJournal)
	other.name = ownJournal + ", in another process, polling every 10 ms"
	other.kind = limit // no part of the comparison
	other.relay = func(ctx context.Context, o relayOptions, h handler) (func() error, error) {
		o.prompt, o.poll = false, 10*time.Millisecond
		return b.site.peer(ownJournal).relay(ctx, o, h)
	}
	ps = append(ps, &other)
	for _, c := range []struct{ rate, rounds int }{{100, b.size.rounds}, {1000, b.size.few}} {
		halves := samples{nil, map[string][]float64{}} // the medians of each round
		var vs []variant
		for _, p := range ps {
			vs = append(vs, variant{p.name, p.kind, func() (float64, error) {
				ms, err := b.latencyOf(p, c.rate, b.span(b.size.latency))
				if err == nil && !b.warm {
					halves.of[p.name] = append(halves.of[p.name], median(ms))
				}
				return quantile(ms, 0.99), err
			}})
		}
		s, err := b.measure(vs, c.rounds)
		if err != nil {
			return err
		}
		rival := s.negative().best(rival)
		t := &table{
			title: fmt.Sprintf("Latency from the commit to the handler, ms, at %d a second", c.rate),
			notes: []string{
				fmt.Sprintf("Medians of %d rounds of %s each; the ratio is the median over the paired rounds, with its interval.", c.rounds, b.size.latency),
				"River: FetchCooldown 1 ms at both ends; the others poll every 10 ms; this library in one process with the writer, as it comes.",
			},
			head: []string{"", "p50", "p99", "p99 ÷ " + rival, "interval"},
		}
		for _, v := range s.variants {
			r := newRatio("", s, v.name, rival)
			t.rows = append(t.rows, []string{v.name, digits(median(halves.of[v.name])), digits(median(s.of[v.name])), ratioText(r.value), span(r.lo, r.hi)})
			if c.rate == 100 {
				t.bars = append(t.bars, bar{v.name, median(s.of[v.name]), v.kind})
			}
		}
		b.add(t)
		if c.rate == 100 {
			of := func(name string) ratio {
				r := newRatio("latency_p99_vs_best_peer", s, name, rival)
				r.lowerIsBetter = true
				return r
			}
			b.ratio(worse(of(ownLatest), of(ownJournal)))
		}
	}
	return nil
}

// latencyOf stages at a rate for a while and returns, in milliseconds, how long
// after its commit each message reached the handler. One that came sooner than
// the commit's answer counts 0.
func (b *bench) latencyOf(p *peer, rate int, length time.Duration) ([]float64, error) {
	if err := b.site.clear(b.ctx, p); err != nil {
		return nil, err
	}
	stage := p.stage
	if p.announce != nil {
		stage = p.announce
	}
	n := max(1, int(length.Seconds()*float64(rate)))
	first := sequence.Add(int64(n+1)) - int64(n) // and one before it, to see that the relay is there
	committed, handled := make([]time.Time, n), make([]atomic.Int64, n)
	begun := time.Now()
	var left atomic.Int64
	left.Store(int64(n))
	up, done := make(chan struct{}), make(chan struct{})
	unread := make(chan error, 1)
	stop, err := p.relay(b.ctx, relayOptions{relays: 1, prompt: true}, func(seq int64, payload []byte) {
		now := time.Since(begun)
		if seq < 0 {
			var err error
			if seq, err = seqOf(payload); err != nil {
				select {
				case unread <- err:
				default:
				}
				return
			}
		}
		switch {
		case seq == first-1:
			close(up)
		case handled[seq-first].CompareAndSwap(0, int64(now)):
			if left.Add(-1) == 0 {
				close(done)
			}
		}
	})
	if err != nil {
		return nil, err
	}
	late := func() error { return fmt.Errorf("%d of %d messages were not handled", left.Load(), n) }
	err = errors.Join(stage(b.ctx, first-1), await(b.ctx, up, late))
	if err == nil {
		err = b.stageAt(rate, n, func(i int) error {
			err := stage(b.ctx, first+int64(i))
			committed[i] = time.Now()
			return err
		})
	}
	if err == nil {
		err = await(b.ctx, done, late)
	}
	if err := errors.Join(err, stop()); err != nil {
		return nil, err
	}
	select {
	case err := <-unread:
		return nil, err
	default:
	}
	ms := make([]float64, n)
	for i := range ms {
		ms[i] = max(0, milliseconds(time.Duration(handled[i].Load())-committed[i].Sub(begun)))
	}
	return ms, nil
}

// stageAt calls f n times, so many times a second, whatever each call takes.
func (b *bench) stageAt(rate, n int, f func(i int) error) error {
	var wg sync.WaitGroup
	var mu sync.Mutex
	var failed error
	start := time.Now()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for i := range n {
		timer.Reset(time.Until(start.Add(time.Duration(i) * time.Second / time.Duration(rate))))
		select {
		case <-b.ctx.Done():
			wg.Wait()
			return b.ctx.Err()
		case <-timer.C:
		}
		wg.Go(func() {
			if err := f(i); err != nil {
				mu.Lock()
				failed = errors.Join(failed, err)
				mu.Unlock()
			}
		})
	}
	wg.Wait()
	return failed
}
