package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// errUnsent: the process stood still, or the database was away for too long.
var errUnsent = errors.New("not sent: the lease could not be extended in time")

// Deliver sends a message that the caller holds a lease on, from
// [Journal.PutBegun] after its commit, or from Begin or ClaimDue, and settles
// it as a [Relay] with o would: o's Workers, BatchSize and Order do not count. It
// first extends the lease, to o.Lease from now, and goes on extending it while
// f runs.
//
// It returns the record as it was settled, its times by this host's clock, and
// the error that f returned, or why nobody knows what became of the send; nil
// says that the message was sent. An error of settling says that
// too: the message is then settled by a relay, once its lease has lapsed.
//
// ErrState where r carries no lease, as one that Put found to exist does not,
// so that nobody sends it twice; ErrLeaseLost where the lease is lost, before
// or while f runs; ErrInvalid for a nil f or bad options.
// When ctx ends, f's context does, and nobody knows what became of the send;
// the message is settled all the same.
func (j *Journal) Deliver(ctx context.Context, r Record, f SendFunc, o SendOptions) (Record, error) {
	settled, err := j.deliver(ctx, r, f, o)
	if err != nil {
		return settled, fmt.Errorf("outbox: deliver %s: %w", j.name(r.Key), err)
	}
	return settled, nil
}

func (j *Journal) deliver(ctx context.Context, r Record, f SendFunc, o SendOptions) (Record, error) {
	relay, err := newRelay(RelayOptions{}, j.Sender(f, o))
	if err != nil {
		return r, err
	}
	if r.Lease.Token == 0 {
		return r, fmt.Errorf("%w: the caller holds no lease on it, others may be sending it", ErrState)
	}
	c := relay.channels[0]
	asked := time.Now()
	if err := j.hold(ctx, &r, c.o.Lease); err != nil {
		return r, err
	}
	b := &batch{c: c, rows: []Row{rowOf(r)}}
	b.hold = newHold(b.rows, c.o.Lease, asked)
	b.parcels = c.crew.parcels(b.rows)
	c.unstarted(len(b.parcels))
	c.occupy()
	n := relay.newRun(context.WithoutCancel(ctx))
	n.work, n.alone = ctx, true
	t := b.process(n)
	n.end()
	return j.delivered(ctx, r, b.verdict, t)
}

// hold extends the lease of r. A Put that holds its group may keep that from
// being extended, which does no harm if the message is.
func (j *Journal) hold(ctx context.Context, r *Record, d time.Duration) error {
	l, err := j.Extend(ctx, r.Lease, d)
	if errors.Is(err, ErrBusy) && r.Group != "" {
		row, readErr := j.read(ctx, r.Key, false)
		if readErr == nil && row.State == StateSending && row.Token == r.Lease.Token && row.LeaseUntil.After(r.Lease.Until) {
			l, err = Lease{Channel: r.Channel, Key: r.Key, Token: row.Token, Until: row.LeaseUntil}, nil
		}
	}
	if err == nil {
		r.Lease = l
	}
	return err
}

// rowOf is the row of a record that the caller holds.
func rowOf(r Record) Row {
	return Row{
		Key: r.Key, Version: Version(r.Seq), Token: r.Lease.Token, Attempt: r.Attempt, Payload: r.Payload, Header: r.Header,
		StagedAt: r.CreatedAt, Due: r.Due, LeaseUntil: r.Lease.Until, LastError: r.LastError, Group: r.Group,
		State: StateSending, Ambiguous: r.Ambiguous, Ref: r.Ref, Code: r.Code,
	}
}

// delivered is what Deliver returns.
func (j *Journal) delivered(ctx context.Context, r Record, v verdict, t tally) (Record, error) {
	if v.cause == nil && v.done+v.settled == 0 {
		v.cause = errUnsent
	}
	switch {
	case t.lost > 0 && v.cause != nil:
		return r, fmt.Errorf("%w: %w", ErrLeaseLost, v.cause)
	case t.lost > 0:
		return r, fmt.Errorf("%w after the send", ErrLeaseLost)
	case t.left > 0 && v.cause != nil:
		return r, fmt.Errorf("%w; not settled: %w", v.cause, t.err)
	case t.left > 0:
		return r, fmt.Errorf("sent, but not settled: %w", t.err)
	case v.settled > 0:
		if settled, err := j.Get(context.WithoutCancel(ctx), r.Key); err == nil {
			return settled, nil
		}
	}
	return r.settled(v.ss[0]), v.cause
}

// settled is r after a settlement.
func (r Record) settled(s Settlement) Record {
	now := time.Now().UTC().Truncate(time.Microsecond)
	r.Lease = Lease{}
	open := s.Outcome == OutcomeRetry || s.Outcome == OutcomeRelease
	r.Ambiguous = open && (s.Doubt == DoubtRaised || s.Doubt == DoubtKept && r.Ambiguous)
	if s.Outcome != OutcomeDone {
		r.LastError, r.Code = s.Error, s.Code
	}
	switch s.Outcome {
	case OutcomeDone:
		r.State, r.Ref, r.CompletedAt = StateSent, s.Ref, now
	case OutcomeDead:
		r.State, r.CompletedAt = StateDead, now
	case OutcomeUnknown:
		r.State, r.CompletedAt = StateUnknown, now
	case OutcomeRelease:
		r.Attempt, r.Due = r.Attempt-1, now.Add(s.Delay)
	default:
		r.Due = now.Add(s.Delay)
	}
	if open {
		r.State = StateFailed
		if r.Attempt == 0 {
			r.State = StatePending
		}
	}
	return r
}
