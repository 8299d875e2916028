package outbox

import "context"

// An Attachment joins a channel to the function that publishes it; see
// [Latest.Publisher], [Journal.Sender] and [Journal.BatchSender]. It carries its store with it.
type Attachment interface {
	// attach is unexported: only this package makes attachments.
	attach() (source, error)
}

// A source is what a relay needs of a channel, whatever its system.
type source interface {
	channel() Channel
	store() RelayStore
	options() (PublishOptions, error) // checked, with defaults
	// claim leases rows of the channel.
	claim(ctx context.Context, c Claim) (Claimed, error)
	// prepare makes rows ready for one call of the user's function.
	prepare(rows []Row) job
}

// A job is one call of a user's function with the rows of a batch.
type job interface {
	// run decodes the rows and calls user code. It may panic, exit its
	// goroutine or ignore ctx: the relay calls it in a goroutine of its own.
	// restore is RelayOptions.Context, or nil.
	run(ctx context.Context, restore func(context.Context, Header) context.Context) error
	// judge ends the marking of entries and says what becomes of each row.
	judge(end ending, backoff backoffFunc) verdict
}
