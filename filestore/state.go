package filestore

import (
	"iter"
	"maps"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A message as kept in memory. Messages are never changed, only replaced, so
// that a failed write can put the old one back.
type message struct {
	channel string
	row     outbox.Row     // without ID, Ambiguous and Broken
	lapses  int            // leases in a row that nobody settled; 1 also where an attempt ended and nobody knows how
	ended   outbox.Outcome // with which the last token was settled; 0: it was not
	// Its JSON, in two parts, so that a claim does not encode the payload again.
	changing, fixed []byte
}

type messageID struct{ channel, key string }

func (m *message) id() messageID { return messageID{m.channel, m.row.Key} }

// size is what the message takes in the file, in bytes.
func (m *message) size() int64 {
	return int64(len(lineStart) + len(m.changing) + len(lineMiddle) + len(m.fixed) + len(lineEnd))
}

// sending reports whether somebody was given the message and has not settled
// it, though the lease may have lapsed.
func (m *message) sending() bool { return m.row.State == outbox.StateSending }

func (m *message) leased(now time.Time) bool { return m.row.LeaseUntil.After(now) }

func (m *message) hasEnded() bool { return m.row.State >= outbox.StateSent }

// alone reports whether a message has lapsed so often that it may be what
// kills its holders: the others of a claim must not suffer for it.
func (m *message) alone() bool { return m.sending() && m.lapses >= 1 }

// out is the row as a caller gets it, to keep.
func (m *message) out() outbox.Row {
	r := m.row
	r.Payload, r.Header = slices.Clone(r.Payload), maps.Clone(r.Header)
	if r.Payload == nil {
		r.Payload = []byte{}
	}
	r.Ambiguous, r.Alone = m.lapses > 0, m.lapses > 1
	return r
}

// lease gives the message to a holder.
func (m *message) lease(token outbox.Token, now time.Time, d time.Duration) *message {
	r := *m
	if !m.sending() || m.lapses >= 2 {
		r.row.Attempt++
	}
	if m.sending() {
		r.lapses++
	}
	r.row.Token, r.row.LeaseUntil, r.row.State, r.ended = token, later(now, d), outbox.StateSending, 0
	return &r
}

// A slot is where a message is in the order of the numbers; m is nil once it
// has gone.
type slot struct{ m *message }

// A channel's pauses. The zero value is a channel that is not paused.
type channel struct {
	pausedUntil time.Time // by an operator, for reason
	reason      string
	outages     int // reports in a row that the destination is down; 0: it is not
	downUntil   time.Time
	probeUntil  time.Time // while the message is out that is to find out
	cause       string    // of the outage
}

// wait is how much longer nothing may be claimed.
func (c channel) wait(now time.Time) time.Duration {
	until := latest(c.pausedUntil, c.downUntil)
	if c.outages > 0 {
		until = latest(until, c.probeUntil)
	}
	return max(0, until.Sub(now))
}

// state is what the file holds. It belongs to whoever has the store's turn.
type state struct {
	number   outbox.Version // the last one given out; goes on where messages are gone
	token    outbox.Token
	slots    []*slot // in the order of the numbers of their messages
	byID     map[messageID]*slot
	bytes    int64 // of the messages
	channels map[string]channel
	undo     []func() // takes back what was done since the last write, last first
}

func newState() *state {
	return &state{byID: map[messageID]*slot{}, channels: map[string]channel{}}
}

// nextNumber starts at the clock, as other stores do: whoever has seen
// numbers of a file that was deleted since sees greater ones.
func (st *state) nextNumber(now time.Time) outbox.Version {
	st.number = max(st.number+1, outbox.Version(now.UnixMicro()))
	return st.number
}

func (st *state) nextToken(now time.Time) outbox.Token {
	st.token = max(st.token+1, outbox.Token(now.UnixMicro()))
	return st.token
}

// find returns the slot of a key, or nil.
func (st *state) find(channel, key string) *slot { return st.byID[messageID{channel, key}] }

// add appends a message, whose number is the greatest.
func (st *state) add(m *message) {
	sl := new(slot)
	st.slots = append(st.slots, sl)
	st.set(sl, m)
}

// set replaces the message of a slot; nil deletes it.
func (st *state) set(sl *slot, m *message) {
	if m != nil {
		m.encodeChanging()
	}
	old := sl.m
	st.assign(sl, m)
	st.undo = append(st.undo, func() { st.assign(sl, old) })
}

func (st *state) assign(sl *slot, m *message) {
	if sl.m != nil {
		st.bytes -= sl.m.size()
		delete(st.byID, sl.m.id())
	}
	if m != nil {
		st.bytes += m.size()
		st.byID[m.id()] = sl
	}
	sl.m = m
}

// setChannel records a channel's pauses; the zero value forgets the channel.
func (st *state) setChannel(name string, c channel) {
	old, known := st.channels[name]
	if c == old {
		return
	}
	if st.channels[name] = c; c == (channel{}) {
		delete(st.channels, name)
	}
	st.undo = append(st.undo, func() {
		if st.channels[name] = old; !known {
			delete(st.channels, name)
		}
	})
}

// takeBack undoes all but the first keep changes.
func (st *state) takeBack(keep int) {
	for _, undo := range slices.Backward(st.undo[keep:]) {
		undo()
	}
	st.undo = slices.Delete(st.undo, keep, len(st.undo))
}

// settled forgets how to undo what is durable, and the slots of messages that
// have gone once they are the most.
func (st *state) settled() {
	clear(st.undo)
	st.undo = st.undo[:0]
	if len(st.slots) > 2*len(st.byID)+64 {
		st.slots = slices.DeleteFunc(st.slots, func(sl *slot) bool { return sl.m == nil })
	}
}

// of yields the messages of a channel in the order of their numbers. Replacing
// or deleting the message it is at does no harm.
func (st *state) of(channel string) iter.Seq2[*slot, *message] {
	return func(yield func(*slot, *message) bool) {
		for _, sl := range st.slots {
			if sl.m != nil && sl.m.channel == channel && !yield(sl, sl.m) {
				return
			}
		}
	}
}

// A group is what a channel's messages say about one. Nothing of it is stored.
type group struct {
	slots []*slot      // of those not sent, in their order: the first is the head
	until time.Time    // the last lease of its messages ends
	token outbox.Token // the newest of its messages
}

func (g *group) head() *message { return g.slots[0].m }

// blocked reports whether the head has ended without being sent.
func (g *group) blocked() bool { return len(g.slots) > 0 && g.head().hasEnded() }

// next reports whether a message numbered so, or a new one (0), can be begun.
func (g *group) next(number outbox.Version, now time.Time) bool {
	return !g.until.After(now) && (len(g.slots) == 0 || g.head().row.Version == number)
}

// groups reads the groups of a channel, one look at each of its messages.
func (st *state) groups(channel string) map[string]*group {
	groups := map[string]*group{}
	for sl, m := range st.of(channel) {
		if m.row.Group == "" {
			continue
		}
		g := groups[m.row.Group]
		if g == nil {
			g = new(group)
			groups[m.row.Group] = g
		}
		g.add(sl)
	}
	return groups
}

// group reads one group.
func (st *state) group(channel, name string) *group {
	g := new(group)
	for sl, m := range st.of(channel) {
		if m.row.Group == name {
			g.add(sl)
		}
	}
	return g
}

func (g *group) add(sl *slot) {
	r := &sl.m.row
	if r.State != outbox.StateSent {
		g.slots = append(g.slots, sl)
	}
	g.until, g.token = latest(g.until, r.LeaseUntil), max(g.token, r.Token)
}

func latest(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// later is d after now, rounded up to a microsecond so that no wait is cut to
// nothing.
func later(now time.Time, d time.Duration) time.Time {
	n := int64(d / time.Microsecond)
	if d%time.Microsecond > 0 {
		n++
	}
	return instant(now.UnixMicro() + n)
}

// instant is a time as the file has it; 0 is the zero time.
func instant(micros int64) time.Time {
	if micros == 0 {
		return time.Time{}
	}
	return time.UnixMicro(micros).UTC()
}

func micros(t time.Time) int64 {
	if t.IsZero() {
		return 0
	}
	return t.UnixMicro()
}
