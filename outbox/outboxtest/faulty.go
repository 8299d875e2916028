package outboxtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// ErrFault is the error of a [Fault] that names none.
var ErrFault = errors.New("injected fault")

// A Step is one method of a store that can fail. AnyStep stands for all.
type Step string

const (
	AnyStep     Step = ""
	StepCheck   Step = "Check"
	StepLook    Step = "Look"
	StepSettle  Step = "Settle"
	StepExtend  Step = "Extend"
	StepOutage  Step = "Outage"
	StepStats   Step = "Stats"
	StepStage   Step = "StageRows"
	StepPending Step = "PendingRow"
	StepList    Step = "ListRows"
	StepDiscard Step = "DiscardRow"
	StepClaim   Step = "ClaimRows"
)

// When says on which side of a step's effect something happens.
type When uint8

const (
	Before When = iota + 1 // the step has no effect
	After                  // the step takes effect, and its answer is lost
)

// A Fault makes calls fail.
type Fault struct {
	Step  Step  // Defaults to AnyStep
	When  When  // Defaults to Before
	Skip  int   // matching calls, from now, that work first. Defaults to 0
	Times int   // calls that then fail; negative: all. Defaults to 1
	Err   error // Defaults to ErrFault
}

// A Hook is called before and after each step, in the step's goroutine. The
// error it returns is the step's: before, instead of the step; after, instead
// of its answer. It may block, as a database out of reach does.
type Hook func(ctx context.Context, step Step, when When) error

// Faulty is a store whose calls fail as they are told: each before or after it
// took effect, so that both sides of a lost answer can be tried. Hints never
// fail. It is safe for concurrent use.
type Faulty struct {
	store outbox.RelayStore

	mu     sync.Mutex
	hook   Hook
	faults []*Fault
	calls  map[Step]int
}

var _ outbox.LatestStore = (*Faulty)(nil)

// NewFaulty returns a store that behaves as s, a LatestStore or JournalStore
// or both, until told otherwise. Steps of a system that s is no store of fail
// by outbox.ErrInvalid.
func NewFaulty(s outbox.RelayStore) *Faulty {
	return &Faulty{store: s, calls: map[Step]int{}}
}

// Inject adds faults to those that are left from before. A call fails by the
// first fault that applies; each counts the calls that it sees.
func (f *Faulty) Inject(faults ...Fault) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, fault := range faults {
		if fault.When == 0 {
			fault.When = Before
		}
		if fault.Times == 0 {
			fault.Times = 1
		}
		if fault.Err == nil {
			fault.Err = ErrFault
		}
		f.faults = append(f.faults, &fault)
	}
}

// Intercept calls h at every step, before the faults are looked at; nil ends it.
func (f *Faulty) Intercept(h Hook) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook = h
}

// Random lets calls fail at random with the probability p, half of them before
// and half after they took effect. The same seed and the same order of calls
// give the same faults. It takes the place of a hook. A nil err is ErrFault.
func (f *Faulty) Random(seed uint64, p float64, err error) {
	if err == nil {
		err = ErrFault
	}
	var mu sync.Mutex
	random := rand.New(rand.NewPCG(seed, 0))
	f.Intercept(func(_ context.Context, _ Step, when When) error {
		mu.Lock()
		defer mu.Unlock()
		// Two independent draws, whose union has the probability p.
		if threshold := p / 2; when == Before && random.Float64() < threshold ||
			when == After && random.Float64() < threshold/(1-threshold) {
			return err
		}
		return nil
	})
}

// Heal ends all faults and the hook.
func (f *Faulty) Heal() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.hook, f.faults = nil, nil
}

// Calls returns how many calls of a step, or of all steps, there were, those
// that failed included.
func (f *Faulty) Calls(step Step) int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.calls[step]
}

// fault counts a call and returns the fault that applies to it, if one does.
func (f *Faulty) fault(step Step) (Fault, Hook) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls[step]++
	f.calls[AnyStep]++
	hit := Fault{}
	for _, fault := range f.faults {
		switch {
		case fault.Step != step && fault.Step != AnyStep || fault.Times == 0:
		case fault.Skip > 0:
			fault.Skip--
		case hit.When == 0:
			hit = *fault
			fault.Times-- // a negative number never gets to 0
		}
	}
	return hit, f.hook
}

// call runs one step between its faults.
func call[A any](ctx context.Context, f *Faulty, step Step, do func() (A, error)) (A, error) {
	var none A
	fault, hook := f.fault(step)
	if hook == nil {
		hook = func(context.Context, Step, When) error { return nil }
	}
	if err := hook(ctx, step, Before); err != nil {
		return none, err
	}
	if fault.When == Before {
		return none, fault.Err
	}
	answer, err := do()
	if err != nil {
		return answer, err
	}
	if err := hook(ctx, step, After); err != nil {
		return none, err
	}
	if fault.When == After {
		return none, fault.Err
	}
	return answer, nil
}

// run is call for a step without an answer.
func run(ctx context.Context, f *Faulty, step Step, do func() error) error {
	_, err := call(ctx, f, step, func() (struct{}, error) { return struct{}{}, do() })
	return err
}

func (f *Faulty) Check(ctx context.Context) error {
	return run(ctx, f, StepCheck, func() error { return f.store.Check(ctx) })
}

func (f *Faulty) Look(ctx context.Context, channels []outbox.Channel) ([]outbox.Look, error) {
	return call(ctx, f, StepLook, func() ([]outbox.Look, error) { return f.store.Look(ctx, channels) })
}

func (f *Faulty) Settle(ctx context.Context, ch outbox.Channel, ss []outbox.Settlement) ([]outbox.Result, error) {
	return call(ctx, f, StepSettle, func() ([]outbox.Result, error) { return f.store.Settle(ctx, ch, ss) })
}

func (f *Faulty) Extend(ctx context.Context, ch outbox.Channel, rows []outbox.Row, d time.Duration) ([]outbox.Result, error) {
	return call(ctx, f, StepExtend, func() ([]outbox.Result, error) { return f.store.Extend(ctx, ch, rows, d) })
}

func (f *Faulty) Outage(ctx context.Context, ch outbox.Channel, down bool, reason string) error {
	return run(ctx, f, StepOutage, func() error { return f.store.Outage(ctx, ch, down, reason) })
}

func (f *Faulty) Stats(ctx context.Context) ([]outbox.ChannelStats, error) {
	return call(ctx, f, StepStats, func() ([]outbox.ChannelStats, error) { return f.store.Stats(ctx) })
}

// Hints passes on what the store hints at.
func (f *Faulty) Hints(h func(outbox.Hint)) (stop func()) { return f.store.Hints(h) }

// latest runs one step of a store of latest values.
func latest[A any](ctx context.Context, f *Faulty, step Step, do func(outbox.LatestStore) (A, error)) (A, error) {
	return call(ctx, f, step, func() (A, error) {
		s, ok := f.store.(outbox.LatestStore)
		if !ok {
			var none A
			return none, fmt.Errorf("%s: %w: the store keeps no latest values", step, outbox.ErrInvalid)
		}
		return do(s)
	})
}

func (f *Faulty) StageRows(ctx context.Context, tx outbox.Tx, channel string, rows []outbox.StageRow, batchDelay time.Duration) ([]outbox.Version, error) {
	return latest(ctx, f, StepStage, func(s outbox.LatestStore) ([]outbox.Version, error) {
		return s.StageRows(ctx, tx, channel, rows, batchDelay)
	})
}

func (f *Faulty) PendingRow(ctx context.Context, tx outbox.Tx, channel, key string) (outbox.Row, error) {
	return latest(ctx, f, StepPending, func(s outbox.LatestStore) (outbox.Row, error) {
		return s.PendingRow(ctx, tx, channel, key)
	})
}

func (f *Faulty) ListRows(ctx context.Context, channel, after string, limit int) ([]outbox.Row, error) {
	return latest(ctx, f, StepList, func(s outbox.LatestStore) ([]outbox.Row, error) {
		return s.ListRows(ctx, channel, after, limit)
	})
}

func (f *Faulty) DiscardRow(ctx context.Context, channel, key string, v outbox.Version) error {
	_, err := latest(ctx, f, StepDiscard, func(s outbox.LatestStore) (struct{}, error) {
		return struct{}{}, s.DiscardRow(ctx, channel, key, v)
	})
	return err
}

func (f *Faulty) ClaimRows(ctx context.Context, c outbox.Claim) (outbox.Claimed, error) {
	return latest(ctx, f, StepClaim, func(s outbox.LatestStore) (outbox.Claimed, error) { return s.ClaimRows(ctx, c) })
}
