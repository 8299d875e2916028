package outbox

import (
	"errors"
	"fmt"
	"time"
)

// policy decides what becomes of messages, for Sender, BatchSender, Deliver
// and the verbs.
type policy struct {
	max     int // attempts, or NoLimit
	park    bool
	probe   ProbeFunc
	keep    bool // what was sent
	backoff backoffFunc
}

func newPolicy(o SendOptions) *policy {
	return &policy{
		max: o.MaxAttempts, park: o.OnUnknown == Park, probe: o.Probe,
		keep: o.Retention != DeleteOnSent, backoff: bounded(o.Backoff),
	}
}

// spent reports whether so many attempts are all that a message has.
func (p *policy) spent(attempt int) bool { return p.max != NoLimit && attempt >= p.max }

// A fate is what is known of a message.
type fate struct {
	kind   fateKind
	ref    string        // of what was sent
	err    error         // why it was not sent, or why nobody knows
	class  Class         // of what was not sent
	delay  time.Duration // likewise
	untold bool          // it says nothing about the destination
	rush   bool          // again at once: the relay cut the call short
	mute   bool          // nothing was called
}

type fateKind uint8

const (
	fateSent    fateKind = iota + 1
	fateSettled          // and recorded by the send function itself
	fateFailed           // known not to have been sent
	fateUnknown          // nobody knows
	fateHeld             // given back, because an earlier one of its group was not sent
)

var (
	errLapsed = errors.New("an earlier attempt lapsed or was cut short, nobody knows whether it was sent")
)

// fateOf says what is known of a message after a call that returned ref and
// ended so.
func (p *policy) fateOf(ref string, end ending) fate {
	if is(end.err, ErrSettled) {
		return fate{kind: fateSettled}
	}
	reason := end.reason()
	if end.err == nil && !end.hung && (end.cause == nil || ref != "") {
		return fate{kind: fateSent, ref: ref}
	}
	f := fate{kind: fateFailed, err: reason}
	f.class, f.delay = classify(reason)
	if f.class == ClassUnavailable && end.ours() {
		f.class = ClassPlain // our own cutting it short may look so
	}
	switch {
	case f.class == ClassUnknown, f.class == ClassPlain && (end.cause != nil || end.hung || isAbrupt(end.err)):
		f.kind, f.untold = fateUnknown, true
		f.rush = errors.Is(end.cause, errShutdown) && !end.hung
	case f.class == ClassPlain && (p.park || p.probe != nil):
		f.kind = fateUnknown
	}
	return f
}

// probed is f, a message of unknown fate, after the Probe was asked.
func (f fate) probed(v Verdict, ref string, err error) fate {
	f.mute = false
	switch {
	case err == nil && v == VerdictSent:
		return fate{kind: fateSent, ref: ref}
	case err == nil && v == VerdictNotSent:
		f.kind, f.class, f.delay = fateFailed, ClassPlain, 0
		f.err = fmt.Errorf("not sent, says the probe: %w", f.err)
	case err != nil:
		f.err = fmt.Errorf("%w; probe failed: %w", f.err, err)
	default:
		f.err = fmt.Errorf("%w; the probe does not know", f.err)
	}
	return f
}

// settlement records the fate of a row: of anything but fateSettled.
func (p *policy) settlement(row Row, f fate) Settlement {
	s := Settlement{Row: row}
	switch f.kind {
	case fateSent:
		s.Outcome, s.Ref, s.Keep = OutcomeDone, ErrorText(f.ref), p.keep
		return s
	case fateHeld:
		s.Outcome, s.Delay, s.Error, s.Code = OutcomeRelease, f.delay, ErrorText(row.LastError), row.Code
		return s
	}
	s.Error, s.Code = errorText(f.err), errorCode(f.err)
	switch {
	case f.kind == fateUnknown && (p.park || p.spent(row.Attempt)):
		s.Outcome = OutcomeUnknown
	case f.kind == fateUnknown && f.rush:
		s.Outcome, s.Doubt = OutcomeRetry, DoubtRaised
	case f.kind == fateUnknown:
		s.Outcome, s.Doubt, s.Delay = OutcomeRetry, DoubtRaised, p.backoff(row.Attempt)
	case f.class == ClassUnavailable:
		s.Outcome = OutcomeRelease
	case f.class == ClassDefer:
		s.Outcome, s.Delay = OutcomeRelease, deferred(f.delay)
	case f.class == ClassPermanent, p.spent(row.Attempt):
		s.Outcome = OutcomeDead
	case f.delay > 0:
		s.Outcome, s.Delay = OutcomeRetry, min(f.delay, maxDelay)
	default:
		s.Outcome, s.Delay = OutcomeRetry, p.backoff(row.Attempt)
	}
	return s
}

// deferred is the delay of a Defer: at least the store's unit of time, so that
// the row goes behind those due now.
func deferred(d time.Duration) time.Duration { return min(max(d, time.Microsecond), maxDelay) }

// is is errors.Is for an error of user code, whose methods may panic.
func is(err, target error) (ok bool) {
	defer func() {
		if recover() != nil {
			ok = false
		}
	}()
	return errors.Is(err, target)
}

const maxCodeBytes = 128

// errorCode is the code of an error of user code, as a store can keep it.
func errorCode(err error) (code string) {
	defer func() {
		if recover() != nil {
			code = ""
		}
	}()
	return shortText(Code(err), maxCodeBytes)
}
