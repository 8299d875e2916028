package outbox

import (
	"context"
	"fmt"
	"maps"
	"time"
)

// PublishFunc publishes a batch outside of any transaction. Returning nil
// acknowledges every entry that is not marked with Retry or Fail; an error, a
// panic, runtime.Goexit or running past the AttemptTimeout publishes the
// unmarked ones again. Once ctx has ended, nil acknowledges nothing: a
// function that swallows the context's error must not lose entries.
//
// ctx is not cancelled by a clean stop of the relay, only when the attempt's
// time is up, the leases are lost, or the relay's ShutdownTimeout has passed.
// A batch may be published more than once, also by two relays at a time where
// a function goes on after its ctx has ended: the sink keeps the highest
// version of each key. Entries of a batch have distinct keys and come in the
// order in which they fell due.
type PublishFunc[T any] func(ctx context.Context, batch []*Entry[T]) error

// PublishOptions are what only the relaying process sets. The zero value works.
type PublishOptions struct {
	// BatchSize is how many entries one call is given at most, 1 to 10,000.
	// Defaults to 50.
	BatchSize int
	// InFlight is how many calls may run at a time, 1 to 64. Defaults to 2: one
	// batch is claimed and settled while another is published.
	InFlight int
	// AttemptTimeout is how long a call may take, 1 ms to 24 h. Defaults to 60 s.
	AttemptTimeout time.Duration
	// Lease is how long entries stay with a relay that has died, 100 ms to 1 h.
	// It is extended while a call runs, so it may be shorter than
	// AttemptTimeout, and must leave the database time to answer three times.
	// Defaults to 15 s.
	Lease time.Duration
	// Backoff is how long a failed entry waits before attempt+1; attempt is 1
	// or more. Results below 1 ms count as 1 ms, above 24 h as 24 h; a panic
	// counts as no Backoff given. It must be safe for concurrent use. Defaults
	// to one second, doubled with each attempt, at most 5 minutes, jittered
	// down by up to a half.
	Backoff func(attempt int) time.Duration
}

const (
	maxBatchSize = 10_000
	maxInFlight  = 64
)

// withDefaults fills in o and checks it.
func (o PublishOptions) withDefaults() (PublishOptions, error) {
	setDefault(&o.BatchSize, 50)
	setDefault(&o.InFlight, 2)
	setDefault(&o.AttemptTimeout, time.Minute)
	setDefault(&o.Lease, 15*time.Second)
	for _, err := range []error{
		checkCount("BatchSize", o.BatchSize, maxBatchSize),
		checkCount("InFlight", o.InFlight, maxInFlight),
		checkRange("AttemptTimeout", o.AttemptTimeout, time.Millisecond, 24*time.Hour),
		checkRange("Lease", o.Lease, minLease, maxLease),
	} {
		if err != nil {
			return o, err
		}
	}
	return o, nil
}

func setDefault[T comparable](p *T, value T) {
	var zero T
	if *p == zero {
		*p = value
	}
}

// Publisher joins the channel to the function that publishes it; attach the
// result with [NewRelay], which also checks f and o.
func (l *Latest[T]) Publisher(f PublishFunc[T], o PublishOptions) Attachment {
	return &publisher[T]{latest: l, publish: f, o: o}
}

type publisher[T any] struct {
	latest  *Latest[T]
	publish PublishFunc[T]
	o       PublishOptions
}

func (p *publisher[T]) attach() (source, error) {
	switch {
	case p.latest == nil || p.latest.store == nil:
		return nil, invalid("its Latest is not one of NewLatest")
	case p.publish == nil:
		return nil, invalid("publish function of channel %q is nil", p.latest.o.Channel)
	}
	return p, nil
}

func (p *publisher[T]) channel() Channel  { return Channel{SystemLatest, p.latest.o.Channel} }
func (p *publisher[T]) store() RelayStore { return p.latest.store }

func (p *publisher[T]) options() (PublishOptions, error) { return p.o.withDefaults() }

func (p *publisher[T]) claim(ctx context.Context, c Claim) (Claimed, error) {
	return p.latest.store.ClaimRows(ctx, c)
}

func (p *publisher[T]) prepare(rows []Row) job {
	return &publication[T]{p: p, rows: rows, marks: marks{n: len(rows)}}
}

// A publication is a job of a Latest channel.
type publication[T any] struct {
	p     *publisher[T]
	rows  []Row
	marks marks
}

func (j *publication[T]) run(ctx context.Context, restore func(context.Context, Header) context.Context) error {
	batch := j.entries()
	if len(batch) == 0 {
		return nil
	}
	if restore != nil {
		if h := shared(batch); len(h) > 0 {
			if restored := restore(ctx, h); restored != nil {
				ctx = restored
			}
		}
	}
	return j.p.publish(ctx, batch)
}

// entries decodes the rows. A row that cannot be read is marked and left out:
// it must not keep the others from being published.
func (j *publication[T]) entries() []*Entry[T] {
	entries := make([]Entry[T], len(j.rows)) // one allocation for all
	batch := make([]*Entry[T], 0, len(j.rows))
	for i, row := range j.rows {
		e := &entries[i]
		*e = entryOf[T](row)
		e.marks, e.index = &j.marks, i
		if err := j.p.latest.decode(row, e); err != nil {
			j.marks.set(i, mark{kind: markBroken, err: err})
			continue
		}
		batch = append(batch, e)
	}
	return batch
}

func (j *publication[T]) judge(end ending, backoff backoffFunc) verdict {
	return judge(j.rows, j.marks.seal(), end, backoff)
}

// shared returns the headers that all entries of a batch have, by name and
// value.
func shared[T any](batch []*Entry[T]) Header {
	h := batch[0].Header
	if len(h) == 0 || len(batch) == 1 {
		return h
	}
	h = maps.Clone(h)
	for _, e := range batch[1:] {
		keepShared(h, e.Header)
		if len(h) == 0 {
			break
		}
	}
	return h
}

// keepShared takes out of h what other does not have.
func keepShared(h, other Header) {
	for name, value := range h {
		if v, ok := other[name]; !ok || v != value {
			delete(h, name)
		}
	}
}

func entryOf[T any](r Row) Entry[T] {
	return Entry[T]{
		Key: r.Key, Version: r.Version, Deleted: r.Deleted, Header: r.Header,
		Attempt: r.Attempt, StagedAt: r.StagedAt, LastError: r.LastError,
	}
}

// decode sets the value of e. A codec that panics has failed: one value must
// not take the relay down.
func (l *Latest[T]) decode(r Row, e *Entry[T]) (err error) {
	if r.Broken != nil {
		return fmt.Errorf("read stored row: %w", r.Broken)
	}
	if r.Deleted {
		return nil
	}
	defer func() {
		if v := recover(); v != nil {
			err = fmt.Errorf("decode value: codec panicked with %T", v)
		}
	}()
	v, err := l.o.Codec.Decode(r.Header, r.Payload)
	if err != nil {
		return fmt.Errorf("decode value: %w", err)
	}
	e.Value = v
	return nil
}
