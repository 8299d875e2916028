package main

import (
	"context"
	"database/sql"
	"fmt"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// groups measures messages with an order against those without.
func (b *bench) groups() error {
	j, p := b.site.own.journal, b.site.peer(ownJournal)
	put := func(groups int64) func(context.Context, int64) error {
		return func(ctx context.Context, seq int64) error {
			return b.site.transact(ctx, seq, func(tx *sql.Tx) error {
				m := outbox.Message{Key: keyOf(seq), Payload: payload(seq)}
				if groups > 0 {
					m.Group = fmt.Sprint("group-", seq%groups)
				}
				_, err := j.Put(ctx, tx, m)
				return err
			})
		}
	}
	var vs []variant
	for _, groups := range []int64{0, 10_000, 100} {
		vs = append(vs, variant{inGroups(int(groups)), own, func() (float64, error) {
			if err := b.site.clear(b.ctx, p); err != nil {
				return 0, err
			}
			return b.writers(16, b.span(b.size.write), put(groups))
		}})
	}
	s, err := b.measure(vs, b.size.few)
	if err != nil {
		return err
	}
	b.add(s.compared("Ordered messages: Put, 16 writers", "transactions/s", inGroups(0), b.size.few,
		"Transactions that put into one group wait for each other's commits.").plain())

	vs = nil
	for _, groups := range []int{0, 10_000, 100} {
		vs = append(vs, variant{inGroups(groups), own, func() (float64, error) {
			n := b.rows(b.size.drain / 2)
			grouped := *p
			grouped.fill = func(ctx context.Context, n int) error { return b.site.own.putMany(ctx, 1, n, groups, 0) }
			return b.drainPeer(&grouped, relayOptions{relays: 1}, n)
		}})
	}
	if s, err = b.measure(vs, b.size.few); err != nil {
		return err
	}
	b.add(s.compared("Ordered messages: draining, one process, batches of 1,000", "messages/s", inGroups(0), b.size.few,
		fmt.Sprintf("%s messages wait.", count(float64(b.size.drain/2)))).plain())
	return nil
}

func inGroups(n int) string {
	if n == 0 {
		return "no group"
	}
	return count(float64(n)) + " groups"
}
