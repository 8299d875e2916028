package main

import (
	"context"
	"errors"
	"fmt"
)

// sqlite measures staging and draining on SQLite, with commits that survive a
// power cut and with those that do not.
func (b *bench) sqlite() error {
	for _, c := range []struct {
		mode   string
		rounds int
	}{{"FULL", b.size.rounds}, {"NORMAL", b.size.few}} {
		f, err := openFile(b.ctx, c.mode)
		if err != nil {
			return err
		}
		err = b.sqliteMode(f, c.mode, c.rounds)
		if err := errors.Join(err, f.close()); err != nil {
			return fmt.Errorf("synchronous %s: %w", c.mode, err)
		}
	}
	return nil
}

func (b *bench) sqliteMode(f *file, mode string, rounds int) error {
	var stage, drain []variant
	var drained []*peer
	for _, p := range f.list {
		if p.stage != nil {
			stage = append(stage, variant{p.name, p.kind, func() (float64, error) {
				if err := f.clear(b.ctx, p); err != nil {
					return 0, err
				}
				return b.writers(1, b.span(b.size.write/2), p.stage)
			}})
		}
		if p.relay != nil {
			drained = append(drained, p)
			drain = append(drain, variant{p.name, p.kind, func() (float64, error) {
				n := max(1, b.rows(b.size.sqlite)/max(1, p.share))
				if err := errors.Join(f.clear(b.ctx, p), p.fill(b.ctx, n), f.checkpoint(b.ctx)); err != nil {
					return 0, err
				}
				return drainOne(b.ctx, p, relayOptions{relays: 1}, n, f.left(b.ctx, p))
			}})
		}
	}
	if mode == "FULL" {
		b.add(describe("Who is compared on SQLite", f.list))
	}
	s, err := b.measure(stage, rounds)
	if err != nil {
		return err
	}
	t := s.compared("Staging on SQLite, one writer, synchronous "+mode, "transactions/s", base, rounds)
	b.add(t)
	if mode == "FULL" {
		b.ratio(newRatio("sqlite_stage_vs_base", s, ownLatest, base))
	}
	if s, err = b.measure(drain, rounds); err != nil {
		return err
	}
	t = s.compared("Draining on SQLite, synchronous "+mode, "messages/s", rawClaim, rounds,
		fmt.Sprintf("%s messages wait, of those slower by far a share: %s.", count(float64(b.size.sqlite)), shares(drained)))
	b.add(t)
	if mode == "FULL" {
		rival := s.best(rival)
		b.ratio(worse(newRatio("sqlite_drain_vs_best_peer", s, ownLatest, rival), newRatio("sqlite_drain_vs_best_peer", s, ownJournal, rival)))
	}
	return nil
}

// left counts what waits at a peer on SQLite.
func (f *file) left(ctx context.Context, p *peer) func() (int, error) {
	return func() (n int, err error) {
		err = f.db.QueryRowContext(ctx, p.waiting).Scan(&n)
		return n, err
	}
}
