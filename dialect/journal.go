package dialect

import (
	"context"
	"database/sql"
	"errors"
)

// Runner runs one statement and scans each row of its answer: in a transaction
// of the store's own, see [Dialect.Own], or in a caller's. Postgres needs one
// statement for each call of this file; SQLite runs as many as it likes, since
// it is the only writer meanwhile.
type Runner func(ctx context.Context, st Statement, scan func(Scanner) error) error

// Scanner is the part of *sql.Rows that a scan needs.
type Scanner interface{ Scan(dest ...any) error }

// MessageColumns are the columns of a message, in the order in which they are
// scanned; at, the place of the row, is computed.
//
//	at, key, seq, token, attempt, payload, headers, created_at, due, lease_until,
//	last_error, grp, outcome, completed_at, ref, code, lapses
//
// outcome is 0 while the message is open, 1 sent, 4 dead, 5 unknown.
const MessageColumnCount = 17

// Outcomes of messages, numbered as package outbox does.
const (
	OutcomeDead    = 4
	OutcomeUnknown = 5
)

// Results of BeginMessage besides those of Settle.
const (
	ResultState   = 6 // it is in another state
	ResultBlocked = 7 // by its group
)

// PutMessages writes new messages: slices of one length, keys distinct, groups
// "" where there is no order.
type PutMessages struct {
	Channel  string
	Keys     []string
	Groups   []string
	Payloads [][]byte // none nil
	Headers  []string // JSON, or empty
	Delays   []int64  // microseconds
	Begin    int64    // microseconds to lease what is created; 0: not at all
}

// ErrBlocked is why PutMessages refused to begin a message: because of its
// group. No message was written.
var ErrBlocked = errors.New("blocked by its group")

// PutMessage is what became of one. What existed is in Row, as scanned by the
// caller; what was created has these.
type PutMessage struct {
	Created, Differs           bool
	At, Seq, Token             int64
	CreatedAt, Due, LeaseUntil int64
}

// ClaimMessages is what [Dialect.ClaimMessages] asks for.
type ClaimMessages struct {
	Channel   string
	Limit     int
	Lease     int64
	From      int64 // lower bound of due
	Full      bool  // From is the least there is: a full pass
	SkipEnded bool
	// FromGroup is the lower bound of the groups' due times, and Reached, if not nil, is told the
	// last of the groups that were leased. SQLite needs neither.
	FromGroup int64
	Reached   *int64
}

// SettleMessages ends leases of one channel: slices of one length. Groups (""
// also where not known) is nil where none has one, and all but Places (0:
// anywhere), Keys and Tokens where all are OutcomeDone without a ref. Keep is
// one for all done ones: a caller that has both makes two calls.
type SettleMessages struct {
	Channel      string
	Places       []Place
	Keys, Groups []string
	Tokens       []int64
	Outcomes     []int16
	Delays       []int64
	Errors       []string
	Refs, Codes  []string
	Doubts       []int16 // outbox.Doubt's numbers; nil: all 0
	Again        []bool  // nil: none
	Keep         bool
}

// ExtendMessages is what [Dialect.ExtendMessages] lets run on.
type ExtendMessages struct {
	Channel string
	Keys    []string
	Tokens  []int64
	Lease   int64 // microseconds from now
}

// MessageFilter selects messages; zero fields do not narrow. States are
// outbox.State's numbers: 1 pending, 2 failed, 3 sending, 4 sent, 5 dead, 6 unknown.
type MessageFilter struct {
	Channel, Key, Group string
	States              []int16
	Code                string
	After               int64
	Limit               int
}

// Amend is what [Dialect.AmendMessages] does; Action is outbox.Action's number:
// 1 retry, 2 discard, 3 sent, 4 dead, 5 pending.
type Amend struct {
	MessageFilter
	Action int16
	Ref    string
	DryRun bool
}

// PurgeMessages deletes what ended before Before, or Age ago where it is 0.
type PurgeMessages struct {
	Channel  string
	Outcomes []int16
	Before   int64
	Age      int64
	Limit    int
	DryRun   bool
}

// journal is what the file named for a database provides for messages.
type journal interface {
	// put answers for each message in order; existing(i) is told of a row of MessageColumns that exists.
	put(ctx context.Context, run Runner, d Dialect, p PutMessages, at now, existing func(i int, row Scanner) error) ([]PutMessage, error)
	// claimMessages scans MessageColumns and whether the row is a probe.
	claimMessages(ctx context.Context, run Runner, d Dialect, c ClaimMessages, at now, scan func(Scanner) error) error
	beginMessage(ctx context.Context, run Runner, d Dialect, channel, key string, lease int64, at now, scan func(Scanner) error) (result int16, err error)
	settleMessages(ctx context.Context, run Runner, d Dialect, s SettleMessages, at now) ([]int16, error)
	extendMessages(ctx context.Context, run Runner, d Dialect, e ExtendMessages, at now) ([]int16, error)
	listMessages(ctx context.Context, run Runner, d Dialect, f MessageFilter, payloads bool, at now, scan func(Scanner) error) error
	amendMessages(ctx context.Context, run Runner, d Dialect, a Amend, at now) (count int64, last int64, err error)
	purgeMessages(ctx context.Context, run Runner, d Dialect, p PurgeMessages, at now) (int64, error)
	// own runs f in a transaction of its own, and perhaps twice, as write does.
	own(ctx context.Context, db *sql.DB, f func(Runner) error) error
}

// Own runs f in a transaction of its own, and perhaps twice: f forgets what it
// has read before.
func (d Dialect) Own(ctx context.Context, db *sql.DB, f func(Runner) error) error {
	return d.engine.own(ctx, db, f)
}

// PutMessages writes the messages whose keys are new and answers for each, in
// their order; existing is told of the rows of the others, as of
// MessageColumnCount columns, perhaps twice. A refusal to begin is ErrBlocked.
func (d Dialect) PutMessages(ctx context.Context, run Runner, p PutMessages, at any, existing func(i int, row Scanner) error) ([]PutMessage, error) {
	return d.engine.put(ctx, run, d, p, at, existing)
}

// ClaimMessages leases due messages and scans them and whether the row is a
// probe, in no order.
func (d Dialect) ClaimMessages(ctx context.Context, run Runner, c ClaimMessages, at any, scan func(Scanner) error) error {
	return d.engine.claimMessages(ctx, run, d, c, at, scan)
}

// BeginMessage leases one message and scans it where the result is ResultDone.
func (d Dialect) BeginMessage(ctx context.Context, run Runner, channel, key string, lease int64, at any, scan func(Scanner) error) (int16, error) {
	return d.engine.beginMessage(ctx, run, d, channel, key, lease, at, scan)
}

// SettleMessages ends leases and returns a result for each.
func (d Dialect) SettleMessages(ctx context.Context, run Runner, s SettleMessages, at any) ([]int16, error) {
	return d.engine.settleMessages(ctx, run, d, s, at)
}

// ExtendMessages lets leases run on and returns a result for each.
func (d Dialect) ExtendMessages(ctx context.Context, run Runner, e ExtendMessages, at any) ([]int16, error) {
	return d.engine.extendMessages(ctx, run, d, e, at)
}

// ListMessages reads messages in the order of their numbers.
func (d Dialect) ListMessages(ctx context.Context, run Runner, f MessageFilter, payloads bool, at any, scan func(Scanner) error) error {
	return d.engine.listMessages(ctx, run, d, f, payloads, at, scan)
}

// AmendMessages changes messages and returns how many, and the number of the
// last one looked at, 0 where there is no more.
func (d Dialect) AmendMessages(ctx context.Context, run Runner, a Amend, at any) (count, last int64, err error) {
	return d.engine.amendMessages(ctx, run, d, a, at)
}

// PurgeMessages deletes ended messages and returns how many.
func (d Dialect) PurgeMessages(ctx context.Context, run Runner, p PurgeMessages, at any) (int64, error) {
	return d.engine.purgeMessages(ctx, run, d, p, at)
}
