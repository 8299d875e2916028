package protocol

import (
	"fmt"
	"testing"
)

type state uint8

const (
	none state = iota
	hidden
	open
	sent
	dead
	unknown
)

type message struct {
	state          state
	number, commit int8
	token, sends   int8
	leased         bool
}

// runner is a relay; pc: 0 idle, 1 sending, 2 to settle with an old look at the
// group (broken only), 3 its group was busy.
type runner struct {
	pc, token int8
	run, out  int8 // sets of messages
	valid     bool
	more      bool // what the old look saw
}

type group struct {
	exists, blocked bool
	lease           lease
	token           int8
}

type journal struct {
	group            group
	lock             int8 // a putter, or -1
	inserts          bool // the one with the lock makes the group's row
	puts             [2]int8
	messages         [2]message
	relays           [2]runner
	numbers, commits int8
	tokens, crashes  int8
}

type journalBroken struct{ oldLook, noLock, earlyNumber, noBlock, resend, park, claimLeased, lapsedStays bool }

func (s journal) has(st state) bool { return s.messages[0].state == st || s.messages[1].state == st }

// byNumber are the indexes of the messages in their order.
func (s journal) byNumber() [2]int {
	if s.messages[0].number > s.messages[1].number {
		return [2]int{1, 0}
	}
	return [2]int{0, 1}
}

func (b journalBroken) steps(s journal) (all []step[journal]) {
	add := func(name string, who int, change func(n *journal) string) {
		n := s
		fault := change(&n)
		all = append(all, step[journal]{fmt.Sprintf(name, who), n, fault})
	}
	number := func(n *journal, i int) { n.numbers++; n.messages[i].number = n.numbers }
	for i, pc := range s.puts {
		switch {
		case pc == 0 && b.earlyNumber && s.messages[i].number == 0:
			add("put %d: draws its number", i, func(n *journal) string { number(n, i); return "" })
		case pc == 0 && s.lock < 0:
			add("put %d: locks the group", i, func(n *journal) string {
				n.lock, n.inserts, n.puts[i] = int8(i), !s.group.exists, 1
				return ""
			})
		case pc == 1:
			add("put %d: inserts its message", i, func(n *journal) string {
				if !b.earlyNumber {
					number(n, i)
				}
				n.messages[i].state, n.puts[i] = hidden, 2
				return ""
			})
		case pc == 2:
			add("put %d: commits", i, func(n *journal) string {
				n.commits++
				n.messages[i].state, n.messages[i].commit = open, n.commits
				n.group.exists = n.group.exists || s.inserts
				n.lock, n.inserts, n.puts[i] = -1, false, 3
				return ""
			})
			add("put %d: rolls back", i, func(n *journal) string {
				n.messages[i] = message{}
				n.lock, n.inserts, n.puts[i] = -1, false, 3
				return ""
			})
		}
	}
	for i, r := range s.relays {
		if r.pc == 0 && s.group.exists && !s.group.blocked && s.lock < 0 && (s.group.lease != live || b.claimLeased) &&
			(s.group.lease != lapsed || !b.lapsedStays) && s.tokens < maxTokens {
			add("relay %d: claims a run", i, func(n *journal) string { return b.claim(n, i) })
		}
		if r.pc > 0 && s.crashes < 2 {
			add("relay %d: crashes", i, func(n *journal) string { n.relays[i] = runner{}; n.crashes++; return "" })
		}
		switch {
		case r.pc == 1 && r.out != r.run:
			add("relay %d: sends the next message", i, func(n *journal) string { return b.send(n, i) })
		case r.pc == 1 && b.oldLook:
			add("relay %d: looks at the group", i, func(n *journal) string {
				n.relays[i].more = n.openBeside(r)
				n.relays[i].pc = 2
				return ""
			})
		case r.pc > 0:
			add("relay %d: settles as sent", i, func(n *journal) string { b.settle(n, i, sent); return "" })
		}
		if r.pc == 1 && (r.out == 1 || r.out == 2) && !b.oldLook {
			add("relay %d: settles the one it sent as dead", i, func(n *journal) string { b.settle(n, i, dead); return "" })
		}
	}
	if s.group.exists && s.group.lease == live {
		add("the lease of token %d lapses", int(s.group.token), func(n *journal) string {
			n.group.lease = lapsed
			for i := range n.relays {
				if n.relays[i].token == s.group.token {
					n.relays[i].valid = false
				}
			}
			return ""
		})
	}
	return all
}

// openBeside tells whether the group has open messages that r does not hold.
func (s journal) openBeside(r runner) bool {
	for j, m := range s.messages {
		if m.state == open && r.run&(1<<j) == 0 {
			return true
		}
	}
	return false
}

func (b journalBroken) claim(n *journal, i int) string {
	r := runner{pc: 1, token: n.tokens + 1, valid: true}
	for _, j := range n.byNumber() {
		m := &n.messages[j]
		if m.state == open && m.leased && b.park && !b.resend {
			m.state, m.leased = unknown, false // nobody knows whether it was sent
		}
		if (m.state == dead || m.state == unknown) && !b.noBlock {
			break
		}
		if m.state == open {
			m.token, m.leased = r.token, true
			r.run |= 1 << j
		}
	}
	if r.run == 0 { // as regroup_1 does
		n.group.blocked, n.group.lease = n.has(open), free
		if !n.has(open) && !n.has(dead) && !n.has(unknown) {
			n.group = group{}
		}
		return ""
	}
	n.tokens++
	n.group.token, n.group.lease, n.relays[i] = r.token, live, r
	return ""
}

func (b journalBroken) send(n *journal, i int) string {
	r := &n.relays[i]
	for _, j := range n.byNumber() {
		if r.run&(1<<j) == 0 || r.out&(1<<j) != 0 {
			continue
		}
		r.out |= 1 << j
		m, other := &n.messages[j], n.messages[1-j]
		m.sends = min(m.sends+1, 2)
		switch {
		case m.commit == 0:
			return "G1: what was not committed is sent"
		case b.park && m.sends > 1:
			return "G8: a message is sent twice under Park"
		case r.valid && other.commit > 0 && other.commit < m.commit && other.state != sent && (other.token != r.token || other.sends == 0):
			return "order: an earlier message of the group is not settled"
		}
		break
	}
	return ""
}

// settle ends the leases of r's messages and, unless a Put has the group, of its
// group, which it looks at after it has locked it.
func (b journalBroken) settle(n *journal, i int, as state) {
	r := n.relays[i]
	for j := range n.messages {
		m := &n.messages[j]
		if r.run&(1<<j) == 0 || m.state != open || m.token != r.token || !m.leased {
			continue
		}
		m.leased = false
		if r.out&(1<<j) != 0 {
			m.state = as
		}
	}
	n.relays[i].pc = 3
	if n.lock >= 0 && !b.noLock && !b.oldLook {
		return // busy
	}
	if n.group.exists && n.group.token == r.token && n.group.lease != free {
		more := n.has(open)
		if b.oldLook {
			more = r.more
		}
		n.group.lease = free
		if !more && !n.has(dead) && !n.has(unknown) {
			n.group = group{}
		}
	}
	n.relays[i] = runner{}
}

func journalFault(s journal, end bool) string {
	if s.has(open) && !s.group.exists {
		return "stranded: an open message has no group"
	}
	if s.group.blocked && !s.has(dead) && !s.has(unknown) {
		return "stranded: a group is blocked by nothing"
	}
	if end && s.has(open) && !s.group.blocked && s.tokens < maxTokens {
		return "G7: a message is stuck"
	}
	if s.relays[0].valid && s.relays[1].valid {
		return "G5: two runs of the group are out"
	}
	return ""
}

func TestGroupsHoldInEveryInterleaving(t *testing.T) {
	for _, c := range []struct {
		name, fault string
		b           journalBroken
	}{
		{"as it is", "", journalBroken{}},
		{"as it is, under Park", "", journalBroken{park: true}},
		{"a settle looks before it has the lock", "stranded", journalBroken{oldLook: true}},
		{"a settle does not lock the group", "stranded", journalBroken{noLock: true}},
		{"a number is drawn before the lock", "order", journalBroken{earlyNumber: true}},
		{"a dead head does not block", "order", journalBroken{noBlock: true}},
		{"a claim does not look at the lease", "G5", journalBroken{claimLeased: true}},
		{"a claim passes over lapsed leases", "G7", journalBroken{lapsedStays: true}},
		{"a lapsed message is sent again under Park", "G8", journalBroken{park: true, resend: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			states, trace := search(journal{lock: -1}, c.b.steps, journalFault)
			requireTrace(t, c.fault, states, trace)
		})
	}
}
