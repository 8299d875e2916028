package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"
)

// How a run ends once its context has: claims and looks are cut after
// claimGrace, publications at the ShutdownTimeout, and settlements after they
// had haltGrace to return and settleGrace to be settled.
const (
	claimGrace   = 2 * time.Second
	haltGrace    = time.Second
	minHaltGrace = 50 * time.Millisecond // to return at once also takes a moment
	settleGrace  = 2 * time.Second
)

// A run is one Run, RunOnce or Flush.
type run struct {
	r   *Relay
	ctx context.Context // the caller's: when it ends, claiming stops

	// These outlive ctx, and end in this order.
	reads    context.Context // of looks and claims
	work     context.Context // of publications; its cause is errShutdown
	settling context.Context // of settlements
	cancel   []func()

	alone bool          // RunOnce or Flush: every batch is settled before the next claim
	halt  time.Duration // haltGrace, less with a short ShutdownTimeout
	wg    sync.WaitGroup

	mu     sync.Mutex
	ended  bool
	timers []*time.Timer
	left   map[Channel]*leftover
}

// leftover is what a stop left behind in a channel.
type leftover struct {
	rows int
	why  error
}

func (r *Relay) newRun(ctx context.Context) *run {
	n := &run{r: r, ctx: ctx, left: map[Channel]*leftover{}}
	n.halt = min(haltGrace, max(r.o.ShutdownTimeout/4, minHaltGrace))
	outlive := func() (context.Context, context.CancelCauseFunc) {
		c, cancel := context.WithCancelCause(context.WithoutCancel(ctx))
		n.cancel = append(n.cancel, func() { cancel(nil) })
		return c, cancel
	}
	var cutReads, cutWork, cutSettling context.CancelCauseFunc
	n.reads, cutReads = outlive()
	n.work, cutWork = outlive()
	n.settling, cutSettling = outlive()
	timeout := r.o.ShutdownTimeout
	unwatch := context.AfterFunc(ctx, func() {
		n.after(min(claimGrace, timeout), func() { cutReads(errShutdown) })
		n.after(timeout, func() { cutWork(errShutdown) })
		n.after(timeout+n.halt+settleGrace, func() { cutSettling(errShutdown) })
	})
	n.cancel = append(n.cancel, func() { unwatch() })
	return n
}

func (n *run) after(d time.Duration, f func()) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ended {
		return
	}
	n.timers = append(n.timers, time.AfterFunc(d, f))
}

// end waits for the run's goroutines, all but publications that ignore their
// context, and returns what a stop left behind.
func (n *run) end() error {
	n.wg.Wait()
	for _, cancel := range n.cancel {
		cancel()
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	n.ended = true
	for _, t := range n.timers {
		t.Stop()
	}
	return n.leftBehind()
}

func (n *run) stopping() bool { return n.ctx.Err() != nil }

// leave records rows that a stopping run leaves behind.
func (n *run) leave(ch Channel, rows int, why error) {
	if !n.stopping() || rows == 0 {
		return
	}
	n.mu.Lock()
	defer n.mu.Unlock()
	l := n.left[ch]
	if l == nil {
		l = &leftover{why: why}
		n.left[ch] = l
	}
	l.rows += rows
}

// leftBehind says what a stop has left; nil: nothing.
func (n *run) leftBehind() (err error) {
	say := func(format string, args ...any) {
		part := fmt.Errorf(format, args...)
		if err == nil {
			err = part
			return
		}
		err = fmt.Errorf("%w; %w", err, part)
	}
	for _, c := range n.r.channels {
		if l := n.left[c.name]; l != nil {
			say("left %d entries of channel %q, to be published again: %w", l.rows, c.name.Name, l.why)
		}
		if hung := c.hungCount(); hung > 0 && n.stopping() && !n.alone {
			say("left %d publications of channel %q running: %w", hung, c.name.Name, errHung)
		}
	}
	return err
}

// Run publishes what is due in the attached channels until ctx ends, and
// returns when its goroutines are gone.
//
// When ctx ends, Run claims nothing more, lets publications finish without
// cancelling their contexts, settles them, gives back what was not begun, and
// returns nil. What has not finished after the ShutdownTimeout is cancelled,
// and Run's error says what was left: it will be published again. Only a
// publish function that ignores its cancelled context is still running then.
//
// Run first checks the store: tables that are missing, outdated, newer or
// foreign are ErrSchema, returned at once. A database that cannot be used for
// another reason, then or later, is waited for, and logged: it may not be
// reachable, refuse the password, or be a replica. One Run, RunOnce or Flush is allowed at a
// time, others are ErrState; after it has ended, Run may be called again.
func (r *Relay) Run(ctx context.Context) error {
	if err := r.run(ctx); err != nil {
		return fmt.Errorf("outbox: run: %w", err)
	}
	return nil
}

func (r *Relay) run(ctx context.Context) error {
	release, err := r.begin()
	if err != nil {
		return err
	}
	defer release()
	n := r.newRun(ctx)
	if err := n.check(); err != nil {
		n.end()
		return err
	}
	unhint := r.store.Hints(r.hinted)
	for _, c := range r.channels {
		c.reset()
		n.wg.Go(func() { c.loop(n) })
		if c.crew != nil && c.crew.policy.keep {
			n.wg.Go(func() { c.purge(n) })
		}
	}
	n.wg.Go(n.poll)
	r.log.Info("outbox: relay started", "channels", r.names())
	<-ctx.Done()
	unhint()
	err = n.end()
	r.log.Info("outbox: relay stopped", "channels", r.names())
	r.observe(Event{Kind: EventStop, Rows: n.leftRows(), Err: err})
	return err
}

func (r *Relay) names() string {
	names := make([]string, len(r.channels))
	for i, c := range r.channels {
		names[i] = c.name.Name
	}
	return strings.Join(names, ", ")
}

func (n *run) leftRows() (rows int) {
	for _, l := range n.left {
		rows += l.rows
	}
	return rows
}

// check waits until the store can be used, or is known not to be usable.
func (n *run) check() error {
	for failures := 1; !n.stopping(); failures++ {
		err := n.ask(n.reads, readTimeout, n.r.store.Check)
		if err == nil || errors.Is(err, ErrSchema) {
			return err
		}
		if n.stopping() {
			break
		}
		n.r.troubled(opCheck, Channel{}, err)
		sleep(n.ctx, troubleBackoff(failures))
	}
	return nil
}

// readTimeout bounds a statement that holds no leases: on a connection that is
// dead without a word, polling goes on after no more than a full pass may take.
const readTimeout = 5 * time.Second

// ask makes one call to the store, within the relay's share of connections.
func (n *run) ask(ctx context.Context, limit time.Duration, call func(context.Context) error) error {
	leave, err := n.r.gate.enter(ctx)
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return call(ctx)
}

// sleep waits for d, or until ctx ends.
func sleep(ctx context.Context, d time.Duration) {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}
