package filestore

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// leasePoll is how often a move looks at leases in force.
const leasePoll = 50 * time.Millisecond

// endLeases waits until no lease is in force, and ends those whose holders
// have died. It returns how many there were.
func (m *mover) endLeases(ctx context.Context, channel string) (int, error) {
	n := 0
	for {
		rows, err := m.list(ctx, channel, outbox.StateSending)
		if err != nil || len(rows) == 0 {
			return n, err
		}
		now := m.now()
		var ends []outbox.Settlement
		for _, r := range rows {
			if !m.o.NoRelay && r.LeaseUntil.After(now) {
				continue
			}
			s := outbox.Settlement{Row: r, Outcome: outbox.OutcomeUnknown, Error: "its process died while it was sending it"}
			if m.o.Resend {
				s.Outcome = outbox.OutcomeRetry
			}
			ends = append(ends, s)
		}
		if len(ends) > 0 {
			// A Stale one was settled meanwhile: no row is left for the next look.
			rs, err := m.from.Settle(ctx, outbox.Channel{System: outbox.SystemJournal, Name: channel}, ends)
			if err != nil {
				return n, fmt.Errorf("end the leases of a process that died: %w", err)
			}
			for _, r := range rs {
				if r == outbox.ResultDone {
					n++
				}
			}
			continue
		}
		select {
		case <-ctx.Done():
			return n, fmt.Errorf("%d messages are being sent, the first with key %q, under a lease until %s: stop the relay, or wait: %w",
				len(rows), rows[0].Key, rows[0].LeaseUntil.Format(time.RFC3339), ctx.Err())
		case <-time.After(leasePoll):
		}
	}
}
