package outbox

import (
	"bytes"
	"time"
)

// A State is where a message stands.
type State uint8

const (
	StatePending State = iota + 1 // waits; no attempt yet, or only such as were given back
	StateFailed                   // waits to be tried again
	StateSending                  // leased; perhaps by a holder that has died
	StateSent                     // ended
	StateDead                     // ended: refused for good, or out of attempts
	StateUnknown                  // ended: perhaps sent; somebody has to find out
)

var stateNames = [...]string{
	StatePending: "pending", StateFailed: "failed", StateSending: "sending",
	StateSent: "sent", StateDead: "dead", StateUnknown: "unknown",
}

// String returns "pending", "failed", "sending", "sent", "dead" or "unknown".
func (s State) String() string {
	if !s.valid() {
		return "no state"
	}
	return stateNames[s]
}

func (s State) valid() bool { return s >= StatePending && s <= StateUnknown }

// ParseState is the inverse of String. Errors are ErrInvalid.
func ParseState(text string) (State, error) {
	for s := StatePending; s <= StateUnknown; s++ {
		if stateNames[s] == text {
			return s, nil
		}
	}
	return 0, invalid("%q is no state of a message", text)
}

// Message is what to put.
type Message struct {
	// Key names the message in its channel: 1 to 512 bytes of valid UTF-8
	// without NUL. A message is put once for each key, as long as its record is
	// kept: derive the key from what happened, not from the clock.
	Key string
	// Group orders: a message is not sent before those of its group whose
	// transactions committed earlier are settled. At most 512 bytes of valid
	// UTF-8 without NUL. Defaults to none: no order.
	Group   string
	Payload []byte
	Header  Header        // not changed
	Delay   time.Duration // until it is due, at most 10 years. Defaults to 0: at once
}

// Record is a message as stored. Times are the store's, in UTC, to the
// microsecond.
type Record struct {
	Channel     string
	Key         string
	Group       string
	Seq         int64  // its number, unique in the database: within a group in the order of sending
	Payload     []byte // nil where it was not asked for; read only
	Header      Header // nil where there is none; read only
	State       State
	Attempt     int       // how often it was begun, this time included
	Ambiguous   bool      // perhaps sent already: a lease of it has lapsed, or nobody knows how an attempt ended
	Lease       Lease     // zero Token: the caller holds none; Until is told of any message being sent
	CreatedAt   time.Time // when it was put
	Due         time.Time
	CompletedAt time.Time // when it became sent, dead or unknown; zero: it is open
	Ref         string    // what the receiver calls it, of the send that worked
	LastError   string    // of the last attempt that failed
	Code        string    // of that error, see WithCode
}

// PutResult is the answer to a Put.
type PutResult struct {
	Record
	// Created: the message is new. False: a message of this key existed and was
	// left as it is; whoever put it sends it.
	Created bool
	Differs bool // it existed, with another payload or group
}

// recordOf makes a record of a row. Whose lease it is decides whether the
// token is told: one that was merely read must not settle or send.
func recordOf(channel string, r Row, held bool) Record {
	rec := Record{
		Channel: channel, Key: r.Key, Group: r.Group, Seq: int64(r.Version), Payload: r.Payload, Header: r.Header,
		State: r.State, Attempt: r.Attempt, Ambiguous: r.Ambiguous, CreatedAt: r.StagedAt, Due: r.Due,
		CompletedAt: r.CompletedAt, Ref: r.Ref, LastError: r.LastError, Code: r.Code,
	}
	if r.State == StateSending {
		rec.Lease = Lease{Channel: channel, Key: r.Key, Until: r.LeaseUntil}
		if held {
			rec.Lease.Token = r.Token
		}
	}
	return rec
}

// differs tells whether a message of the same key is another one.
func (m *PutRow) differs(group string, payload []byte) bool {
	return m.Group != group || !bytes.Equal(m.Payload, payload)
}
