package main

import "fmt"

// drain measures relays at full speed, with a handler that does nothing.
func (b *bench) drain() error {
	ps := b.site.peers(func(p *peer) bool { return p.relay != nil })
	one := relayOptions{relays: 1}
	s, err := b.drainRounds(ps, []relayOptions{one}, b.size.rounds, func(p *peer, _ relayOptions) string { return p.name })
	if err != nil {
		return err
	}
	b.add(s.compared("Draining, one process, best settings of each", "messages/s", rawClaim, b.size.rounds,
		fmt.Sprintf("%s messages wait, of those slower by far a share: %s.", count(float64(b.size.drain)), shares(ps)),
		"The clock stops when all are handled and acknowledged."))
	rival := s.best(rival)
	worst := func(name, denominator string) ratio {
		return worse(newRatio(name, s, ownLatest, denominator), newRatio(name, s, ownJournal, denominator))
	}
	b.ratio(worst("drain_vs_best_peer", rival))
	b.ratio(worst("drain_vs_river", riverPgx))
	b.ratio(worst("drain_vs_raw", rawClaim))

	some := b.site.peers(func(p *peer) bool {
		return p.name == ownLatest || p.name == ownJournal || p.name == rawClaim || p.name == rival || p.name == riverPgx
	})
	var fleets []relayOptions
	for _, n := range b.size.relays {
		fleets = append(fleets, relayOptions{relays: n})
	}
	s, err = b.drainRounds(some, fleets, b.size.few, func(p *peer, o relayOptions) string {
		return fmt.Sprintf("%s, %d", p.name, o.relays)
	})
	if err != nil {
		return err
	}
	b.add(s.compared("Draining with more relays", "messages/s", rawClaim+", 1", b.size.few).plain())

	some = b.site.peers(func(p *peer) bool {
		return p.name == ownLatest || p.name == ownJournal || p.name == rawClaim || p.name == rival && p.name != riverPgx
	})
	var batches []relayOptions
	for _, n := range b.size.batches {
		batches = append(batches, relayOptions{relays: 1, batch: n})
	}
	s, err = b.drainRounds(some, batches, b.size.few, func(p *peer, o relayOptions) string { return fmt.Sprintf("%s, %d", p.name, o.batch) })
	if err != nil {
		return err
	}
	b.add(s.compared("Draining in growing batches, one process", "messages/s", rawClaim+", 1000", b.size.few).plain())
	return nil
}

func (b *bench) drainRounds(ps []*peer, os []relayOptions, rounds int, name func(*peer, relayOptions) string) (samples, error) {
	var vs []variant
	for _, p := range ps {
		for _, o := range os {
			if p.name == "goqite" && o.relays > 1 {
				continue // more receivers are slower
			}
			vs = append(vs, variant{name(p, o), p.kind, func() (float64, error) { return b.drainPeer(p, o, b.rows(b.size.drain)) }})
		}
	}
	return b.measure(vs, rounds)
}

// plain is a table without its bars.
func (t *table) plain() *table {
	t.bars = nil
	return t
}

func shares(ps []*peer) string {
	text := ""
	for _, p := range ps {
		if p.share > 1 {
			if text != "" {
				text += ", "
			}
			text += fmt.Sprintf("%s 1/%d", p.name, p.share)
		}
	}
	return text
}
