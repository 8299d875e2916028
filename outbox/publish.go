package outbox

import (
	"context"
	"fmt"
	"runtime/debug"
	"time"
)

// maxGrace is how long a publish function has to return once its context has
// ended; no longer than AttemptTimeout. Then the relay gives it up: its slot
// stays taken, and its entries are tried again.
const maxGrace = 5 * time.Second

const maxStack = 8 << 10 // of a panic, in the log

// publish calls user code in a goroutine of its own, so that runtime.Goexit
// harms nobody, and extends the batch's leases meanwhile.
func (b *batch) publish(n *run) ending {
	ctx, cut := context.WithCancelCause(n.work)
	defer cut(nil)
	ctx, cancel := context.WithTimeoutCause(ctx, b.c.o.AttemptTimeout,
		fmt.Errorf("%w after %s", errTimeout, b.c.o.AttemptTimeout))
	defer cancel()
	b.began, b.cut = time.Now(), cut
	done := make(chan ending, 1)
	go b.call(ctx, done)
	return b.await(n, ctx, done)
}

func (b *batch) call(ctx context.Context, done chan<- ending) {
	end := ending{err: errGoexit}
	defer func() {
		if v := recover(); v != nil {
			end.err = newPanicError(v)
		}
		if ctx.Err() != nil {
			end.cause = context.Cause(ctx)
		}
		done <- end
		if !b.state.CompareAndSwap(callRunning, callReturned) {
			b.c.returned(b)
		}
	}()
	end.err = b.job.run(ctx, b.c.r.o.Context)
}

// newPanicError keeps what a panic said. fmt survives values whose methods
// panic.
func newPanicError(v any) error {
	stack := debug.Stack()
	return &panicError{text: ErrorText(fmt.Sprintf("panic: %v", v)), stack: stack[:min(len(stack), maxStack)]}
}

// await waits for the call to end, or to be given up.
func (b *batch) await(n *run, ctx context.Context, done <-chan ending) ending {
	extend := time.NewTimer(time.Until(b.hold.next))
	defer extend.Stop()
	ended, halted := ctx.Done(), n.work.Done()
	var patience <-chan time.Time
	for {
		select {
		case end := <-done:
			return end
		case <-ended:
			ended = nil
			if n.work.Err() == nil {
				patience = time.After(min(b.c.o.AttemptTimeout, maxGrace))
			}
		case <-halted:
			halted, patience = nil, time.After(n.halt)
		case <-patience:
			if !b.c.abandon(b) {
				return <-done
			}
			return b.givenUp(ctx)
		case <-extend.C:
			if err := b.extend(n); err != nil {
				b.avoidTwice(b.rows) // it may take its time to return
				b.cut(err)
				continue // and no more extending
			}
			extend.Reset(time.Until(b.hold.next))
		}
	}
}

func (b *batch) givenUp(ctx context.Context) ending {
	b.c.r.log.Error("outbox: publish function ignores its cancelled context, its slot stays taken",
		"channel", b.c.name.Name, "entries", len(b.rows), "running", time.Since(b.began).Round(time.Millisecond))
	end := ending{cause: context.Cause(ctx), hung: true}
	b.c.r.observe(Event{Kind: EventHung, Channel: b.c.name, Rows: len(b.rows), Err: end.cause})
	return end
}
