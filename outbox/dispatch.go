package outbox

import (
	"context"
	"time"
)

// settleEvery is how long a message that has been sent waits at most for those
// of its batch that are still being sent, to be settled together with them.
const settleEvery = 75 * time.Millisecond

// A dispatch sends the messages of a claimed batch: parcel by parcel as workers
// of the channel are free, each call of user code in a goroutine of its own.
// It is one loop in one goroutine: what it does not share with those calls
// needs no lock.
type dispatch struct {
	b *batch
	n *run
	c *channel
	p *policy

	waiting []*parcel       // for a worker, in order
	out     []*call         // running
	ends    chan *call      // that have returned
	downs   int             // of the channel, when the batch was claimed
	closed  bool            // nothing more is to be sent
	lost    map[string]bool // keys of messages whose leases are others'
	rushed  int             // messages to be sent again because the relay stops

	part    verdict    // decided, and not yet being settled
	total   verdict    // all that was decided
	busy    bool       // a part is being settled
	settled chan tally // then
	tally   tally
	last    ending // of a call
}

func (b *batch) dispatch(n *run) tally {
	d := &dispatch{
		b: b, n: n, c: b.c, p: b.c.crew.policy, downs: b.downs,
		ends: make(chan *call, min(len(b.rows), 64)), settled: make(chan tally, 1),
		waiting: b.parcels,
	}
	d.total.mute = true
	d.loop()
	return d.finish()
}

func (d *dispatch) loop() {
	tick := time.NewTicker(d.period())
	defer tick.Stop()
	stopped := d.n.ctx.Done()
	if d.n.stopping() {
		d.close()
	}
	for len(d.waiting) > 0 || len(d.out) > 0 {
		var slots chan<- struct{}
		if len(d.waiting) > 0 && (!d.b.suspect() || d.c.onlyOne()) {
			slots = d.c.crew.slots
		}
		select {
		case slots <- struct{}{}:
			d.begin()
		case k := <-d.ends:
			d.ended(k)
		case t := <-d.settled:
			d.busy = false
			d.tally.add(t)
		case <-stopped:
			stopped = nil
			d.close()
		case <-tick.C:
			d.look(time.Now())
		}
	}
}

// period is how often the dispatch looks after what does not report itself.
func (d *dispatch) period() time.Duration {
	return min(settleEvery, d.c.o.Lease/6, max(d.c.o.AttemptTimeout, 5*time.Millisecond))
}

// begin gives a worker to the parcel that has waited longest.
func (d *dispatch) begin() {
	if d.c.downs() != d.downs {
		<-d.c.crew.slots
		d.close()
		return
	}
	p := d.waiting[0]
	d.waiting[0], d.waiting = nil, d.waiting[1:]
	d.c.unstarted(-1)
	p.slot = true
	d.goOn(p)
}

// look settles what has ended, extends the leases of what has not, and gives
// up calls that ignore their context.
func (d *dispatch) look(now time.Time) {
	if len(d.waiting) > 0 && (d.c.downs() != d.downs || d.c.stuck()) {
		d.close()
	}
	if !d.busy && !d.part.empty() {
		d.busy = true
		go func(part *batch, v verdict) { d.settled <- part.settlePart(d.n, v, ending{}) }(d.cut())
	}
	d.hold(now)
	for _, k := range append([]*call(nil), d.out...) {
		if d.impatient(k, now) {
			d.giveUp(k)
		}
	}
}

// close gives back the parcels that wait, and sends nothing more.
func (d *dispatch) close() {
	d.closed = true
	waiting := d.waiting
	d.waiting = nil
	d.c.unstarted(-len(waiting))
	for _, p := range waiting {
		d.goOn(p)
	}
}

// hold extends the leases when it is time to.
func (d *dispatch) hold(now time.Time) {
	if !now.Before(d.b.hold.next) && len(d.b.hold.live) > 0 {
		d.extend()
	}
}

// extend lets the leases run on. Calls whose messages are lost are cut short.
func (d *dispatch) extend() {
	b := d.b
	b.lost = nil
	err := b.extend(d.n)
	for key := range b.lost {
		if d.lost == nil {
			d.lost = map[string]bool{}
		}
		d.lost[key] = true
	}
	if err != nil { // none can be relied on
		b.avoidTwice(b.hold.live)
		b.hold.next = time.Now().Add(never)
		for _, k := range d.out {
			k.cut(err)
		}
		d.close()
		return
	}
	for _, k := range d.out {
		if len(b.lost) > 0 && d.allGone(k.items) {
			k.cut(ErrLeaseLost)
		}
	}
}

func (d *dispatch) gone(it *item) bool { return d.lost[it.row.Key] }

func (d *dispatch) allGone(items []*item) bool {
	for _, it := range items {
		if !d.gone(it) {
			return false
		}
	}
	return true
}

// cut takes what was decided out of the batch, to be settled by itself while
// the rest goes on.
func (d *dispatch) cut() (*batch, verdict) {
	v := d.part
	d.part = verdict{}
	ended := make(map[string]bool, len(v.ss))
	for i := range v.ss {
		ended[v.ss[i].Row.Key] = true
	}
	h := &d.b.hold
	h.live, h.busy = without(h.live, ended), without(h.busy, ended)
	return d.partOf(), v
}

func (d *dispatch) partOf() *batch {
	return &batch{c: d.c, probe: d.b.probe, trial: d.b.trial, hold: hold{lease: d.b.hold.lease, until: d.b.hold.until}}
}

func without(rows []Row, keys map[string]bool) []Row {
	var rest []Row
	for _, r := range rows {
		if !keys[r.Key] {
			rest = append(rest, r)
		}
	}
	return rest
}

// finish settles what is left, and lets the channel learn.
func (d *dispatch) finish() tally {
	d.c.onlySettling(1)
	defer d.c.onlySettling(-1)
	d.c.let(d.b.avoided)
	if d.total.down == nil {
		d.c.learn(d.b, d.total, d.last)
	}
	if d.busy {
		d.tally.add(<-d.settled)
	}
	d.part.mute = d.total.mute
	d.tally.add(d.partOf().settlePart(d.n, d.part, d.last))
	if d.rushed > 0 && d.tally.left == 0 {
		d.n.leave(d.c.name, d.rushed, d.last.reason())
	}
	d.b.verdict = d.total
	return d.tally
}

// context of a call: it ends with the run's work. What is left to find out
// after that has to be quick.
func (d *dispatch) context() (parent context.Context, limit time.Duration, err error) {
	if d.n.work.Err() == nil {
		return d.n.work, d.c.o.AttemptTimeout, d.c.crew.sending.timeout
	}
	return d.n.settling, min(d.n.halt, d.c.o.AttemptTimeout), errShutdown
}
