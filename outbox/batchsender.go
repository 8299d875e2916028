package outbox

import (
	"context"
	"sync"
)

// BatchFunc sends a batch of messages in one call, outside of any transaction,
// and marks them: those that were sent with [Delivery.Sent], those that failed
// with [Delivery.Fail]. Returning nil says that the unmarked were sent too,
// without a ref; an error is that of all unmarked ones. Panics, timeouts and
// errors mean what they mean for a [SendFunc], and a context that has ended is
// no reason to return nil.
//
// Messages of a group come in their order and must be sent in it: when one
// fails, do not go on with its group. Those after it that are not marked as
// sent count as not sent and are given back.
type BatchFunc func(ctx context.Context, batch []*Delivery) error

// Delivery is a message of a batch.
type Delivery struct {
	Record

	marks *deliveryMarks
	index int
}

// Sent marks the message as sent; ref is what the receiver calls it, and may
// be empty. Of several marks the last counts. It is safe for concurrent use,
// and ignored once the relay has given the call up.
func (d *Delivery) Sent(ref string) { d.marks.set(d.index, deliveryMark{marked: true, ref: ref}) }

// Fail marks the message as one that failed; the class of err decides what
// becomes of it, as for a [SendFunc]. A nil err is a failure too.
func (d *Delivery) Fail(err error) {
	if err == nil {
		err = errFailNil
	}
	d.marks.set(d.index, deliveryMark{marked: true, err: err})
}

type deliveryMark struct {
	marked bool
	ref    string
	err    error // nil: sent
}

// deliveryMarks are what the messages of one call were marked with, sealed
// when the call is judged.
type deliveryMarks struct {
	mu     sync.Mutex
	list   []deliveryMark
	sealed bool
}

func (m *deliveryMarks) set(i int, k deliveryMark) {
	if m == nil {
		return
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if !m.sealed {
		m.list[i] = k
	}
}

func (m *deliveryMarks) seal() []deliveryMark {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.sealed = true
	return m.list
}
