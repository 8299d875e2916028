// Package outbox commits "tell the others" together with the business data,
// in the Postgres or SQLite an application already has, and then tells them.
//
// # What is promised
//
// A value staged in a transaction is part of that transaction: it commits or
// rolls back with it. Once committed, the newest value of its key is published
// and acknowledged, or kept and tried again for ever. Versions are unique in
// the database, and for one key they increase in the order of the commits,
// also after the key's row has been published and deleted. No transaction is
// open and no row is locked while the application's publish function runs.
// A process, or the database, may die at any instruction: nothing is lost, and
// nothing is stuck for longer than its lease plus one full pass (5 s).
//
// # What is not
//
// A value may be published more than once, and a slow publication of an old
// value may reach the sink after a newer one: the sink must keep the highest
// version it has seen of each key (package sink does so for SQL). A value that
// is replaced before it was published may never be published: [Latest] is for
// state, not for events; see [Journal] for those.
//
// # The life of a row
//
//	Stage ──► due ──claim──► leased ──publish returns nil──► deleted
//	           ▲               │
//	           │               ├─ publish fails ──► due again after the backoff
//	           │               ├─ lease lapses  ──► due again
//	           └───────────────┴─ Stage meanwhile ► due again, with the new value
//
// A [Relay] does the right-hand side. Any number of relays, in any number of
// processes, may share one database.
//
// # Messages
//
// A [Journal] keeps every message, each until it was sent or somebody decided
// over it: for events, mail, webhooks, payments. A message is put in a
// transaction and sent by the same relay. Where nobody knows whether a send
// worked (a timeout, a crash), it is sent again, asked about, or kept as
// unknown, as [SendOptions] say; it is never reported as what it may not be.
//
// This package holds the domain and the relay and imports only the standard
// library. Package sqlstore keeps the rows.
package outbox

import (
	"context"
	"database/sql"
	"time"
)

// DefaultChannel is the channel of options that name none.
const DefaultChannel = "default"

// Version orders the values of a key: of two versions of one (channel, key)
// the greater was committed later. Versions are unique in the database and
// below 2^53, so that they survive JSON and JavaScript. Zero is no version.
type Version int64

// Token is the fencing token of a lease: every claim gives a new one, and a
// call that carries an old one changes nothing. Zero is no token.
type Token int64

// Header travels with a row to the publish function: trace context, tenant,
// content type. Names and values are valid UTF-8 without NUL, names are not
// empty and do not start with "outbox-", which is reserved; all names and
// values together hold at most 8 KiB.
type Header map[string]string

// A System is one of the two kinds of channel a store keeps.
type System uint8

const (
	SystemLatest  System = 1 // latest state per key
	SystemJournal System = 2 // every message
)

// String returns "latest" or "journal".
func (s System) String() string {
	switch s {
	case SystemLatest:
		return "latest"
	case SystemJournal:
		return "journal"
	}
	return "unknown"
}

// Channel names a channel: the same name in two systems is two channels.
type Channel struct {
	System System
	Name   string
}

// A Lease is a holder's claim on one row. Until is told by the store's clock
// and is for people: a holder counts its own time, from before it asked.
type Lease struct {
	Channel, Key string
	Token        Token
	Until        time.Time
}

// Tx is the seam between this library and a transaction of any kind: whatever
// can run one query joins the caller's pgx.Tx, ent or gorm transaction to the
// outbox. Query must run the text as it is, with $1 to $n (Postgres) or ?1 to
// ?n (SQLite), and must not retry it. See [SQL] for database/sql.
type Tx interface {
	Query(ctx context.Context, query string, args ...any) (Rows, error)
}

// Rows is the part of *sql.Rows that a store reads an answer with.
type Rows interface {
	Next() bool
	Scan(dest ...any) error
	Err() error
	Close() error
}

// SQL makes a Tx of a *sql.Tx. SQL(nil) is refused by what it is given to.
func SQL(tx *sql.Tx) Tx {
	if tx == nil {
		return nil
	}
	return sqlTx{tx}
}

type sqlTx struct{ tx *sql.Tx }

// Unwrap lets a store use statements that it has prepared.
func (t sqlTx) Unwrap() *sql.Tx { return t.tx }

func (t sqlTx) Query(ctx context.Context, query string, args ...any) (Rows, error) {
	return t.tx.QueryContext(ctx, query, args...)
}
