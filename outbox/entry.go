package outbox

import (
	"sync"
	"time"
)

// Item is one value to stage.
type Item[T any] struct {
	Key     string // 1 to 512 bytes of valid UTF-8 without NUL
	Value   T
	Deleted bool   // a tombstone: the key's entity is gone; Value is ignored
	Header  Header // sent along; not changed
}

// Entry is a staged value, as a publish function or [Latest.Pending] gets it.
type Entry[T any] struct {
	Key       string
	Version   Version // what the sink compares: it keeps the highest of each key
	Value     T       // zero where Deleted
	Deleted   bool    // a tombstone: the key's entity is gone
	Header    Header  // read only; nil where there is none
	Attempt   int     // claims of this version, this one included
	StagedAt  time.Time
	LastError string // why the last attempt failed

	marks *marks // nil outside a publication
	index int
}

// Retry marks the entry as not published: it is due again in delay, or after
// the backoff where delay is zero or less. The mark holds even if the publish
// function then returns an error, or nil. Of several marks the last counts.
// Retry is safe for concurrent use; once the relay has given the publication
// up, because it ignored its cancelled context, marks are ignored.
func (e *Entry[T]) Retry(delay time.Duration) {
	e.marks.set(e.index, mark{kind: markRetry, delay: max(delay, 0)})
}

// Fail marks the entry as not published, as [Entry.Retry] does, and says why.
// The class of err (see [Permanent], [RetryAfter], [Defer], [Unavailable])
// decides when it is tried again; one entry that fails with Unavailable pauses
// its channel, while the unmarked entries of its batch are done if the publish
// function returns nil. A nil err is a failure too.
func (e *Entry[T]) Fail(err error) {
	if err == nil {
		err = errFailNil
	}
	e.marks.set(e.index, mark{kind: markFail, err: err})
}

type markKind uint8

const (
	markNone   markKind = iota
	markRetry           // by the function, without a reason
	markFail            // by the function, with one
	markBroken          // by the relay: the row cannot be read
)

type mark struct {
	kind  markKind
	delay time.Duration
	err   error
}

// marks are what the entries of one batch were marked with. They are sealed
// when the batch is judged, so that a function that ignores its context cannot
// change what is being settled.
type marks struct {
	mu     sync.Mutex
	n      int
	list   []mark // nil until the first mark: most batches have none
	sealed bool
}

func (m *marks) set(i int, k mark) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.sealed {
		return
	}
	if m.list == nil {
		m.list = make([]mark, m.n)
	}
	m.list[i] = k
}

// seal ends the marking and returns the marks, nil where there are none.
func (m *marks) seal() []mark {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sealed = true
	return m.list
}
