package outbox

import (
	"fmt"
	"time"
)

// A parcel is what one worker sends: with a Sender a message, or a run of a
// group, one after another; with a BatchSender a whole batch at once. It goes
// window by window; of each, those of unknown fate are asked about, the rest
// is sent, and those of unknown fate then are asked about too.
type parcel struct {
	items    []item
	from, to int // the window
	step     step
	slot     bool    // it has a worker
	held     bool    // the window is not to be sent: an earlier message was not
	calls    int     // that are out
	asks     []*item // that the Probe is to be asked about
}

// item is a message of a parcel.
type item struct {
	row     *Row
	fate    fate // kind 0: none yet
	decided bool // its fate stands
	apart   bool // this relay is sending it already, in a call that hangs
	unsent  bool // it was not sent up to now, says the Probe
}

type step uint8

const (
	stepOpen step = iota
	stepSend
	stepEnd
)

// parcels are those of a claim: a group has one.
func (w *crew) parcels(rows []Row) []*parcel {
	items := make([]item, len(rows))
	for i := range rows {
		items[i].row = &rows[i]
	}
	if w.sending.many != nil {
		if len(rows) == 0 {
			return nil
		}
		return []*parcel{{items: items, to: len(items)}}
	}
	ps := make([]*parcel, 0, len(rows))
	runs := map[string]*parcel{}
	for i := range items {
		group := rows[i].Group
		if p := runs[group]; p != nil && group != "" {
			p.items = append(p.items, items[i])
			continue
		}
		p := &parcel{items: items[i : i+1 : i+1], to: 1}
		if ps = append(ps, p); group != "" {
			runs[group] = p
		}
	}
	return ps
}

func (p *parcel) window() []item { return p.items[p.from:p.to] }

// next moves the window on; rest: to all that is left.
func (p *parcel) next(rest bool) bool {
	p.from, p.to, p.step = p.to, p.to+1, stepOpen
	if rest {
		p.to = len(p.items)
	}
	return p.from < len(p.items)
}

// goOn takes p as far as it gets without waiting for a call or a worker.
func (d *dispatch) goOn(p *parcel) {
	if d.closed && p.step == stepOpen {
		p.held, p.to = true, len(p.items)
	}
	for {
		if d.ask(p); p.calls > 0 {
			return
		}
		switch p.step {
		case stepOpen:
			d.open(p)
			p.step = stepSend
		case stepSend:
			if !p.slot && !p.held && !d.closed {
				d.wait(p)
				return
			}
			p.step = stepEnd
			d.send(p)
		case stepEnd:
			held := !d.conclude(p) || d.closed
			if !p.next(held) {
				d.free(p)
				return
			}
			p.held = held
		}
	}
}

// wait lets p wait for a worker, its own hangs.
func (d *dispatch) wait(p *parcel) {
	d.waiting = append(d.waiting, p)
	d.c.unstarted(1)
}

// free gives the worker of p back.
func (d *dispatch) free(p *parcel) {
	if p.slot {
		p.slot = false
		<-d.c.crew.slots
	}
}

// open looks at the messages of a window: which cannot be sent, and which may
// have been sent before.
func (d *dispatch) open(p *parcel) {
	window := p.window()
	for i := range window {
		it := &window[i]
		switch {
		case d.gone(it):
			it.decided = true
			continue
		case it.row.Broken != nil:
			it.fate = fate{kind: fateFailed, class: ClassPermanent, mute: true, err: fmt.Errorf("read stored row: %w", it.row.Broken)}
			it.decided = true
			continue
		}
		it.apart = d.c.avoided(it.row.Key)
		if !it.row.Ambiguous {
			continue
		}
		it.fate = fate{kind: fateUnknown, err: errLapsed, mute: true}
		switch {
		case d.p.probe == nil:
		case d.closed: // no time to ask
			it.fate, it.decided = fate{kind: fateHeld}, true
		default:
			p.asks = append(p.asks, it)
		}
	}
}

// send sends what is to be sent of the window. The process may have stood
// still for longer than the leases last, so it looks at them first.
func (d *dispatch) send(p *parcel) {
	d.hold(time.Now())
	var batch []*item
	var held map[string]bool // groups in which a message is not sent
	window := p.window()
	for i := range window {
		it := &window[i]
		send := d.sends(p, it, held)
		if send {
			batch = append(batch, it)
		}
		if !send && it.row.Group != "" && it.fate.kind != fateSent {
			if held == nil {
				held = map[string]bool{}
			}
			held[it.row.Group] = true
		}
	}
	if len(batch) > 0 {
		d.call(p, batch, false)
	}
}

// sends reports whether a message is to be sent, and decides over it if not.
func (d *dispatch) sends(p *parcel, it *item, held map[string]bool) bool {
	if it.decided || it.fate.kind == fateSent {
		return false
	}
	over := d.p.max != NoLimit && it.row.Attempt > d.p.max
	switch it.fate.kind {
	case fateUnknown: // also after the Probe was asked
		if d.p.park || over {
			return false
		}
	case fateFailed: // the Probe knows
		if over {
			return false
		}
	}
	switch {
	case it.apart:
		it.fate = fate{kind: fateHeld, delay: jitter(asidePause)}
		return false
	case p.held || d.closed || d.gone(it) || held[it.row.Group]:
		it.fate = fate{kind: fateHeld}
		return false
	}
	it.fate = fate{}
	return true
}

// conclude decides over the messages of a window, and reports whether the
// group may go on.
func (d *dispatch) conclude(p *parcel) (sent bool) {
	sent = true
	window := p.window()
	for i := range window {
		it := &window[i]
		if it.fate.kind != fateSent && it.fate.kind != fateSettled {
			sent = false
		}
		d.decide(it)
	}
	return sent
}

// decide records the fate of a message, to be settled.
func (d *dispatch) decide(it *item) {
	switch {
	case d.gone(it) && it.fate.kind != fateSettled:
		d.tally.lost++ // others may have it
		return
	case it.fate.kind == fateSettled:
		d.part.settledItself()
		d.total.settledItself()
		if d.n.alone {
			d.total.ss = append(d.total.ss, Settlement{Row: *it.row, Outcome: OutcomeDone})
		}
		return
	}
	if it.fate.class == ClassUnavailable && it.fate.kind == fateFailed && d.total.down == nil {
		d.c.wentDown()
	}
	if d.part.ss == nil {
		room := len(d.b.rows) // all end together
		if d.c.crew.sending.one != nil {
			room = min(room, 128)
		}
		d.part.ss = make([]Settlement, 0, room)
	}
	d.part.ss = append(d.part.ss, d.p.settlement(*it.row, it.fate))
	s := &d.part.ss[len(d.part.ss)-1]
	if it.unsent && s.Doubt == DoubtKept {
		s.Doubt = DoubtCleared
	}
	if it.fate.rush && s.Outcome == OutcomeRetry {
		d.rushed++
	}
	d.part.count(s, it.fate)
	d.total.count(s, it.fate)
	if d.n.alone {
		d.total.ss = append(d.total.ss, *s)
	}
}

func (v *verdict) settledItself() { v.settled, v.answered = v.settled+1, true }

func (v *verdict) empty() bool { return len(v.ss) == 0 && v.settled == 0 }

// count adds the settlement of a message.
func (v *verdict) count(s *Settlement, f fate) {
	if s.Outcome != OutcomeDone && f.kind != fateHeld && v.cause == nil {
		v.cause = f.err
	}
	refused := f.kind == fateFailed && f.class == ClassPermanent && !f.mute
	v.answered = v.answered || refused || f.kind == fateSent
	v.unknown = v.unknown || f.untold
	switch s.Outcome {
	case OutcomeDone:
		v.done++
		return
	case OutcomeRelease:
		v.released++
		if f.kind == fateFailed && f.class == ClassUnavailable && v.down == nil {
			v.down = f.err
		}
		v.hasty = v.hasty || f.kind == fateFailed && f.class == ClassDefer && f.delay < backoffBase
		return
	case OutcomeDead:
		v.dead++
	case OutcomeUnknown:
		v.parked++
	default:
		if v.failed++; v.failed == 1 || s.Delay < v.soonest {
			v.soonest = s.Delay
		}
	}
	v.fresh = v.fresh || !f.mute && !refused && s.Row.Attempt <= 1
}
