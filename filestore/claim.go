package filestore

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// ClaimMessages implements outbox.JournalStore. It looks at every message of
// the channel, which is little beside writing the file.
func (s *Store) ClaimMessages(ctx context.Context, tx outbox.Tx, c outbox.Claim) (outbox.Claimed, error) {
	claimed, err := change(ctx, s, tx, func(st *state, now time.Time) (outbox.Claimed, error) {
		return st.claim(c, now), nil
	})
	if err != nil {
		return outbox.Claimed{}, fmt.Errorf("claim from channel %q: %w", c.Channel, err)
	}
	return claimed, nil
}

func (st *state) claim(c outbox.Claim, now time.Time) outbox.Claimed {
	ch := st.channels[c.Channel]
	if ch.wait(now) > 0 {
		return outbox.Claimed{}
	}
	claimed := outbox.Claimed{Probe: ch.outages > 0}
	if claimed.Probe {
		c.Limit = 1
	}
	picked := pick(st.runs(c, now), c.Limit)
	if len(picked) == 0 {
		return outbox.Claimed{}
	}
	if claimed.Probe {
		ch.probeUntil = later(now, c.Lease)
		st.setChannel(c.Channel, ch)
	}
	token := st.nextToken(now)
	for _, sl := range picked {
		m := sl.m.lease(token, now, c.Lease)
		st.set(sl, m)
		claimed.Rows = append(claimed.Rows, m.out())
	}
	return claimed
}

// runs returns what could be claimed, oldest due first: single messages, and
// the runs of groups that are not out.
func (st *state) runs(c outbox.Claim, now time.Time) [][]*slot {
	var runs [][]*slot
	for sl, m := range st.of(c.Channel) {
		if m.row.Group == "" && m.claimable(now) {
			runs = append(runs, []*slot{sl})
		}
	}
	for _, g := range st.groups(c.Channel) {
		if run := g.run(c.SkipEnded, now); len(run) > 0 {
			runs = append(runs, run)
		}
	}
	slices.SortFunc(runs, func(a, b []*slot) int {
		x, y := &a[0].m.row, &b[0].m.row
		return cmp.Or(x.Due.Compare(y.Due), cmp.Compare(x.Version, y.Version))
	})
	return runs
}

func (m *message) claimable(now time.Time) bool {
	return !m.hasEnded() && !m.row.Due.After(now) && !m.leased(now)
}

// run returns the first messages of the group as far as they can go out.
func (g *group) run(skipEnded bool, now time.Time) []*slot {
	if g.until.After(now) {
		return nil
	}
	var run []*slot
	for _, sl := range g.slots {
		switch {
		case sl.m.hasEnded() && skipEnded:
			continue
		case !sl.m.claimable(now), sl.m.alone() && len(run) > 0:
			return run
		}
		if run = append(run, sl); sl.m.alone() {
			break
		}
	}
	return run
}

// pick takes up to limit messages, or one that has to go alone when its turn
// has come.
func pick(runs [][]*slot, limit int) []*slot {
	var picked []*slot
	for i, run := range runs {
		switch alone := run[0].m.alone(); {
		case alone && i == 0:
			return run[:1]
		case alone:
			continue
		}
		if picked = append(picked, run...); len(picked) >= limit {
			return picked[:limit]
		}
	}
	return picked
}

// BeginMessage implements outbox.JournalStore.
func (s *Store) BeginMessage(ctx context.Context, tx outbox.Tx, channel, key string, lease time.Duration) (outbox.Row, error) {
	row, err := change(ctx, s, tx, func(st *state, now time.Time) (outbox.Row, error) {
		sl := st.find(channel, key)
		switch {
		case sl == nil:
			return outbox.Row{}, outbox.ErrNotFound
		case sl.m.row.State != outbox.StatePending && sl.m.row.State != outbox.StateFailed:
			return outbox.Row{}, fmt.Errorf("%w: it is %s", outbox.ErrState, sl.m.row.State)
		case sl.m.row.Group != "" && !st.group(channel, sl.m.row.Group).next(sl.m.row.Version, now):
			return outbox.Row{}, outbox.ErrBlocked
		}
		m := sl.m.lease(st.nextToken(now), now, lease)
		if m.row.Due.After(now) { // so that it comes back when its lease lapses
			m.row.Due = now
		}
		st.set(sl, m)
		return m.out(), nil
	})
	if err != nil {
		return outbox.Row{}, fmt.Errorf("begin key %q of channel %q: %w", key, channel, err)
	}
	return row, nil
}
