package outbox

import (
	"context"
	"errors"
	"fmt"
	"time"
)

// Verbs are a journal's steps, for those who do not leave them to a [Relay],
// or want to record them together with their own data: those of a [Journal]
// work alone, those of [Journal.In] inside a transaction. They take the
// default backoff and the default limit of attempts. All are safe for
// concurrent use, as far as the transaction is.
//
// A verb that takes a [Lease] answers ErrLeaseLost, and changes nothing, once
// the lease has lapsed and the message was claimed by another, or was settled
// otherwise, or is gone; the same settlement again, by the same token, is a success.
// ErrBusy says that another transaction holds the message; nothing changed.
type Verbs struct {
	j      *Journal
	tx     Tx
	inside bool // of a transaction: tx must not be nil
}

// usable refuses verbs inside of no transaction.
func (v Verbs) usable() error {
	if v.inside && v.tx == nil {
		return fmt.Errorf("%w: it is nil", ErrTx)
	}
	return nil
}

func (v Verbs) errorf(verb, key string, err error) error {
	return fmt.Errorf("outbox: %s %s: %w", verb, v.j.name(key), err)
}

// fromStore wraps an error of the store, which names key and channel.
func fromStore(err error) error { return fmt.Errorf("outbox: %w", err) }

// Begin leases a pending or failed message to the caller, due or not, and
// counts an attempt. The lease is 100 ms to 1 h. ErrState in any other state,
// ErrNotFound, ErrBusy, or ErrBlocked where an earlier message of its group is
// not settled.
func (v Verbs) Begin(ctx context.Context, key string, lease time.Duration) (Record, error) {
	if err := firstError(v.usable(), checkKey(key), checkLease(lease)); err != nil {
		return Record{}, v.errorf("begin", key, err)
	}
	row, err := v.j.store.BeginMessage(ctx, v.tx, v.j.o.Channel, key, lease)
	if err != nil {
		return Record{}, fromStore(err)
	}
	return recordOf(v.j.o.Channel, row, true), nil
}

// ClaimDue leases up to limit (1 to 10,000) due messages to the caller, oldest
// due first, and counts an attempt for each. Messages of a group come in runs
// that must be sent in their order: when one is not sent, settle those after it
// with Defer. Of one that comes back Ambiguous nobody knows whether it was sent
// before: find out, and see [Verbs.ResolveAmbiguous]. A channel
// that is paused gives none, one whose destination is down one at a time.
func (v Verbs) ClaimDue(ctx context.Context, limit int, lease time.Duration) ([]Record, error) {
	if err := firstError(v.usable(), checkCount("limit", limit, maxBatchSize), checkLease(lease)); err != nil {
		return nil, fmt.Errorf("outbox: claim from channel %q: %w", v.j.o.Channel, err)
	}
	c := Claim{Channel: v.j.o.Channel, Limit: limit, Lease: lease, Full: true}
	claimed, err := v.j.store.ClaimMessages(ctx, v.tx, c)
	if err != nil {
		return nil, fromStore(err)
	}
	return recordsOf(v.j.o.Channel, claimed.Rows, true), nil
}

func recordsOf(channel string, rows []Row, held bool) []Record {
	rs := make([]Record, len(rows))
	for i, r := range rows {
		rs[i] = recordOf(channel, r, held)
	}
	return rs
}

// Extend lets the lease end d from now (100 ms to 1 h), also one that has
// lapsed if nobody has taken the message since. The new Until is told by the
// caller's clock.
func (v Verbs) Extend(ctx context.Context, l Lease, d time.Duration) (Lease, error) {
	if err := firstError(v.usable(), v.checkLease(l), checkLease(d)); err != nil {
		return l, v.errorf("extend", l.Key, err)
	}
	var asked time.Time
	err := v.insist(ctx, func(bool) (Result, error) {
		asked = time.Now()
		return v.extendOnce(ctx, l, d)
	})
	if err != nil {
		return l, v.settleError("extend", l.Key, err)
	}
	l.Until = asked.Add(d).UTC().Truncate(time.Microsecond)
	return l, nil
}

func (v Verbs) extendOnce(ctx context.Context, l Lease, d time.Duration) (Result, error) {
	rows := []Row{{Key: l.Key, Token: l.Token}}
	if v.inside {
		return only(v.j.store.ExtendMessages(ctx, v.tx, v.j.o.Channel, rows, d))
	}
	return only(v.j.store.Extend(ctx, v.j.channel(), rows, d))
}

// MarkSent records that the message was sent; ref, at most 1,024 bytes of
// valid UTF-8 without NUL, is what the receiver calls it, and may be empty.
func (v Verbs) MarkSent(ctx context.Context, l Lease, ref string) error {
	if err := checkRef(ref); err != nil {
		return v.errorf("mark as sent", l.Key, err)
	}
	return v.settle(ctx, "mark as sent", l, Settlement{Outcome: OutcomeDone, Ref: ref, Keep: true})
}

// MarkFailed records that the message was not sent. The class of err decides:
// after [Permanent], or at the tenth attempt, it is dead; after [RetryAfter] it
// is due again after the delay; after [Defer] and [Unavailable] too, at once
// where they name none, and the attempt is given back; [Unknown] keeps it as
// unknown; after any other error it is due again after the backoff. It says
// nothing of earlier attempts: what was Ambiguous comes back so. A nil err is
// ErrInvalid: it must not read as "sent".
func (v Verbs) MarkFailed(ctx context.Context, l Lease, err error) error {
	const verb = "mark as failed"
	if err == nil {
		return v.errorf(verb, l.Key, invalid("the error is nil"))
	}
	if bad := firstError(v.usable(), v.checkLease(l)); bad != nil {
		return v.errorf(verb, l.Key, bad)
	}
	f := fate{kind: fateFailed, err: err}
	if f.class, f.delay = classify(err); f.class == ClassUnknown {
		f.kind = fateUnknown
	}
	row := Row{}
	if f.class == ClassPlain || f.class == ClassRetryAfter { // the attempts count
		var readErr error
		if row, readErr = v.read(ctx, l.Key, false); errors.Is(readErr, ErrNotFound) {
			return v.errorf(verb, l.Key, ErrLeaseLost)
		} else if readErr != nil {
			return fromStore(readErr)
		}
	}
	p := policy{max: defaultMaxAttempts, park: true, backoff: defaultBackoff}
	return v.settle(ctx, verb, l, p.settlement(row, f))
}

// ResolveAmbiguous decides over a message claimed as Ambiguous: StateUnknown
// keeps it as unknown, StatePending gives it back, attempt and all, to be sent
// again. Any other state is ErrInvalid.
func (v Verbs) ResolveAmbiguous(ctx context.Context, l Lease, to State) error {
	const verb = "resolve"
	s := Settlement{Error: errLapsed.Error()}
	switch to {
	case StateUnknown:
		s.Outcome = OutcomeUnknown
	case StatePending:
		s.Outcome, s.Doubt = OutcomeRelease, DoubtCleared
	default:
		return v.errorf(verb, l.Key, invalid("an ambiguous message becomes unknown or pending, not %s", to))
	}
	return v.settle(ctx, verb, l, s)
}

// settle ends a lease as s says.
func (v Verbs) settle(ctx context.Context, verb string, l Lease, s Settlement) error {
	if err := firstError(v.usable(), v.checkLease(l)); err != nil {
		return v.errorf(verb, l.Key, err)
	}
	s.Row = Row{Key: l.Key, Token: l.Token}
	err := v.insist(ctx, func(again bool) (Result, error) {
		s.Again = again
		return v.settleOnce(ctx, s)
	})
	if errors.Is(err, ErrBusy) {
		err = v.stillBusy(ctx, l)
	}
	return v.settleError(verb, l.Key, err)
}

func (v Verbs) settleOnce(ctx context.Context, s Settlement) (Result, error) {
	ss := []Settlement{s}
	if v.inside {
		return only(v.j.store.SettleMessages(ctx, v.tx, v.j.o.Channel, ss))
	}
	return only(v.j.store.Settle(ctx, v.j.channel(), ss))
}

// stillBusy tells a message that another transaction holds from one that was
// settled although a Put holds its group. The latter is done: the group goes
// on when its own lease has lapsed.
func (v Verbs) stillBusy(ctx context.Context, l Lease) error {
	row, err := v.read(ctx, l.Key, false)
	switch {
	case errors.Is(err, ErrNotFound), err == nil && row.Token != l.Token:
		return ErrLeaseLost
	case err != nil:
		return fmt.Errorf("read message: %w", err)
	case row.State == StateSending:
		return ErrBusy
	}
	return nil
}

// settleError names the message in err, unless the store has.
func (v Verbs) settleError(verb, key string, err error) error {
	switch {
	case err == nil:
		return nil
	case err == ErrBusy || err == ErrLeaseLost:
		return v.errorf(verb, key, err)
	}
	return fromStore(err)
}

// How long a verb that works alone tries a message that is locked: 0.6 s or
// so. Inside a transaction nothing is waited for, since that holds locks.
const (
	busyTries  = 6
	busyInside = 2
)

// insist makes a call until it is not busy.
func (v Verbs) insist(ctx context.Context, call func(again bool) (Result, error)) error {
	tries := busyTries
	if v.inside {
		tries = busyInside
	}
	for try := 1; ; try++ {
		res, err := call(try > 1)
		switch {
		case err != nil:
			return err
		case res == ResultStale:
			return ErrLeaseLost
		case res != ResultBusy:
			return nil
		case try == tries:
			return ErrBusy
		}
		if !v.inside {
			sleep(ctx, jitter(exponential(settlePause, settlePauseCap, try)))
		}
	}
}

// only is the one result of a call with one row.
func only(rs []Result, err error) (Result, error) {
	if err == nil && len(rs) != 1 {
		err = fmt.Errorf("store returned %d results for one message", len(rs))
	}
	if err != nil {
		return 0, err
	}
	return rs[0], nil
}

func (v Verbs) checkLease(l Lease) error {
	switch {
	case l.Token <= 0:
		return invalid("the lease has no token: the message is not held")
	case l.Channel != v.j.o.Channel:
		return invalid("the lease is of channel %q", nameOf(l.Channel, ""))
	}
	return checkKey(l.Key)
}

const maxRefBytes = MaxErrorText

func checkRef(ref string) error {
	if ref == "" {
		return nil
	}
	return validText("ref", ref, maxRefBytes)
}

// ResolveUnknown is a person's answer over an unknown message: VerdictSent
// makes it sent, with ref, VerdictDead dead, and VerdictNotSent due again, its
// attempts standing. ErrState in any other state, ErrNotFound, ErrBusy;
// VerdictUnknown is ErrInvalid.
func (v Verbs) ResolveUnknown(ctx context.Context, key string, to Verdict, ref string) error {
	const verb = "resolve"
	actions := map[Verdict]Action{VerdictSent: ActionSent, VerdictNotSent: ActionPending, VerdictDead: ActionDead}
	action, ok := actions[to]
	err := firstError(v.usable(), checkKey(key), checkRef(ref))
	switch {
	case err != nil:
	case !ok:
		err = invalid("the verdict must be sent, not sent or dead, it is %s", to)
	case ref != "" && to != VerdictSent:
		err = invalid("a ref is of a message that was sent")
	}
	if err != nil {
		return v.errorf(verb, key, err)
	}
	a := Amendment{Action: action, MessageFilter: MessageFilter{Key: key}, Limit: 1, Ref: ref}
	done, err := v.j.store.AmendMessages(ctx, v.tx, v.j.o.Channel, a)
	switch {
	case err != nil:
		return fromStore(err)
	case done.Count == 0:
		return v.whyNot(ctx, verb, a)
	}
	return nil
}
