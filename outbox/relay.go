package outbox

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"sync"
	"time"
)

// RelayOptions are those of a whole relay. The zero value works.
type RelayOptions struct {
	// PollInterval is how often a relay with nothing to do asks the store, in
	// one statement for all its channels, whether something is due: how late
	// what another process staged is found. 10 ms to 1 h. Defaults to 1 s.
	PollInterval time.Duration
	// ShutdownTimeout is how long Run lets publications finish once its
	// context has ended, before it cancels theirs. At most 24 h; a nanosecond
	// is no time at all. Defaults to 30 s.
	ShutdownTimeout time.Duration
	// Logger is told what an operator should know: no line for each entry, and
	// no payload. Use slog.DiscardHandler for silence. Defaults to slog.Default().
	Logger *slog.Logger
	// Context makes the context of a publication from the headers that all
	// entries of the batch have in common, by name and value, to go on with a
	// trace. It is not called where there are none, and must return a child of
	// ctx. Defaults to none. Batches of one (BatchSize 1) have all of theirs,
	// and so has each message of a [Journal.Sender].
	Context func(ctx context.Context, h Header) context.Context
	// Observe is told every step, for metrics. It must be safe for concurrent
	// use and must not block. Defaults to none.
	Observe func(Event)
}

// A Relay publishes what the channels of its attachments hold, and sends their messages. Any number of
// relays may work on one database. A relay runs at most four statements at a
// time, however many channels it serves, and a fifth to extend leases; each
// needs one connection, none is held while user code publishes, and a pool of
// one connection is enough. It is safe for concurrent use.
type Relay struct {
	o        RelayOptions
	store    RelayStore
	log      *slog.Logger
	channels []*channel // in the order of attachment
	gate     gate
	asked    chan struct{} // to look before the poll interval is over

	mu      sync.Mutex
	running bool // one Run, RunOnce or Flush at a time

	troubles     [opCount]trouble
	observePanic sync.Once
}

// NewRelay checks o and the attachments and returns a relay for them. It does
// no I/O and starts nothing. It refuses, as ErrInvalid, having nothing
// attached, a channel attached twice, one name attached as a Latest and as a
// Journal channel, attachments of different stores, and options out of range.
func NewRelay(o RelayOptions, as ...Attachment) (*Relay, error) {
	r, err := newRelay(o, as...)
	if err != nil {
		return nil, fmt.Errorf("outbox: open relay: %w", err)
	}
	return r, nil
}

func newRelay(o RelayOptions, as ...Attachment) (*Relay, error) {
	r := &Relay{o: o, gate: newGate(), asked: make(chan struct{}, 1)}
	err := r.setOptions()
	if err == nil && len(as) == 0 {
		err = invalid("nothing is attached")
	}
	for i, a := range as {
		if err == nil {
			err = r.attach(i, a)
		}
	}
	return r, err
}

func (r *Relay) setOptions() error {
	setDefault(&r.o.PollInterval, time.Second)
	setDefault(&r.o.ShutdownTimeout, 30*time.Second)
	if r.log = r.o.Logger; r.log == nil {
		r.log = slog.Default()
	}
	if err := checkRange("PollInterval", r.o.PollInterval, 10*time.Millisecond, time.Hour); err != nil {
		return err
	}
	return checkRange("ShutdownTimeout", r.o.ShutdownTimeout, 1, 24*time.Hour)
}

func (r *Relay) attach(i int, a Attachment) error {
	if a == nil {
		return invalid("attachment %d is nil", i+1)
	}
	src, err := a.attach()
	if err != nil {
		return fmt.Errorf("attachment %d: %w", i+1, err)
	}
	name := src.channel()
	o, err := src.options()
	if err != nil {
		return fmt.Errorf("channel %q: %w", name.Name, err)
	}
	for _, c := range r.channels {
		switch {
		case c.name == name:
			return invalid("channel %q is attached twice", name.Name)
		case c.name.Name == name.Name:
			return invalid("channel %q is attached as %s and as %s", name.Name, c.name.System, name.System)
		}
	}
	if r.store == nil {
		r.store = src.store()
	}
	if !sameStore(r.store, src.store()) {
		return invalid("channel %q is kept in another store than channel %q", name.Name, r.channels[0].name.Name)
	}
	r.channels = append(r.channels, newChannel(r, src, o))
	return nil
}

// sameStore compares stores, whose types need not be comparable.
func sameStore(a, b RelayStore) bool {
	if reflect.TypeOf(a) != reflect.TypeOf(b) {
		return false
	}
	return !reflect.TypeOf(a).Comparable() || a == b
}

// begin makes the caller the only one to run the relay, until end.
func (r *Relay) begin() (end func(), err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.running {
		return nil, fmt.Errorf("%w: the relay is running already", ErrState)
	}
	r.running = true
	return func() {
		r.mu.Lock()
		r.running = false
		r.mu.Unlock()
	}, nil
}

// Stats tells how the store's channels are, those included that nobody serves
// and those of this relay that hold nothing, in the order of system and name.
// It may be called at any time.
func (r *Relay) Stats(ctx context.Context) ([]ChannelStats, error) {
	stats, err := r.stats(ctx)
	if err != nil {
		return nil, fmt.Errorf("outbox: read stats: %w", err)
	}
	return stats, nil
}

func (r *Relay) stats(ctx context.Context) ([]ChannelStats, error) {
	leave, err := r.gate.enter(ctx)
	if err != nil {
		return nil, err
	}
	defer leave()
	stats, err := r.store.Stats(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range r.channels {
		i := slices.IndexFunc(stats, func(s ChannelStats) bool { return s.Channel == c.name })
		if i < 0 {
			i = len(stats)
			stats = append(stats, ChannelStats{Channel: c.name})
		}
		stats[i].Attached = true
		stats[i].Hung = c.hungCount()
	}
	slices.SortFunc(stats, func(a, b ChannelStats) int {
		return cmp.Or(cmp.Compare(a.Channel.System, b.Channel.System), cmp.Compare(a.Channel.Name, b.Channel.Name))
	})
	return stats, nil
}
