package outbox

import (
	"context"
	"time"
)

// JournalStore keeps every message of (channel, key). RelayStore's calls serve
// its channels too, those of [SystemJournal]. Where a call takes a Tx, nil
// means a transaction of the store's own, durable when the call returns.
//
// A message's Row.Version is its number: unique in the database, the same for
// the message's whole life, and within a group in the order of the commits of
// their Puts. A group has a row of its own that Put locks until its
// transaction ends, and that a relay leases with the group's messages, under
// the same token: so at most one run of a group is out at any time. Whoever
// settles the last leased message of a run lets the group go; it is due again
// when its first open message is.
type JournalStore interface {
	RelayStore

	// PutRows writes the messages whose keys are new in the channel and
	// answers for each in the order of rows: created, or exists and unchanged.
	// Keys are distinct and checked. Locks are taken in one global order:
	// groups sorted, then keys sorted; messages of a group are numbered in the
	// order of rows. With begin over 0, what is created is already leased for
	// that long, attempt 1; a grouped message that is not the first open one
	// of its group, or whose group is leased or blocked by a dead or unknown
	// one, is then refused by ErrBlocked before anything is written.
	// A statement and a round trip for up to 10,000 rows (SQLite: 1,000), two
	// for a single row that exists.
	PutRows(ctx context.Context, tx Tx, channel string, rows []PutRow, begin time.Duration) ([]PutAnswer, error)

	// ClaimMessages leases due messages of a channel, oldest due first, and
	// counts an attempt for each: ungrouped messages, and runs of groups. A run
	// is the group's first open messages in their order, as far as they are due
	// and unlocked; its last is followed in the answer by no other group's.
	// A group whose earlier message is dead or unknown is blocked, unless
	// SkipEnded. A message whose lease has lapsed comes back Ambiguous. One
	// that lapsed twice or more is claimed alone, the only row of its claim; a
	// lapse before that gives the attempt back, since another message of the
	// batch may be what killed the holder. A paused channel gives none.
	ClaimMessages(ctx context.Context, tx Tx, c Claim) (Claimed, error)

	// BeginMessage leases a pending or failed message, due or not, and counts
	// an attempt. ErrState in any other state, ErrNotFound, ErrBusy where a
	// transaction holds it, ErrBlocked where it is not the first open one of
	// its group, or the group is leased or blocked.
	BeginMessage(ctx context.Context, tx Tx, channel, key string, lease time.Duration) (Row, error)

	// SettleMessages is Settle inside a caller's transaction: ErrTx where tx is
	// nil. Only Key and Token of the rows count, Version may be 0.
	SettleMessages(ctx context.Context, tx Tx, channel string, ss []Settlement) ([]Result, error)

	// ExtendMessages is Extend inside a caller's transaction, likewise.
	ExtendMessages(ctx context.Context, tx Tx, channel string, rows []Row, d time.Duration) ([]Result, error)

	// ListMessages returns messages in the order of their numbers, without
	// payloads unless asked.
	ListMessages(ctx context.Context, tx Tx, channel string, l MessageList) ([]Row, error)

	// AmendMessages does what an operator asked, to at most Limit messages that
	// match and are in a state that allows it, in the order of their numbers,
	// and tells where to go on. Locked messages are skipped.
	AmendMessages(ctx context.Context, tx Tx, channel string, a Amendment) (Amended, error)

	// PurgeMessages deletes at most Limit messages that ended before a time,
	// those that ended first, and returns how many. Locked ones are skipped.
	PurgeMessages(ctx context.Context, channel string, p Purge) (int, error)
}

// PutRow is one message to put.
type PutRow struct {
	Key     string
	Group   string // "": not ordered
	Payload []byte
	Header  Header
	Delay   time.Duration // until it is due
}

// PutAnswer says what became of a PutRow. The row of one that was created
// comes without its payload and headers, that of one that existed complete.
type PutAnswer struct {
	Row     Row
	Created bool
	Differs bool // it existed, with another payload or group
}

// MessageFilter selects messages; zero fields do not narrow.
type MessageFilter struct {
	Key    string
	Group  string
	States []State
	Code   string // of the last error
}

// MessageList asks for a page of messages.
type MessageList struct {
	MessageFilter
	After    Version // from the first message with a greater number
	Limit    int     // at least 1
	Payloads bool
}

// An Action is what an operator can do to messages.
type Action uint8

const (
	ActionRetry   Action = iota + 1 // failed, dead, unknown → pending, due now, attempts anew
	ActionDiscard                   // any state → gone
	ActionSent                      // unknown → sent, with Ref
	ActionDead                      // unknown → dead
	ActionPending                   // unknown → pending, due now; attempts stand
)

// Amendment is what AmendMessages does.
type Amendment struct {
	Action Action
	MessageFilter
	After  Version
	Limit  int // at least 1
	Ref    string
	DryRun bool // only count
}

// Amended is its answer.
type Amended struct {
	Count int
	Last  Version // of the last message looked at; 0: there is no more
}

// Purge asks for messages that ended, in one of States, before Before, or
// longer ago than Age by the store's clock where Before is zero.
type Purge struct {
	States []State // some of StateSent, StateDead, StateUnknown
	Before time.Time
	Age    time.Duration
	Limit  int
	DryRun bool
}
