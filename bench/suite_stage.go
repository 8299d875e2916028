package main

import (
	"fmt"
	"time"
)

// stage measures a transaction of the application with one message in it.
func (b *bench) stage() error {
	ps := b.site.peers(func(p *peer) bool { return p.stage != nil })
	b.add(describe("Who is compared", b.site.list))
	for _, c := range []struct {
		writers, rounds int
		length          time.Duration
	}{{1, b.size.few, b.size.write / 2}, {4, b.size.few, b.size.write / 2}, {16, b.size.rounds, b.size.write}} {
		s, err := b.stageRounds(ps, c.writers, c.rounds, c.length)
		if err != nil {
			return err
		}
		t := s.compared(fmt.Sprintf("Staging, %d writers", c.writers), "transactions/s", base, c.rounds,
			"A transaction of the application: one insert of its own, one message.")
		if c.writers < 16 {
			t.bars = nil
			b.add(t)
			continue
		}
		b.add(t)
		rival := s.best(rival)
		b.ratio(newRatio("stage_vs_base", s, ownLatest, base))
		b.ratio(newRatio("stage_vs_best_peer", s, ownLatest, rival))
		b.ratio(newRatio("put_vs_best_peer", s, ownJournal, rival))
		b.ratio(newRatio("put_vs_keyed_peer", s, ownJournal, riverUnique))
	}
	return nil
}

func (b *bench) stageRounds(ps []*peer, writers, rounds int, length time.Duration) (samples, error) {
	var vs []variant
	for _, p := range ps {
		vs = append(vs, variant{p.name, p.kind, func() (float64, error) {
			if err := b.site.clear(b.ctx, p); err != nil {
				return 0, err
			}
			return b.writers(writers, b.span(length), p.stage)
		}})
	}
	return b.measure(vs, rounds)
}

// bulk measures a transaction with 1,000 messages.
func (b *bench) bulk() error {
	const size = 1000
	var vs []variant
	for _, p := range b.site.peers(func(p *peer) bool { return p.bulk != nil }) {
		vs = append(vs, variant{p.name, p.kind, func() (float64, error) {
			if err := b.site.clear(b.ctx, p); err != nil {
				return 0, err
			}
			done, length, start := 0, b.span(b.size.write), time.Now()
			for time.Since(start) < length {
				if err := p.bulk(b.ctx, sequence.Add(size)-size+1, size); err != nil {
					return 0, err
				}
				done += size
			}
			return float64(done) / time.Since(start).Seconds(), nil
		}})
	}
	s, err := b.measure(vs, b.size.rounds)
	if err != nil {
		return err
	}
	b.add(s.compared("In bulk: 1,000 messages a transaction, one writer", "messages/s", "bare insert", b.size.rounds,
		"The bare insert is one statement over two arrays."))
	rival := s.best(rival)
	b.ratio(worse(newRatio("bulk_vs_best_peer", s, ownLatest, rival), newRatio("bulk_vs_best_peer", s, ownJournal, rival)))
	b.ratio(newRatio("bulk_vs_keyed_peer", s, ownJournal, riverUnique))
	return nil
}
