package outboxtest

import (
	"context"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// Steps of a [outbox.JournalStore].
const (
	StepPut            Step = "PutRows"
	StepClaimMessages  Step = "ClaimMessages"
	StepBegin          Step = "BeginMessage"
	StepSettleMessages Step = "SettleMessages"
	StepExtendMessages Step = "ExtendMessages"
	StepListMessages   Step = "ListMessages"
	StepAmend          Step = "AmendMessages"
	StepPurge          Step = "PurgeMessages"
)

var _ outbox.JournalStore = (*Faulty)(nil)

// journal runs one step of a journal's store.
func journal[A any](ctx context.Context, f *Faulty, step Step, do func(outbox.JournalStore) (A, error)) (A, error) {
	return call(ctx, f, step, func() (A, error) {
		s, ok := f.store.(outbox.JournalStore)
		if !ok {
			var none A
			return none, fmt.Errorf("%s: %w: the store keeps no messages", step, outbox.ErrInvalid)
		}
		return do(s)
	})
}

func (f *Faulty) PutRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.PutRow, begin time.Duration) ([]outbox.PutAnswer, error) {
	return journal(ctx, f, StepPut, func(s outbox.JournalStore) ([]outbox.PutAnswer, error) {
		return s.PutRows(ctx, tx, channel, rows, begin)
	})
}

func (f *Faulty) ClaimMessages(ctx context.Context, tx outbox.Tx, c outbox.Claim) (outbox.Claimed, error) {
	return journal(ctx, f, StepClaimMessages, func(s outbox.JournalStore) (outbox.Claimed, error) {
		return s.ClaimMessages(ctx, tx, c)
	})
}

func (f *Faulty) BeginMessage(ctx context.Context, tx outbox.Tx, channel, key string, lease time.Duration) (outbox.Row, error) {
	return journal(ctx, f, StepBegin, func(s outbox.JournalStore) (outbox.Row, error) {
		return s.BeginMessage(ctx, tx, channel, key, lease)
	})
}

func (f *Faulty) SettleMessages(ctx context.Context, tx outbox.Tx, channel string, ss []outbox.Settlement) ([]outbox.Result, error) {
	return journal(ctx, f, StepSettleMessages, func(s outbox.JournalStore) ([]outbox.Result, error) {
		return s.SettleMessages(ctx, tx, channel, ss)
	})
}

func (f *Faulty) ExtendMessages(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	return journal(ctx, f, StepExtendMessages, func(s outbox.JournalStore) ([]outbox.Result, error) {
		return s.ExtendMessages(ctx, tx, channel, rows, d)
	})
}

func (f *Faulty) ListMessages(ctx context.Context, tx outbox.Tx, channel string, l outbox.MessageList) ([]outbox.Row, error) {
	return journal(ctx, f, StepListMessages, func(s outbox.JournalStore) ([]outbox.Row, error) {
		return s.ListMessages(ctx, tx, channel, l)
	})
}

func (f *Faulty) AmendMessages(ctx context.Context, tx outbox.Tx, channel string, a outbox.Amendment) (outbox.Amended, error) {
	return journal(ctx, f, StepAmend, func(s outbox.JournalStore) (outbox.Amended, error) {
		return s.AmendMessages(ctx, tx, channel, a)
	})
}

func (f *Faulty) PurgeMessages(ctx context.Context, channel string, p outbox.Purge) (int, error) {
	return journal(ctx, f, StepPurge, func(s outbox.JournalStore) (int, error) { return s.PurgeMessages(ctx, channel, p) })
}
