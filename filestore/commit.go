package filestore

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// errNoTx refuses a caller's transaction.
var errNoTx = fmt.Errorf("%w: a file store has no transactions of its callers: "+
	"add with Journal.Add, and call the verbs of the Journal, not those of In", outbox.ErrTx)

// An op is one call of a store: a function of the state. It is run when its
// group is formed, on a state that is durable but for the changes of the ops
// of the group before it, and answered when they are durable too. So nobody
// is told what a crash could take back, and what was worked out from a change
// that could not be written is never told either.
type op struct {
	run   func(st *state, now time.Time) error
	reads bool // it changes nothing
	err   error
	done  chan struct{}
}

// change runs f, which may change the state, and returns its answer when that
// is durable.
func change[A any](ctx context.Context, s *Store, tx outbox.Tx, f func(*state, time.Time) (A, error)) (A, error) {
	return call(ctx, s, tx, false, f)
}

// read runs f, which changes nothing, on a durable state.
func read[A any](ctx context.Context, s *Store, tx outbox.Tx, f func(*state, time.Time) (A, error)) (A, error) {
	return call(ctx, s, tx, true, f)
}

func call[A any](ctx context.Context, s *Store, tx outbox.Tx, reads bool, f func(*state, time.Time) (A, error)) (answer A, err error) {
	if tx != nil {
		return answer, errNoTx
	}
	o := &op{reads: reads, done: make(chan struct{})}
	o.run = func(st *state, now time.Time) (err error) {
		answer, err = f(st, now)
		return err
	}
	if err := s.do(ctx, o); err != nil {
		var none A
		return none, err
	}
	return answer, nil
}

// do hands an op to whoever writes next: the caller itself once it has the
// turn, else somebody who had it before and took the op along. While one
// group is being written the next one gathers.
func (s *Store) do(ctx context.Context, o *op) error {
	if err := ctx.Err(); err != nil {
		return err
	}
	s.mu.Lock()
	s.queue = append(s.queue, o)
	s.mu.Unlock()
	select {
	case <-o.done:
	case s.turn <- struct{}{}:
		s.gather()
		s.serve(s.take())
		<-s.turn
		<-o.done
	case <-ctx.Done():
		if s.withdraw(o) {
			return ctx.Err()
		}
		<-o.done
	}
	return o.err
}

func (s *Store) take() []*op {
	s.mu.Lock()
	defer s.mu.Unlock()
	ops := s.queue
	s.queue = nil
	return ops
}

// withdraw takes an op back that nobody has taken along.
func (s *Store) withdraw(o *op) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	i := slices.Index(s.queue, o)
	if i >= 0 {
		s.queue = slices.Delete(s.queue, i, i+1)
	}
	return i >= 0
}

// serve runs a group of ops and writes what they changed, with the turn held.
func (s *Store) serve(ops []*op) {
	if len(ops) == 0 {
		return
	}
	err := s.ready()
	if err != nil {
		err = s.named(err)
		for _, o := range ops {
			o.finish(err)
		}
		return
	}
	writers := ops[:0:0]
	for _, o := range ops { // before anything is changed that is not durable
		if o.reads {
			o.finish(s.runOne(o))
		} else {
			writers = append(writers, o)
		}
	}
	errs := make([]error, len(writers))
	for i, o := range writers {
		errs[i] = s.runOne(o)
	}
	if err := s.write(); err != nil {
		for i := range errs {
			errs[i] = err
		}
	}
	s.served = len(writers)
	for i, o := range writers {
		o.finish(errs[i])
	}
}

func (o *op) finish(err error) {
	o.err = err
	close(o.done)
}

// runOne runs an op; one that fails changes nothing.
func (s *Store) runOne(o *op) error {
	before := len(s.state.undo)
	now := s.o.Clock().UTC().Truncate(time.Microsecond)
	err := o.run(s.state, instant(now.UnixMicro()))
	if err != nil {
		s.state.takeBack(before)
	}
	return err
}

// write makes the changes of a group durable, or takes them back.
func (s *Store) write() error {
	if len(s.state.undo) == 0 {
		return nil
	}
	s.buffer = s.state.appendTo(s.buffer[:0])
	now, err := s.file.replace(s.buffer, s.read)
	switch {
	case err == nil:
		s.read = now
		s.state.settled()
		return nil
	case !errors.Is(err, errLost):
		s.state.takeBack(0)
		return s.named(fmt.Errorf("write: nothing was changed, try again once the cause is gone: %w", err))
	case now == nil: // the next call reads what is there
		s.state, s.read = nil, nil
	default:
		s.read = now
		s.state.settled()
	}
	s.synced = false
	return s.named(fmt.Errorf("write: %w", unknown(err)))
}

// ready makes the state what is on the disk, and durable: of a file that a
// process wrote that died, or of whose write the end is not known, the
// directory is synced first.
func (s *Store) ready() error {
	if s.lock == nil {
		lock, err := s.file.acquire()
		if err != nil {
			return err
		}
		s.lock = lock
	}
	if !s.synced {
		if err := s.file.syncDir(); err != nil {
			return fmt.Errorf("sync the directory, nothing was changed: %w", err)
		}
		s.synced = true
	}
	if s.state != nil {
		return nil
	}
	content, info, err := s.file.load()
	if errors.Is(err, fs.ErrNotExist) {
		s.state, s.read = newState(), nil
		return nil
	}
	if err != nil {
		return fmt.Errorf("read: %w", err)
	}
	st, err := parse(content)
	if err != nil {
		return err
	}
	if s.lock.orphaned {
		st.lapse(instant(s.o.Clock().UnixMicro()))
		s.lock.orphaned = false
	}
	s.state, s.read = st, info
	return nil
}

func (s *Store) named(err error) error { return fmt.Errorf("outbox file %q: %w", s.file.path, err) }
