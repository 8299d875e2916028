package outbox

import (
	"errors"
	"fmt"
	"time"
)

var (
	errFailNil  = errors.New("marked as failed without a reason")
	errMarked   = errors.New("marked to be tried again")
	errGoexit   = errors.New("publish function exited its goroutine")
	errTimeout  = errors.New("attempt timed out")
	errShutdown = errors.New("relay is stopping and its shutdown timeout has passed")
	errHung     = errors.New("publish function ignores its cancelled context")

	errSendExit = errors.New("send function exited its goroutine")
	errSendHung = errors.New("send function ignores its cancelled context")
)

// panicError is a panic of user code. The panic's value is not unwrapped: it
// was not returned, so its class says nothing about the batch.
type panicError struct {
	text  string
	stack []byte
}

func (e *panicError) Error() string { return e.text }

// An ending is how a call of user code ended.
type ending struct {
	err   error // of the function; a panicError or errGoexit if it did not return
	cause error // why its context had ended before; nil: it had not
	hung  bool  // it has not returned
	sends bool  // it is a call of a send function or a Probe
}

// ours reports whether the relay itself cut the call short, so that its error
// tells nothing about the destination.
func (e ending) ours() bool {
	return errors.Is(e.cause, errShutdown) || errors.Is(e.cause, ErrLeaseLost)
}

// reason is why unmarked rows are not acknowledged; nil: they are.
func (e ending) reason() error {
	switch {
	case e.hung && e.sends:
		return fmt.Errorf("%w: %w", errSendHung, e.cause)
	case e.hung:
		return fmt.Errorf("%w: %w", errHung, e.cause)
	case e.cause != nil && e.err != nil:
		return fmt.Errorf("%w: %w", e.cause, e.err)
	case e.cause != nil:
		return e.cause
	}
	return e.err
}

// A verdict says what becomes of the rows of a batch.
type verdict struct {
	ss       []Settlement // one for each row
	done     int          // acknowledged
	failed   int          // to be tried again
	released int          // given back, the attempt not counted
	broken   int          // cannot be read; not among failed
	dead     int          // messages that ended so
	parked   int          // messages that nobody knows the fate of, likewise
	settled  int          // messages that their send has settled itself; not among ss
	fresh    bool         // a row failed at its first attempt
	answered bool         // a row got through, or was refused for good
	mute     bool         // nothing was called
	down     error        // the destination is down, and why
	hasty    bool         // a row that was deferred is due again at once
	unknown  bool         // a failure that does not tell whether the destination answered
	cause    error        // of the first row that failed
	unread   error        // of the first row that is broken
	soonest  time.Duration
}

// missed is how many rows were neither done nor given back.
func (v *verdict) missed() int { return v.failed + v.dead + v.parked }

// A fault is an error made ready to settle rows with.
type fault struct {
	class Class
	delay time.Duration
	text  string
	err   error
	rush  bool // again at once: the relay cut the call short
}

// judge decides over rows by their marks (nil: none is marked) and by how the
// call ended.
func judge(rows []Row, ms []mark, end ending, backoff backoffFunc) verdict {
	v := verdict{ss: make([]Settlement, len(rows))}
	var whole *fault // of the unmarked rows
	if reason := end.reason(); reason != nil {
		whole = wholeFault(reason, end)
		if whole.class == ClassUnavailable {
			v.down = whole.err
		}
	}
	for i := range rows {
		var m mark
		if ms != nil {
			m = ms[i]
		}
		s := &v.ss[i]
		s.Row = rows[i]
		switch {
		case m.kind == markBroken:
			v.breaks(s, m.err)
		case m.kind == markFail:
			v.fails(s, newFault(m.err, end), backoff)
		case m.kind == markRetry:
			v.fails(s, retryFault(m.delay, end), backoff)
		case whole != nil:
			v.fails(s, whole, backoff)
		default:
			s.Outcome, v.answered = OutcomeDone, true
			v.done++
		}
	}
	return v
}

func newFault(err error, end ending) *fault {
	f := &fault{err: err, text: errorText(err)}
	f.class, f.delay = classify(err)
	if end.ours() && f.class == ClassUnavailable {
		f.class = ClassPlain
	}
	return f
}

// wholeFault is that of the unmarked rows.
func wholeFault(reason error, end ending) *fault {
	f := newFault(reason, end)
	f.rush = errors.Is(end.cause, errShutdown) && !end.hung
	if f.class == ClassPlain && (end.cause != nil || isAbrupt(end.err)) {
		f.class = ClassUnknown
	}
	return f
}

// retryFault is that of a row marked with Retry: the function's error, where
// there is one, tells why.
func retryFault(delay time.Duration, end ending) *fault {
	err := end.reason()
	if err == nil {
		err = errMarked
	}
	return &fault{class: ClassRetryAfter, delay: delay, err: err, text: errorText(err)}
}

func isAbrupt(err error) bool {
	_, panicked := err.(*panicError)
	return panicked || err == errGoexit || err == errSendExit
}

func (v *verdict) breaks(s *Settlement, err error) {
	s.Outcome, s.Delay, s.Error = OutcomeRetry, slowestBackoff(), errorText(err)
	v.broken++
	if v.unread == nil {
		v.unread = err
	}
}

func (v *verdict) fails(s *Settlement, f *fault, backoff backoffFunc) {
	s.Error = f.text
	if v.cause == nil {
		v.cause = f.err
	}
	switch f.class {
	case ClassUnavailable:
		s.Outcome = OutcomeRelease
		if v.down == nil {
			v.down = f.err
		}
	case ClassDefer:
		s.Outcome, s.Delay = OutcomeRelease, deferred(f.delay)
		v.hasty = v.hasty || f.delay < backoffBase
	default:
		s.Outcome, s.Delay = OutcomeRetry, f.wait(s.Row.Attempt, backoff)
		v.unknown = v.unknown || f.class == ClassUnknown
		v.answered = v.answered || f.class == ClassPermanent
		v.fresh = v.fresh || s.Row.Attempt <= 1
	}
	if s.Outcome == OutcomeRelease {
		v.released++
		return
	}
	v.failed++
	if v.failed == 1 || s.Delay < v.soonest {
		v.soonest = s.Delay
	}
}

// wait is how long a row is not due.
func (f *fault) wait(attempt int, backoff backoffFunc) time.Duration {
	switch {
	case f.rush:
		return 0
	case f.class == ClassPermanent:
		return slowestBackoff()
	case f.delay > 0:
		return min(f.delay, maxDelay)
	}
	return backoff(attempt)
}

// classify is Classify for an error of user code, whose methods may panic.
func classify(err error) (class Class, delay time.Duration) {
	defer func() {
		if recover() != nil {
			class, delay = ClassPlain, 0
		}
	}()
	return Classify(err)
}

// errorText is the text of an error of user code, as a store can keep it. fmt
// survives errors whose methods panic.
func errorText(err error) string { return ErrorText(fmt.Sprint(err)) }
