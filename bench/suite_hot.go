package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const (
	hotKey    = "hot"
	hotUpsert = `INSERT INTO queue (due, channel, key, payload) VALUES ($1, 'bench', $2, $3)
		ON CONFLICT (channel, key) DO UPDATE SET due = excluded.due, payload = excluded.payload, token = 0`
	hotDelete = `DELETE FROM queue WHERE channel = 'bench' AND key = $1`
)

// hot measures one key: staged by many, and staged and published in turn.
func (b *bench) hot() error {
	l := b.site.own.latest
	queue := b.site.peer(rawClaim)
	var vs []variant
	for _, v := range []struct {
		name string
		p    *peer
		f    func(context.Context, int64) error
	}{
		{"Stage, a key each", b.site.peer(ownLatest), b.site.peer(ownLatest).stage},
		{"Stage, one key", b.site.peer(ownLatest), func(ctx context.Context, seq int64) error {
			return b.site.transact(ctx, seq, func(tx *sql.Tx) error {
				_, err := l.Stage(ctx, tx, hotKey, payload(seq))
				return err
			})
		}},
		{"bare upsert, one key", queue, func(ctx context.Context, seq int64) error {
			return b.site.transact(ctx, seq, func(tx *sql.Tx) error {
				_, err := tx.ExecContext(ctx, hotUpsert, seq, hotKey, payload(seq))
				return err
			})
		}},
	} {
		vs = append(vs, variant{v.name, v.p.kind, func() (float64, error) {
			if err := b.site.clear(b.ctx, v.p); err != nil {
				return 0, err
			}
			return b.writers(16, b.span(b.size.write), v.f)
		}})
	}
	s, err := b.measure(vs, b.size.few)
	if err != nil {
		return err
	}
	b.add(s.compared("One hot key, 16 writers", "transactions/s", "bare upsert, one key", b.size.few,
		"The writers wait for each other's commits.").plain())
	return b.hotCycles()
}

// hotCycles stages one key and has it published and acknowledged, in turn.
func (b *bench) hotCycles() error {
	tenth := max(1, b.size.hot/10)
	t := &table{
		title: fmt.Sprintf("One hot key, staged and acknowledged %s times in turn, under a held snapshot", count(float64(b.size.hot))),
		notes: []string{fmt.Sprintf("Cycles a second, over %s of them. A cycle is two commits or three; the next begins when the last has been acknowledged.", count(float64(tenth)))},
		head:  []string{"", "before the snapshot", "first tenth", "last tenth", "last ÷ before"},
	}
	for _, v := range []struct {
		name  string
		p     *peer
		start func() (func(seq int64) error, func() error, error)
	}{
		{ownLatest, b.site.peer(ownLatest), b.hotOwn},
		{"bare upsert, delete", b.site.peer(rawClaim), b.hotRaw},
	} {
		if err := errors.Join(b.site.clear(b.ctx, v.p), b.site.settle(b.ctx, v.p)); err != nil {
			return err
		}
		cycle, stop, err := v.start()
		if err != nil {
			return err
		}
		rates, err := b.hotRates(cycle, tenth)
		if err := errors.Join(err, stop()); err != nil {
			return fmt.Errorf("%s: %w", v.name, err)
		}
		t.rows = append(t.rows, []string{v.name, digits(rates[0]), digits(rates[1]), digits(rates[10]), ratioText(rates[10] / rates[0])})
	}
	b.add(t)
	return nil
}

// hotRates runs tenths of cycles: one before a snapshot is held, ten while it is.
func (b *bench) hotRates(cycle func(int64) error, tenth int) (rates []float64, err error) {
	var hold *snapshot
	defer func() {
		if hold != nil {
			err = errors.Join(err, hold.end())
		}
	}()
	for i := range 11 {
		if i == 1 {
			if hold, err = b.hold(); err != nil {
				return nil, err
			}
		}
		start := time.Now()
		for range tenth {
			if err := cycle(sequence.Add(1)); err != nil {
				return nil, err
			}
		}
		rates = append(rates, float64(tenth)/time.Since(start).Seconds())
	}
	return rates, nil
}

func (b *bench) hotOwn() (cycle func(int64) error, stop func() error, err error) {
	own := b.site.own
	settled := make(chan struct{}, 1)
	var a alarm
	r, err := outbox.NewRelay(outbox.RelayOptions{Logger: a.logger(), Observe: func(e outbox.Event) {
		if e.Kind == outbox.EventSettle {
			settled <- struct{}{}
		}
	}}, own.latest.Publisher(func(context.Context, []*outbox.Entry[[]byte]) error { return nil }, outbox.PublishOptions{}))
	if err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithCancel(b.ctx)
	done := make(chan error, 1)
	go func() { done <- r.Run(ctx) }()
	cycle = func(seq int64) error {
		err := own.store.Transact(b.ctx, nil, func(tx *sql.Tx) error {
			_, err := own.latest.Stage(b.ctx, tx, hotKey, payload(seq))
			return err
		})
		if err != nil {
			return err
		}
		return await(b.ctx, settled, func() error { return errors.New("the key was not acknowledged") })
	}
	return cycle, func() error { return a.stop(func() error { cancel(); return <-done }) }, nil
}

func (b *bench) hotRaw() (cycle func(int64) error, stop func() error, err error) {
	cycle = func(seq int64) error {
		if _, err := b.site.std.ExecContext(b.ctx, hotUpsert, seq, hotKey, payload(seq)); err != nil {
			return err
		}
		_, err := b.site.std.ExecContext(b.ctx, hotDelete, hotKey)
		return err
	}
	return cycle, func() error { return nil }, nil
}
