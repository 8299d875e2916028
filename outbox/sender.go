package outbox

import (
	"context"
	"fmt"
	"time"
)

// SendFunc sends one message, outside of any transaction. What it returns says
// what became of it:
//
//   - nil: it was sent, and ref is what the receiver calls it (it may be empty).
//     Once ctx has ended, nil without a ref says nothing: a function that
//     swallows the context's error must not lose messages.
//   - [ErrSettled]: the function has settled the message itself, in its own
//     transaction, with the verbs of [Journal.In].
//   - [Permanent], [RetryAfter], [Defer], [Unavailable]: it was not sent.
//   - [Unknown], a panic, runtime.Goexit, running past the AttemptTimeout, a
//     cancelled context: nobody knows, so SendOptions.Probe and OnUnknown decide.
//   - any other error: it failed and is tried again, where OnUnknown is Resend and
//     there is no Probe; nobody knows, where it is not.
//
// ctx is not cancelled by a clean stop of the relay, only when the attempt's
// time is up, the message's lease is lost, or the relay's ShutdownTimeout has
// passed. r is the function's own. It must be safe for concurrent use.
type SendFunc func(ctx context.Context, r *Record) (ref string, err error)

// ProbeFunc finds out, where nobody knows, whether a message was sent: it asks
// the receiver. It may run in place of a send, and has as long. An error, a
// panic or running out of time is VerdictUnknown. It must be safe for concurrent use.
type ProbeFunc func(ctx context.Context, r *Record) (v Verdict, ref string, err error)

// A Verdict is what is found out about a message of unknown fate.
type Verdict uint8

const (
	VerdictUnknown Verdict = iota // still not known
	VerdictSent                   // it was sent
	VerdictNotSent                // it was not: send it (again)
	VerdictDead                   // never send it: an answer of people only, see [Verbs.ResolveUnknown]
)

// String returns "unknown", "sent", "not sent" or "dead".
func (v Verdict) String() string {
	names := [...]string{"unknown", "sent", "not sent", "dead"}
	if int(v) >= len(names) {
		return "no verdict"
	}
	return names[v]
}

// A Policy decides over messages of which nobody knows whether they were sent.
type Policy uint8

const (
	Resend Policy = iota // send again: at least once
	Park                 // keep as unknown until somebody decides: at most once
)

// An Order decides over a group whose earlier message is dead or unknown.
type Order uint8

const (
	Block Order = iota // the group waits until that message is retried, resolved or discarded
	Skip               // the group goes on without it
)

const (
	DeleteOnSent time.Duration = -1 // Retention: a message that was sent is deleted at once
	NoLimit      int           = -1 // MaxAttempts: a message is tried for ever
)

// SendOptions are what only the sending process sets. The zero value works.
type SendOptions struct {
	// Workers is how many calls of the function may run at a time, 1 to 1,000.
	// Defaults to 8.
	Workers int
	// BatchSize is how many messages are claimed and settled together at most,
	// and given to one call of a BatchFunc, 1 to 10,000. Defaults to 100.
	BatchSize int
	// MaxAttempts is how often a message is tried: then it is dead, or unknown
	// where nobody knows whether the last attempt worked. At least 1, or
	// NoLimit. Defaults to 10.
	MaxAttempts int
	// AttemptTimeout is how long a call may take, 1 ms to 24 h. Defaults to 60 s.
	AttemptTimeout time.Duration
	// Lease is how long messages stay with a relay that has died, 100 ms to
	// 1 h. It is extended while they are being sent, so it may be shorter than
	// AttemptTimeout, and must leave the database time to answer three times.
	// Defaults to 15 s.
	Lease time.Duration
	// Retention is how long a sent message is kept, 1 s to 10 years, or
	// DeleteOnSent. As long as it is, its key cannot be put again, and the
	// record tells when it was sent and what the receiver calls it. Dead and
	// unknown messages are kept until somebody decides. Defaults to 24 h.
	Retention time.Duration
	// Backoff is how long a failed message waits before attempt+1, as
	// PublishOptions.Backoff.
	Backoff func(attempt int) time.Duration
	// OnUnknown decides where nobody knows whether a message was sent, and Probe
	// does not either. Defaults to Resend.
	OnUnknown Policy
	// Probe is asked first, and again before each further attempt until it
	// knows. Defaults to none.
	Probe ProbeFunc
	// Order decides over a group whose earlier message is dead or unknown.
	// Defaults to Block.
	Order Order
}

const (
	maxWorkers = 1000

	defaultMaxAttempts = 10
)

// withDefaults fills in o and checks it.
func (o SendOptions) withDefaults() (SendOptions, error) {
	setDefault(&o.Workers, 8)
	setDefault(&o.BatchSize, 100)
	setDefault(&o.MaxAttempts, defaultMaxAttempts)
	setDefault(&o.AttemptTimeout, time.Minute)
	setDefault(&o.Lease, 15*time.Second)
	setDefault(&o.Retention, 24*time.Hour)
	for _, err := range []error{
		checkCount("Workers", o.Workers, maxWorkers),
		checkCount("BatchSize", o.BatchSize, maxBatchSize),
		checkRange("AttemptTimeout", o.AttemptTimeout, time.Millisecond, 24*time.Hour),
		checkRange("Lease", o.Lease, minLease, maxLease),
	} {
		if err != nil {
			return o, err
		}
	}
	switch {
	case o.MaxAttempts < 1 && o.MaxAttempts != NoLimit:
		return o, invalid("MaxAttempts is %d, it must be at least 1, or NoLimit", o.MaxAttempts)
	case o.OnUnknown > Park:
		return o, invalid("OnUnknown is %d, it must be Resend or Park", o.OnUnknown)
	case o.Order > Skip:
		return o, invalid("Order is %d, it must be Block or Skip", o.Order)
	case o.Retention == DeleteOnSent:
		return o, nil
	}
	return o, checkRange("Retention", o.Retention, time.Second, maxRetention)
}

// Sender joins the channel to the function that sends its messages, each by
// itself; attach the result with [NewRelay], which also checks f and o.
// Messages of a group are sent one after another.
func (j *Journal) Sender(f SendFunc, o SendOptions) Attachment {
	return &sending{journal: j, one: f, o: o, missing: f == nil}
}

// BatchSender joins the channel to a function that sends many messages at once.
func (j *Journal) BatchSender(f BatchFunc, o SendOptions) Attachment {
	return &sending{journal: j, many: f, o: o, missing: f == nil}
}

// sending is the source of a Journal channel.
type sending struct {
	journal *Journal
	one     SendFunc // or
	many    BatchFunc
	missing bool // it is nil
	o       SendOptions
	timeout error // cause of a call's context that has ended
}

func (s *sending) attach() (source, error) {
	switch {
	case s.journal == nil || s.journal.store == nil:
		return nil, invalid("its Journal is not one of NewJournal")
	case s.missing:
		return nil, invalid("send function of channel %q is nil", s.journal.o.Channel)
	}
	with := *s // an attachment may be given to several relays
	return &with, nil
}

func (s *sending) channel() Channel  { return s.journal.channel() }
func (s *sending) store() RelayStore { return s.journal.store }

func (s *sending) claim(ctx context.Context, c Claim) (Claimed, error) {
	c.SkipEnded = s.o.Order == Skip
	return s.journal.store.ClaimMessages(ctx, nil, c)
}

func (s *sending) options() (PublishOptions, error) {
	o, err := s.o.withDefaults()
	s.o, s.timeout = o, fmt.Errorf("%w after %s", errTimeout, o.AttemptTimeout)
	return PublishOptions{
		BatchSize: o.BatchSize, InFlight: o.Workers, AttemptTimeout: o.AttemptTimeout, Lease: o.Lease, Backoff: o.Backoff,
	}, err
}

// prepare is not called: see dispatch.
func (s *sending) prepare([]Row) job { return nil }
