package outbox

import (
	"errors"
	"fmt"
	"time"
)

// What a caller may want to act on. Every error of this package and of a store
// wraps at most one of these, and the driver's own error stays reachable with
// errors.As.
var (
	// ErrLeaseLost: the token or version is no longer the row's; nothing changed.
	ErrLeaseLost = errors.New("lease lost")
	// ErrBusy: another transaction holds the row; nothing changed, try again.
	ErrBusy = errors.New("row is locked by another transaction")
	// ErrState: the row is in a state that does not allow the call.
	ErrState = errors.New("wrong state")
	// ErrBlocked: an earlier message of the group is not settled yet.
	ErrBlocked = errors.New("blocked by an earlier message of its group")
	// ErrNotFound: there is no such row.
	ErrNotFound = errors.New("not found")
	// ErrInvalid: an argument or option is refused; nothing was written.
	ErrInvalid = errors.New("invalid argument")
	// ErrTx: the transaction is nil, finished, aborted, or of another kind of database; nothing was
	// written. One of another database of the same kind cannot be told: it stages there.
	ErrTx = errors.New("unusable transaction")
	// ErrSchema: the outbox's tables are missing, outdated, newer than this library, or not its own.
	ErrSchema = errors.New("outbox schema")
	// ErrCommit: the answer to a COMMIT was lost. The transaction may have taken effect: read before you write it again.
	ErrCommit = errors.New("commit outcome unknown")
	// ErrSettled: a send has settled its message itself, inside its own transaction. A SendFunc returns it.
	ErrSettled = errors.New("already settled")
)

// A Class says what an error of a publish or send function means for the row.
type Class uint8

const (
	ClassPlain       Class = iota // failed, or not known to have worked: again after the backoff
	ClassPermanent                // will not work by being tried again
	ClassRetryAfter               // known not done; again in Delay
	ClassDefer                    // no call was made; due in Delay, the attempt given back
	ClassUnavailable              // the destination is down: the channel pauses
	ClassUnknown                  // perhaps done
)

// classError carries a class. cause may be nil: the class stands.
type classError struct {
	class Class
	delay time.Duration
	cause error
}

func (e *classError) Error() string {
	text := map[Class]string{
		ClassPermanent: "permanent", ClassRetryAfter: "retry later", ClassDefer: "deferred",
		ClassUnavailable: "destination unavailable", ClassUnknown: "outcome unknown",
	}[e.class]
	if e.delay > 0 {
		text = fmt.Sprintf("%s (in %s)", text, e.delay)
	}
	if e.cause != nil {
		text += ": " + e.cause.Error()
	}
	return text
}

func (e *classError) Unwrap() error { return e.cause }

// Permanent says that trying again will not help. A message is then dead, until
// somebody retries or discards it. A [Latest] entry is tried at the slowest
// backoff only (there is no newer state to wait for, and dropping it would
// leave the sink stale). Never nil.
func Permanent(cause error) error { return &classError{class: ClassPermanent, cause: cause} }

// RetryAfter says that the row was not published and when to try again. A
// delay of zero or less means by the backoff. Never nil.
func RetryAfter(delay time.Duration, cause error) error {
	return &classError{class: ClassRetryAfter, delay: max(delay, 0), cause: cause}
}

// Defer says that no call was made: the row is due again in delay (zero or
// less: at once) and its attempt is given back. Never nil.
func Defer(delay time.Duration) error {
	return &classError{class: ClassDefer, delay: max(delay, 0)}
}

// Unavailable says that the destination as a whole is down: the channel pauses
// in every relay, one of them probes it with one row at growing intervals, and
// no row's attempts are spent meanwhile. Never nil.
func Unavailable(cause error) error { return &classError{class: ClassUnavailable, cause: cause} }

// Unknown says that the row may or may not have been published. A [Latest]
// entry is published again, which its version makes safe; over a message,
// SendOptions.Probe and OnUnknown decide. Never nil.
func Unknown(cause error) error { return &classError{class: ClassUnknown, cause: cause} }

// codeError carries a problem code.
type codeError struct {
	code  string
	cause error
}

func (e *codeError) Error() string {
	if e.cause == nil {
		return e.code
	}
	return e.code + ": " + e.cause.Error()
}

func (e *codeError) Unwrap() error { return e.cause }

// WithCode adds a problem code, for a program to act on, to cause. The class
// of cause stands. Never nil.
func WithCode(code string, cause error) error { return &codeError{code, cause} }

// Classify returns the class of err, and the delay of a RetryAfter or Defer.
// An error without a class is ClassPlain.
func Classify(err error) (Class, time.Duration) {
	var c *classError
	if errors.As(err, &c) {
		return c.class, c.delay
	}
	return ClassPlain, 0
}

// Code returns the problem code of err, or "".
func Code(err error) string {
	var c *codeError
	if errors.As(err, &c) {
		return c.code
	}
	return ""
}

// invalid returns an ErrInvalid with its reason.
func invalid(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{ErrInvalid}, args...)...)
}
