package outbox

import (
	"context"
	"time"
)

// RelayStore is what a [Relay] asks of a store, for channels of either system.
//
// A store is safe for concurrent use by any number of goroutines, and any
// number of stores, in any number of processes, may work on one database.
// Every duration is relative: only the store's clock judges what is due and
// whose lease has lapsed. No call may wait for a row that another transaction
// holds; on SQLite a call waits for the one writer, at most busy_timeout.
// A call that returns an error may or may not have taken effect, and is safe
// to repeat.
type RelayStore interface {
	// Check tells what is wrong with the schema, the settings, the grants or
	// the server, and what to do. A schema that is missing, outdated, newer
	// or foreign wraps ErrSchema.
	Check(ctx context.Context) error

	// Look tells, for each channel and in their order, when to claim next. It
	// is one cheap statement, however many channels there are.
	Look(ctx context.Context, channels []Channel) ([]Look, error)

	// Settle ends the leases of rows, all of one channel, and returns a result
	// for each in their order. It changes a row only where token and version
	// are the settlement's. A row with the settlement's token and another
	// version was staged again meanwhile: its lease ends, its new value stays
	// due, its attempts and last error are its own, and the result is
	// Superseded. The same settlement again is Done (or Superseded, where it
	// was); another outcome for a lease that has ended is Stale, with Again too.
	// A message that was settled although its group is locked by a Put is Busy:
	// settle it again, with Again, until the group is let go too.
	Settle(ctx context.Context, ch Channel, ss []Settlement) ([]Result, error)

	// Extend lets the leases of rows, all of one channel, end d from now, and
	// returns a result for each in their order: Done, Stale or Busy. Only the
	// token counts: a row staged again meanwhile stays leased. A lease that
	// lapsed and that nobody took since is extended too; one that was settled
	// is Stale, and so is that of a message whose group somebody took since.
	Extend(ctx context.Context, ch Channel, rows []Row, d time.Duration) ([]Result, error)

	// Outage records that the destination of a channel is down (down true), or
	// that a probe got through (down false). While it is down, Claim returns
	// nothing before a pause is over, then one row to one relay: the probe.
	// Pauses grow from one second to five minutes with each probe that fails;
	// reports that come in during a pause do not lengthen it. A probe whose
	// relay died is given out again after the lease of its claim; a claim that
	// finds no row takes none.
	Outage(ctx context.Context, ch Channel, down bool, reason string) error

	// Stats counts what the store holds, channel by channel, those included
	// that no relay serves. Counts stop at StatsCap.
	Stats(ctx context.Context) ([]ChannelStats, error)

	// Hints calls f, from then until stop is called, whenever something was
	// staged through this store or it was woken. f must not block.
	Hints(f func(Hint)) (stop func())
}

// LatestStore keeps the newest value per (channel, key).
type LatestStore interface {
	RelayStore

	// StageRows replaces the pending values of keys inside the caller's
	// transaction and returns their versions in the order of rows. Keys are
	// distinct, sorted and checked. One statement and one round trip for up to
	// 10,000 rows (SQLite: 1,000). A row is due delay-rounded: at the next
	// multiple of batchDelay since the Unix epoch, now where batchDelay is 0.
	// A pending value that was never claimed keeps its due time if that is
	// sooner; attempts and last error start anew; a lease in force stays.
	StageRows(ctx context.Context, tx Tx, channel string, rows []StageRow, batchDelay time.Duration) ([]Version, error)

	// PendingRow returns the row of a key as tx sees it, or as committed where
	// tx is nil. ErrNotFound where there is none.
	PendingRow(ctx context.Context, tx Tx, channel, key string) (Row, error)

	// ListRows returns up to limit rows of a channel in the order of their
	// keys, from the first key greater than after, without payloads.
	ListRows(ctx context.Context, channel, after string, limit int) ([]Row, error)

	// DiscardRow deletes the row of a key if it is still version v; else
	// ErrLeaseLost, or ErrNotFound, or ErrBusy.
	DiscardRow(ctx context.Context, channel, key string, v Version) error

	// ClaimRows leases due rows of a channel, in the order in which they came
	// due, and counts an attempt for each. A paused channel gives none.
	ClaimRows(ctx context.Context, c Claim) (Claimed, error)
}

// StageRow is one value to stage. Payload of a tombstone is empty.
type StageRow struct {
	Key     string
	Payload []byte
	Header  Header
	Deleted bool
}

// Claim asks for rows.
type Claim struct {
	Channel string
	Limit   int           // at least 1
	Lease   time.Duration // how long they are held, from now
	Full    bool          // look at every row, also below where earlier claims have left off
	// SkipEnded: a dead or unknown message does not block its group. ClaimMessages only.
	SkipEnded bool
}

// Claimed is the answer: no rows where nothing is due or the channel is paused.
type Claimed struct {
	Rows []Row
	// Probe: the channel's destination was down and this one row is to find
	// out whether it still is; tell the store with Outage.
	Probe bool
}

// Row is a row as a store returns it. Its key, with version and token, names
// it in Settle and Extend.
type Row struct {
	ID         int64 // where the store last saw the row, for a quicker way to it; 0: anywhere
	Key        string
	Version    Version
	Token      Token
	Attempt    int    // claims of this version, this one included
	Payload    []byte // never nil, save from ListRows; empty where nil was staged
	Header     Header // nil where none was staged
	Deleted    bool
	StagedAt   time.Time // UTC, microseconds
	Due        time.Time
	LeaseUntil time.Time // zero: not leased
	LastError  string
	Broken     error // why the stored row cannot be read, its headers say; such a row is never published

	// Of messages only. StagedAt is when they were put.
	Group       string
	State       State
	Ambiguous   bool      // perhaps sent: a lease of it has lapsed, or a settlement said so
	Alone       bool      // claimed alone, because two leases or more lapsed in a row
	CompletedAt time.Time // when it became sent, dead or unknown; zero: it is open
	Ref         string    // of the send that worked
	Code        string    // of the last error
}

// An Outcome is what a settlement makes of a row.
type Outcome uint8

const (
	OutcomeDone    Outcome = iota + 1 // published: the row goes (a message with Keep becomes sent)
	OutcomeRetry                      // due again in Delay, with Error kept as the row's last
	OutcomeRelease                    // the same, and the attempt is given back
	OutcomeDead                       // messages only: ended, with Error
	OutcomeUnknown                    // messages only: ended, nobody knows how
)

// Settlement ends one lease.
type Settlement struct {
	Row     Row // ID, Version and Token count
	Outcome Outcome
	Delay   time.Duration // 0 or more
	Error   string        // valid UTF-8 without NUL, at most MaxErrorText bytes
	// Of messages: a Ref of a done one, a Code beside an Error, and whether a
	// done one is kept, as sent, rather than deleted.
	Ref, Code string
	Keep      bool
	// Doubt: what a retried or released message is to be known for.
	Doubt Doubt
	// Again: an earlier Settle with this settlement may have taken effect
	// although it returned an error, so a row that is gone counts as Done.
	Again bool
}

// Doubt says whether nobody knows how an attempt of a message ended. Where a
// message is retried or released, its next claim is Ambiguous accordingly.
type Doubt uint8

const (
	DoubtKept    Doubt = iota // this attempt tells nothing about those before
	DoubtRaised               // nobody knows how this attempt ended
	DoubtCleared              // no attempt up to now was sent
)

// A Result says what became of one settlement or extension.
type Result uint8

const (
	ResultDone       Result = iota + 1
	ResultSuperseded        // done, and a newer version of the key is due
	ResultStale             // ErrLeaseLost: the row has another token, or is gone
	ResultBusy              // ErrBusy: a transaction holds the row; nothing changed
)

// Look says when to claim from a channel.
type Look struct {
	Wait   time.Duration // 0: rows are due now; negative: nothing waits
	Paused time.Duration // how much longer the channel is paused; 0: it is not
	Outage bool          // its destination is down: the next claim is a probe
}

// A Hint says that something was staged, by a transaction that may not have
// committed yet and may never. Version is one of those staged; zero: look at
// once, at every channel.
type Hint struct {
	Channel Channel
	Version Version
	Wait    time.Duration // until it is due at the earliest; 0: it is due now
}

const (
	// StatsCap is where Stats stops counting.
	StatsCap = 10_000
	// MaxErrorText bounds a row's last error, in bytes.
	MaxErrorText = 1024
)

// ChannelStats tells how a channel is. Counts stop at StatsCap: a count of
// StatsCap means that many or more.
type ChannelStats struct {
	Channel   Channel
	Attached  bool          // this relay serves it
	Due       int           // could be claimed now
	Scheduled int           // due later: a backoff or BatchDelay
	InFlight  int           // leased
	Blocked   int           // groups of messages behind a dead or unknown one
	Dead      int           // messages that ended so, until they are retried, discarded or purged
	Unknown   int           // likewise
	OldestDue time.Duration // how long the longest-waiting due row has been due; 0: none is
	Attempt   int           // the highest, of a bounded sample of rows
	LastError string        // of the row with that attempt
	Hung      int           // publications of this relay that ignore their cancelled context
	Paused    time.Duration // how much longer it is paused; 0: it is not
	Outage    bool          // its destination is down; not shown while an operator's pause lasts
	Reason    string        // why it is paused
}
