package protocol

import (
	"fmt"
	"testing"
)

type lease uint8

const (
	free lease = iota
	live
	lapsed // still its holder's until somebody else claims
)

type entry struct {
	exists                bool
	version, value, token int8
	lease                 lease
}

// stager is a transaction; pc counts its steps.
type stager struct {
	pc, token, version int8
	inserted           bool
}

// holder is a relay; pc: 0 idle, 1 claimed, 2 published.
type holder struct {
	pc, version, value, token int8
	valid                     bool
}

type latest struct {
	row, pending       entry // committed, and as the holder of the lock sees it
	lock               int8  // a stager, or -1
	versions, tokens   int8  // the last given out
	stagers            [2]stager
	relays             [2]holder
	sink, sinkValue    int8 // guarded: the greatest version
	newest, newestIs   int8 // the last committed version, and its value
	committed, crashes int8 // committed is a set of values
}

type latestBroken struct{ noRedraw, tokenLate, settleByKey, settleByToken, claimLeased, lapsedStays, unordered bool }

const maxTokens = 4

func (b latestBroken) steps(s latest) (all []step[latest]) {
	add := func(name string, who int, change func(n *latest) string) {
		n := s
		fault := change(&n)
		all = append(all, step[latest]{fmt.Sprintf(name, who), n, fault})
	}
	readToken := func(n *latest, i int) string { n.stagers[i].token = n.tokens; n.stagers[i].pc++; return "" }
	draw := func(n *latest, i int) string {
		n.versions++
		n.stagers[i].version = n.versions
		n.stagers[i].pc++
		return ""
	}
	for i, g := range s.stagers {
		first, second := readToken, draw
		if b.tokenLate {
			first, second = draw, readToken
		}
		switch g.pc {
		case 0:
			add("stager %d: begins its statement", i, func(n *latest) string { return first(n, i) })
		case 1:
			add("stager %d: reads or draws the second number", i, func(n *latest) string { return second(n, i) })
		case 2:
			if s.lock >= 0 {
				continue // waits
			}
			add("stager %d: writes the row", i, func(n *latest) string {
				n.lock, n.pending = int8(i), n.row
				if !n.row.exists {
					n.stagers[i].inserted = true
					n.pending = entry{exists: true, version: g.version, token: g.token}
				} else {
					n.versions++
					n.pending.version = n.versions
				}
				n.pending.value = int8(i) + 1
				n.stagers[i].pc++
				return ""
			})
		case 3:
			add("stager %d: looks at the token again", i, func(n *latest) string {
				if g.inserted && n.tokens != n.pending.token && !b.noRedraw {
					n.versions++
					n.pending.version = n.versions
				}
				n.stagers[i].pc++
				return ""
			})
		case 4:
			add("stager %d: commits", i, func(n *latest) string {
				n.row, n.pending, n.lock = n.pending, entry{}, -1
				n.stagers[i] = stager{pc: 5}
				n.committed |= 1 << n.row.value
				if n.row.version <= n.newest && !b.unordered {
					return "G2: a version is not greater than the one committed before"
				}
				n.newest, n.newestIs = n.row.version, n.row.value
				return ""
			})
			add("stager %d: rolls back", i, func(n *latest) string {
				n.pending, n.lock, n.stagers[i] = entry{}, -1, stager{pc: 5}
				return ""
			})
		}
	}
	for i, r := range s.relays {
		if r.pc == 0 && s.row.exists && s.lock < 0 && (s.row.lease != live || b.claimLeased) && (s.row.lease != lapsed || !b.lapsedStays) && s.tokens < maxTokens {
			add("relay %d: claims", i, func(n *latest) string {
				n.tokens++
				n.row.token, n.row.lease = n.tokens, live
				n.relays[i] = holder{1, n.row.version, n.row.value, n.tokens, true}
				return ""
			})
		}
		if r.pc == 1 {
			add("relay %d: publishes", i, func(n *latest) string {
				if n.committed&(1<<r.value) == 0 {
					return "G1: what was not committed is published"
				}
				n.relays[i].pc = 2
				if r.version > n.sink {
					n.sink, n.sinkValue = r.version, r.value
				}
				return ""
			})
		}
		if r.pc > 0 && s.crashes < 2 {
			add("relay %d: crashes", i, func(n *latest) string { n.relays[i] = holder{}; n.crashes++; return "" })
		}
		if r.pc == 0 || s.lock >= 0 {
			continue // busy: changes nothing
		}
		ours := s.row.exists && s.row.token == r.token && s.row.lease != free
		if r.pc == 1 {
			add("relay %d: releases", i, func(n *latest) string {
				if ours {
					n.row.lease = free
				}
				n.relays[i] = holder{}
				return ""
			})
			continue
		}
		add("relay %d: settles", i, func(n *latest) string {
			switch {
			case b.settleByKey, ours && (b.settleByToken || s.row.version == r.version):
				n.row = entry{}
			case ours:
				n.row.lease = free
			}
			n.relays[i] = holder{}
			return ""
		})
	}
	if s.row.exists && s.row.lease == live {
		add("the lease of token %d lapses", int(s.row.token), func(n *latest) string {
			n.row.lease = lapsed
			if n.lock >= 0 && !n.stagers[n.lock].inserted {
				n.pending.lease = lapsed
			}
			for i := range n.relays {
				if n.relays[i].token == s.row.token {
					n.relays[i].valid = false
				}
			}
			return ""
		})
	}
	return all
}

func latestFault(s latest, end bool) string {
	if end && s.row.exists && s.tokens < maxTokens {
		return "G7: the row is stuck"
	}
	if !s.row.exists && s.sinkValue != s.newestIs {
		return "G3: the row is gone and the sink does not have the newest state"
	}
	if s.relays[0].valid && s.relays[1].valid {
		return "G5: two relays hold the row"
	}
	return ""
}

func TestLatestHoldsInEveryInterleaving(t *testing.T) {
	for _, c := range []struct {
		name, fault string
		b           latestBroken
	}{
		{"as it is", "", latestBroken{}},
		{"the version is not drawn again", "G2", latestBroken{noRedraw: true}},
		{"the same, what comes of it at the sink", "G3", latestBroken{noRedraw: true, unordered: true}}, // unordered: G2 is not looked at
		{"the token is read after the version was drawn", "G2", latestBroken{tokenLate: true}},
		{"a settle looks at the key alone", "G3", latestBroken{settleByKey: true}},
		{"a settle does not look at the version", "G3", latestBroken{settleByToken: true}},
		{"a claim does not look at the lease", "G5", latestBroken{claimLeased: true}},
		{"a claim passes over lapsed leases", "G7", latestBroken{lapsedStays: true}},
	} {
		t.Run(c.name, func(t *testing.T) {
			states, trace := search(latest{lock: -1}, c.b.steps, latestFault)
			requireTrace(t, c.fault, states, trace)
		})
	}
}
