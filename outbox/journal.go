package outbox

import (
	"context"
	"fmt"
)

// JournalOptions are what the putting and the sending process must agree on.
// The zero value works.
type JournalOptions struct {
	// Channel partitions everything: the same key in two channels is two keys.
	// 1 to 128 bytes of valid UTF-8 without NUL. Defaults to DefaultChannel.
	Channel string
	// MaxPayload bounds a payload, in bytes. Defaults to 1 MiB.
	MaxPayload int
	// Headers adds to the headers of each message, from the context given to
	// Put: a trace, a tenant. h holds the message's own. Defaults to none.
	Headers func(ctx context.Context, h Header)
}

// Journal keeps every message of one channel: once put, a message is sent, or
// kept until somebody decides over it.
//
//	Put ──► pending ──claim──► sending ──sent─────────────────► sent
//	           ▲                 │
//	         failed ◄────────────┼─ failed: again by the backoff
//	                             ├─ refused, or out of attempts ─► dead
//	                             ├─ nobody knows, and Park ──────► unknown
//	                             └─ its holder died: claimed again, as Ambiguous
//
// A message may be sent more than once where nobody knows whether it was sent
// and the policy is [Resend]: let the receiver recognise its key. It is never
// reported as sent, or as failed, where that is not known.
//
// The verbs called on a Journal work alone, each durable when it returns;
// those of [Journal.In] are part of the caller's transaction. A Journal is
// safe for concurrent use.
type Journal struct {
	store JournalStore
	o     JournalOptions
	Verbs
}

// NewJournal checks o and returns a Journal over s. It does no I/O. Errors are
// ErrInvalid.
func NewJournal(s JournalStore, o JournalOptions) (*Journal, error) {
	setDefault(&o.Channel, DefaultChannel)
	setDefault(&o.MaxPayload, defaultMaxPayload)
	err := ValidChannel(o.Channel)
	switch {
	case s == nil:
		err = invalid("store is nil")
	case o.MaxPayload < 0:
		err = invalid("MaxPayload is %d", o.MaxPayload)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: open journal: %w", err)
	}
	j := &Journal{store: s, o: o}
	j.Verbs = Verbs{j: j}
	return j, nil
}

// In returns the verbs inside the caller's transaction: what they do commits
// or rolls back with it. The verbs of a nil tx answer ErrTx.
func (j *Journal) In(tx Tx) Verbs { return Verbs{j: j, tx: tx, inside: true} }

// channel is the journal's, for the calls of a RelayStore.
func (j *Journal) channel() Channel { return Channel{SystemJournal, j.o.Channel} }

// name names a message in an error.
func (j *Journal) name(key string) string { return nameOf(key, j.o.Channel) }

// nameOf names a key in an error. One that was refused may be of any length
// and content, so only its beginning is shown.
func nameOf(key, channel string) string {
	if len(key) > maxKeyBytes {
		key = key[:64] + "..."
	}
	return fmt.Sprintf("key %q of channel %q", key, channel)
}
