package outbox

import "time"

// maxSettling is how many batches of a Journal channel may do nothing but wait
// to be settled.
const maxSettling = 4

// A crew is the workers of a Journal channel. Its batches share them, so that
// a batch whose last messages are slow does not keep the others waiting; all
// but sending, policy and slots is guarded by the channel's mutex.
type crew struct {
	sending *sending
	policy  *policy
	slots   chan struct{} // holds one for each worker at work
	ahead   int           // how many parcels waiting for a worker are enough

	unstarted int  // parcels claimed that wait for a worker
	settling  int  // batches
	hung      int  // workers
	downs     int  // how often a message has found the destination down
	suspect   bool // one that may kill its holder is out, see batch.suspect

	dead   throttle // of log lines
	parked throttle
	late   late
}

func newCrew(s *sending, workers int) *crew {
	w := &crew{sending: s, policy: newPolicy(s.o), slots: make(chan struct{}, workers), ahead: workers}
	if s.many != nil {
		w.ahead = 1 // it is a whole batch
	}
	return w
}

// free reports whether to claim another batch, beside so many. A relay claims
// ahead of its workers only as much as keeps them busy: what it holds, others
// cannot send. careful: one batch at a time.
func (w *crew) free(careful bool, batches int) bool {
	switch {
	case w.hung >= cap(w.slots) || w.suspect:
		return false
	case careful:
		return batches == 0
	}
	return w.unstarted < w.ahead && w.settling < maxSettling
}

// unstarted changes how many parcels wait for a worker.
func (c *channel) unstarted(by int) {
	c.mu.Lock()
	before := c.crew.unstarted
	c.crew.unstarted += by
	room := before >= c.crew.ahead && c.crew.unstarted < c.crew.ahead
	c.mu.Unlock()
	if room {
		c.signal()
	}
}

// onlySettling counts batches all of whose messages have been sent.
func (c *channel) onlySettling(by int) {
	c.mu.Lock()
	c.crew.settling += by
	c.mu.Unlock()
	c.signal()
}

// wentDown records that the destination is down. Messages that wait for a
// worker are given back, see downs.
func (c *channel) wentDown() {
	c.mu.Lock()
	c.crew.downs++
	c.holdBack(time.Now())
	c.mu.Unlock()
}

func (c *channel) downs() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.crew.downs
}

// stuck reports whether no worker will be free before one that hangs returns.
func (c *channel) stuck() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.crew.hung >= cap(c.crew.slots)
}

// avoided reports whether this relay is still sending a message of the key.
func (c *channel) avoided(key string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.avoid[key] > 0
}

// suspect reports whether the batch is a message that came alone because its
// holders keep dying: it may be what kills them. Nothing else of the channel is
// sent meanwhile, or bystanders would share in what it has to suffer alone.
func (b *batch) suspect() bool {
	return b.c.crew != nil && len(b.rows) == 1 && b.rows[0].Alone
}

// onlyOne reports whether no other batch is out.
func (c *channel) onlyOne() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.busy == 1
}
