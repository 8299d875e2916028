package outbox

import (
	"context"
	"maps"
	"sync/atomic"
	"time"
)

// A call is one call of user code: a send, or a question to the Probe.
type call struct {
	p     *parcel
	items []*item
	asks  bool // the Probe, about the one item
	slot  bool // it has kept its parcel's worker, when it was given up
	rows  []Row
	ctx   context.Context
	cut   context.CancelCauseFunc
	free  context.CancelFunc
	began time.Time
	ended time.Time // when its context was seen to have ended
	at    int       // in dispatch.out
	state atomic.Int32

	// Of its goroutine, until it has returned.
	end     ending
	ref     string
	verdict Verdict
	marks   *deliveryMarks
}

// call starts a call.
func (d *dispatch) call(p *parcel, items []*item, asks bool) {
	parent, limit, cause := d.context()
	k := &call{p: p, items: items, asks: asks, began: time.Now(), at: len(d.out)}
	parent, k.cut = context.WithCancelCause(parent)
	k.ctx, k.free = context.WithTimeoutCause(parent, limit, cause)
	if d.c.crew.sending.many != nil && !asks {
		k.marks = &deliveryMarks{list: make([]deliveryMark, len(items))}
	}
	p.calls++
	d.out = append(d.out, k)
	go d.run(k)
}

// run is the goroutine of a call, so that runtime.Goexit harms nobody.
func (d *dispatch) run(k *call) {
	k.end = ending{err: errSendExit, sends: true}
	defer func() {
		if v := recover(); v != nil {
			k.end.err = newPanicError(v)
		}
		if k.ctx.Err() != nil {
			k.end.cause = context.Cause(k.ctx)
		}
		if !k.state.CompareAndSwap(callRunning, callReturned) {
			d.c.cameBack(k)
			return
		}
		d.ends <- k // the dispatch waits for it
	}()
	s, channel := d.c.crew.sending, d.c.name.Name
	switch {
	case k.asks:
		r := recordOf(channel, *k.items[0].row, true)
		k.verdict, k.ref, k.end.err = s.o.Probe(d.restored(k.ctx, r.Header), &r)
	case s.one != nil:
		r := recordOf(channel, *k.items[0].row, true)
		k.ref, k.end.err = s.one(d.restored(k.ctx, r.Header), &r)
	default:
		batch := k.deliveries(channel)
		k.end.err = s.many(d.restored(k.ctx, k.shared()), batch)
	}
}

// restored goes on with the trace that headers tell of.
func (d *dispatch) restored(ctx context.Context, h Header) context.Context {
	if f := d.c.r.o.Context; f != nil && len(h) > 0 {
		if restored := f(ctx, h); restored != nil {
			return restored
		}
	}
	return ctx
}

func (k *call) deliveries(channel string) []*Delivery {
	all := make([]Delivery, len(k.items)) // one allocation for all
	batch := make([]*Delivery, len(k.items))
	for i, it := range k.items {
		all[i] = Delivery{Record: recordOf(channel, *it.row, true), marks: k.marks, index: i}
		batch[i] = &all[i]
	}
	return batch
}

// shared returns the headers that all messages have, by name and value.
func (k *call) shared() Header {
	h := k.items[0].row.Header
	if len(k.items) == 1 {
		return h
	}
	h = maps.Clone(h)
	for _, it := range k.items[1:] {
		if len(h) == 0 {
			break
		}
		keepShared(h, it.row.Header)
	}
	return h
}

// ask starts questions to the Probe: as many at a time as there are workers,
// since a worker with a batch of messages may have as many to ask about.
func (d *dispatch) ask(p *parcel) {
	for len(p.asks) > 0 && p.calls < d.c.o.InFlight {
		it := p.asks[0]
		p.asks = p.asks[1:]
		d.call(p, []*item{it}, true)
	}
}

// ended takes in a call that has returned.
func (d *dispatch) ended(k *call) {
	k.free()
	k.cut(nil)
	last := d.out[len(d.out)-1]
	last.at = k.at
	d.out[k.at], d.out[len(d.out)-1] = last, nil
	d.out = d.out[:len(d.out)-1]
	k.p.calls--
	d.total.mute = false
	d.reportCall(k)
	if k.asks {
		d.answered(k)
	} else {
		d.last = k.end
		d.judge(k)
	}
	d.goOn(k.p)
}

// answered takes in what the Probe says. That a message was not sent is no
// answer while a call that hangs may still be sending it.
func (d *dispatch) answered(k *call) {
	it, err := k.items[0], k.end.err
	if k.end.hung || k.end.cause != nil && k.verdict == VerdictUnknown {
		err = k.end.reason()
	}
	if it.apart && k.verdict == VerdictNotSent {
		k.verdict = VerdictUnknown
	}
	it.fate = it.fate.probed(k.verdict, k.ref, err)
	it.unsent = it.fate.kind == fateFailed
}

// judge says what is known of the messages of a send that has ended, and has
// the Probe asked about those of which nobody knows.
func (d *dispatch) judge(k *call) {
	if k.marks == nil {
		k.items[0].fate = d.p.fateOf(k.ref, k.end)
	} else {
		d.judgeMarks(k)
	}
	for _, it := range k.items {
		it.apart = k.end.hung
		if it.fate.kind == fateUnknown && d.p.probe != nil && !d.gone(it) {
			k.p.asks = append(k.p.asks, it)
		}
	}
}

// judgeMarks is judge for a batch. In a group, those after one that failed
// count as not sent, unless nobody knows.
func (d *dispatch) judgeMarks(k *call) {
	whole := d.p.fateOf("", k.end)
	held := map[string]bool{}
	for i, m := range k.marks.seal() {
		it := k.items[i]
		group := it.row.Group
		switch {
		case m.marked && m.err == nil:
			it.fate = fate{kind: fateSent, ref: m.ref}
		case m.marked:
			it.fate = d.p.fateOf("", ending{err: m.err})
			if it.fate.class == ClassUnavailable && k.end.ours() {
				it.fate.kind, it.fate.class = fateUnknown, ClassPlain
			}
		case held[group] && group != "" && whole.kind != fateUnknown:
			it.fate = fate{kind: fateHeld}
		default:
			it.fate = whole
		}
		if it.fate.kind != fateSent && it.fate.kind != fateSettled {
			held[group] = true
		}
	}
}

// impatient reports whether a call has ignored for too long that its context
// has ended.
func (d *dispatch) impatient(k *call, now time.Time) bool {
	if k.ctx.Err() == nil {
		return false
	}
	if k.ended.IsZero() {
		k.ended = now
	}
	grace := min(d.c.o.AttemptTimeout, maxGrace)
	if d.n.work.Err() != nil {
		grace = d.n.halt
	}
	return now.Sub(k.ended) >= grace
}

// giveUp goes on without a call; it keeps its worker.
func (d *dispatch) giveUp(k *call) {
	k.slot = k.p.slot
	if !d.c.abandonCall(k) {
		k.slot = false
		return // it has returned just now
	}
	if k.slot {
		k.p.slot = false
	}
	d.c.r.log.Error("outbox: send function ignores its cancelled context, its worker stays taken",
		"channel", d.c.name.Name, "key", k.items[0].row.Key, "messages", len(k.items), "running", time.Since(k.began).Round(time.Millisecond))
	abandoned := &call{p: k.p, items: k.items, asks: k.asks, marks: k.marks, ctx: k.ctx, cut: k.cut, free: k.free, began: k.began, at: k.at}
	abandoned.end = ending{cause: context.Cause(k.ctx), hung: true, sends: true}
	d.c.r.observe(Event{Kind: EventHung, Channel: d.c.name, Rows: len(k.items), Err: abandoned.end.cause})
	d.ended(abandoned)
}

// abandonCall counts a call that goes on although its context has ended. Its
// messages are not sent by this relay meanwhile. False: it has returned.
func (c *channel) abandonCall(k *call) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, it := range k.items {
		k.rows = append(k.rows, *it.row)
	}
	if !k.state.CompareAndSwap(callRunning, callAbandoned) {
		return false
	}
	c.hung++
	if k.slot {
		c.crew.hung++
	}
	c.avoids(k.rows, 1)
	return true
}

// cameBack gives back the worker of a call that was given up.
func (c *channel) cameBack(k *call) {
	c.mu.Lock()
	c.hung--
	c.avoids(k.rows, -1)
	if k.slot {
		c.crew.hung--
		<-c.crew.slots
	}
	c.mu.Unlock()
	c.signal()
	c.r.log.Info("outbox: send function that ignored its cancelled context has returned",
		"channel", c.name.Name, "key", k.rows[0].Key, "after", time.Since(k.began).Round(time.Millisecond))
	c.r.observe(Event{Kind: EventReturned, Channel: c.name, Rows: len(k.rows), Duration: time.Since(k.began)})
}
