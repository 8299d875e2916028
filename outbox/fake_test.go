package outbox

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"
)

// fakeStore is a LatestStore in memory, with the faults that a relay has to
// live with. Its clock is time.Now, which synctest bubbles.
type fakeStore struct {
	mu       sync.Mutex
	rows     map[fakeKey]*fakeRow
	last     int64 // id, version and token given out
	channels map[Channel]*fakeChannel
	hooks    map[int]func(Hint)
	calls    []fakeCall
	staged   [][]StageRow // of each StageRows call

	// fault is asked before a call takes effect and after; it may block, but
	// not touch the store.
	fault func(op string, after bool) error
}

type fakeKey struct{ channel, key string }

type fakeRow struct {
	Row
	locked bool // by a transaction of somebody
}

type fakeChannel struct {
	paused time.Time // by an operator
	outage time.Time // when the next probe may go out
	level  int
	probe  time.Time // lease of the prober
	reason string
}

type fakeCall struct {
	op   string
	at   time.Time
	rows int
	ss   []Settlement
}

func newFakeStore() *fakeStore {
	return &fakeStore{rows: map[fakeKey]*fakeRow{}, channels: map[Channel]*fakeChannel{}, hooks: map[int]func(Hint){}}
}

// fakeTx holds what it staged back until it commits.
type fakeTx struct {
	s   *fakeStore
	ops []func()
}

func (s *fakeStore) begin() *fakeTx { return &fakeTx{s: s} }

func (*fakeTx) Query(context.Context, string, ...any) (Rows, error) { panic("not SQL") }

func (tx *fakeTx) commit() {
	tx.s.mu.Lock()
	defer tx.s.mu.Unlock()
	for _, op := range tx.ops {
		op()
	}
}

func (s *fakeStore) call(ctx context.Context, op string, rows int, ss []Settlement, do func()) error {
	s.mu.Lock()
	s.calls = append(s.calls, fakeCall{op, time.Now(), rows, slices.Clone(ss)})
	fault := s.fault
	s.mu.Unlock()
	if err := ctx.Err(); err != nil {
		return err
	}
	if fault != nil {
		if err := fault(op, false); err != nil {
			return err
		}
	}
	s.mu.Lock()
	do()
	s.mu.Unlock()
	if fault != nil {
		return fault(op, true)
	}
	return nil
}

func (s *fakeStore) count(op string) (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if op == "" || c.op == op {
			n++
		}
	}
	return n
}

func (s *fakeStore) callsOf(op string) (list []fakeCall) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, c := range s.calls {
		if c.op == op {
			list = append(list, c)
		}
	}
	return list
}

func (s *fakeStore) setFault(f func(op string, after bool) error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fault = f
}

// edit changes a row behind the relay's back; f is given nil if there is none.
func (s *fakeStore) edit(channel, key string, f func(r *fakeRow)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f(s.rows[fakeKey{channel, key}])
}

func (s *fakeStore) row(channel, key string) (Row, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r, ok := s.rows[fakeKey{channel, key}]
	if !ok {
		return Row{}, false
	}
	return r.Row, true
}

func (s *fakeStore) size() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.rows)
}

func (s *fakeStore) channel(ch Channel) *fakeChannel {
	c := s.channels[ch]
	if c == nil {
		c = &fakeChannel{}
		s.channels[ch] = c
	}
	return c
}

func (s *fakeStore) Check(ctx context.Context) error {
	return s.call(ctx, "check", 0, nil, func() {})
}

func (s *fakeStore) StageRows(ctx context.Context, tx Tx, channel string, rows []StageRow, delay time.Duration) ([]Version, error) {
	var vs []Version
	var ops []func()
	err := s.call(ctx, "stage", len(rows), nil, func() {
		s.staged = append(s.staged, slices.Clone(rows))
		for _, r := range rows {
			s.last++
			v := Version(s.last)
			vs = append(vs, v)
			ops = append(ops, func() { s.put(channel, r, v, delay) })
		}
		if _, held := tx.(*fakeTx); !held {
			for _, op := range ops {
				op()
			}
		}
	})
	if err != nil {
		return nil, err
	}
	if t, held := tx.(*fakeTx); held {
		t.ops = append(t.ops, ops...)
	}
	s.hint(Hint{Channel: Channel{SystemLatest, channel}, Version: vs[len(vs)-1]})
	return vs, nil
}

func (s *fakeStore) put(channel string, r StageRow, v Version, delay time.Duration) {
	now := time.Now()
	k := fakeKey{channel, r.Key}
	old := s.rows[k]
	row := &fakeRow{}
	if old != nil {
		*row = *old
	} else {
		s.last++
		row.ID = s.last
	}
	row.Key, row.Version, row.Payload, row.Header, row.Deleted = r.Key, v, r.Payload, r.Header, r.Deleted
	row.StagedAt, row.Attempt, row.LastError, row.Due = now, 0, "", now
	if delay > 0 {
		if rest := now.UnixNano() % int64(delay); rest > 0 {
			row.Due = now.Add(delay - time.Duration(rest))
		}
	}
	s.rows[k] = row
}

func (s *fakeStore) hint(h Hint) {
	s.mu.Lock()
	hooks := make([]func(Hint), 0, len(s.hooks))
	for _, f := range s.hooks {
		hooks = append(hooks, f)
	}
	s.mu.Unlock()
	for _, f := range hooks {
		f(h)
	}
}

func (s *fakeStore) Hints(f func(Hint)) func() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.last++
	id := int(s.last)
	s.hooks[id] = f
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.hooks, id)
	}
}

func (s *fakeStore) PendingRow(ctx context.Context, tx Tx, channel, key string) (Row, error) {
	if row, ok := s.row(channel, key); ok {
		return row, nil
	}
	return Row{}, fmt.Errorf("read key %q: %w", key, ErrNotFound)
}

func (s *fakeStore) ListRows(ctx context.Context, channel, after string, limit int) ([]Row, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var rows []Row
	for k, r := range s.rows {
		if k.channel == channel && k.key > after {
			row := r.Row
			row.Payload = nil
			rows = append(rows, row)
		}
	}
	slices.SortFunc(rows, func(a, b Row) int { return cmp.Compare(a.Key, b.Key) })
	return rows[:min(limit, len(rows))], nil
}

func (s *fakeStore) DiscardRow(ctx context.Context, channel, key string, v Version) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.rows[fakeKey{channel, key}]
	switch {
	case r == nil:
		return ErrNotFound
	case r.Version != v:
		return ErrLeaseLost
	}
	delete(s.rows, fakeKey{channel, key})
	return nil
}

// due returns the rows of a channel that could be claimed, in their order.
func (s *fakeStore) due(channel string, now time.Time) (rows []*fakeRow) {
	for k, r := range s.rows {
		if k.channel == channel && !r.Due.After(now) && !r.LeaseUntil.After(now) {
			rows = append(rows, r)
		}
	}
	slices.SortFunc(rows, func(a, b *fakeRow) int {
		return cmp.Or(a.Due.Compare(b.Due), cmp.Compare(a.ID, b.ID))
	})
	return rows
}

func (s *fakeStore) ClaimRows(ctx context.Context, c Claim) (claimed Claimed, err error) {
	err = s.call(ctx, "claim", c.Limit, nil, func() { claimed = s.claim(c) })
	return claimed, err
}

func (s *fakeStore) claim(c Claim) (claimed Claimed) {
	now := time.Now()
	ch := s.channel(Channel{SystemLatest, c.Channel})
	if ch.paused.After(now) || ch.outage.After(now) || (ch.level > 0 && ch.probe.After(now)) {
		return claimed
	}
	limit := c.Limit
	if ch.level > 0 {
		limit, claimed.Probe = 1, true
	}
	s.last++
	for _, r := range s.due(c.Channel, now) {
		if len(claimed.Rows) == limit {
			break
		}
		if r.locked {
			continue
		}
		r.Token, r.LeaseUntil = Token(s.last), now.Add(c.Lease)
		r.Attempt++
		claimed.Rows = append(claimed.Rows, r.Row)
	}
	if claimed.Probe && len(claimed.Rows) > 0 {
		ch.probe = now.Add(c.Lease)
	}
	return claimed
}

func (s *fakeStore) find(id int64) (fakeKey, *fakeRow) {
	for k, r := range s.rows {
		if r.ID == id {
			return k, r
		}
	}
	return fakeKey{}, nil
}

func (s *fakeStore) Settle(ctx context.Context, ch Channel, ss []Settlement) (results []Result, err error) {
	err = s.call(ctx, "settle", len(ss), ss, func() {
		for _, x := range ss {
			results = append(results, s.settle(x))
		}
	})
	return results, err
}

func (s *fakeStore) settle(x Settlement) Result {
	k, r := s.find(x.Row.ID)
	switch {
	case r == nil && x.Again && x.Outcome == OutcomeDone:
		return ResultDone
	case r == nil:
		return ResultStale
	case r.locked:
		return ResultBusy
	case r.Token != x.Row.Token:
		return ResultStale
	}
	if r.LeaseUntil.IsZero() {
		return ResultDone // settled before
	}
	r.LeaseUntil = time.Time{}
	if r.Version != x.Row.Version {
		return ResultSuperseded
	}
	switch x.Outcome {
	case OutcomeDone:
		delete(s.rows, k)
		return ResultDone
	case OutcomeRelease:
		r.Attempt--
	}
	r.Due, r.LastError = time.Now().Add(x.Delay), x.Error
	return ResultDone
}

func (s *fakeStore) Extend(ctx context.Context, ch Channel, rows []Row, d time.Duration) (results []Result, err error) {
	err = s.call(ctx, "extend", len(rows), nil, func() {
		for _, x := range rows {
			_, r := s.find(x.ID)
			switch {
			case r == nil || r.Token != x.Token:
				results = append(results, ResultStale)
			case r.locked:
				results = append(results, ResultBusy)
			default:
				r.LeaseUntil = time.Now().Add(d)
				results = append(results, ResultDone)
			}
		}
	})
	return results, err
}

func (s *fakeStore) Outage(ctx context.Context, ch Channel, down bool, reason string) error {
	op := "up"
	if down {
		op = "down"
	}
	return s.call(ctx, op, 0, nil, func() {
		c := s.channel(ch)
		now := time.Now()
		switch {
		case !down:
			*c = fakeChannel{paused: c.paused}
		case !c.outage.After(now):
			c.level++
			c.outage, c.reason, c.probe = now.Add(exponential(time.Second, backoffCap, c.level)), reason, time.Time{}
		}
	})
}

func (s *fakeStore) Look(ctx context.Context, chs []Channel) (looks []Look, err error) {
	err = s.call(ctx, "look", len(chs), nil, func() {
		now := time.Now()
		for _, ch := range chs {
			c := s.channel(ch)
			l := Look{Wait: -1, Outage: c.level > 0}
			for _, t := range []time.Time{c.paused, c.outage, c.probe} {
				l.Paused = max(l.Paused, t.Sub(now))
			}
			for k, r := range s.rows {
				if k.channel != ch.Name {
					continue
				}
				wait := max(0, r.Due.Sub(now), r.LeaseUntil.Sub(now))
				if l.Wait < 0 || wait < l.Wait {
					l.Wait = wait
				}
			}
			looks = append(looks, l)
		}
	})
	return looks, err
}

func (s *fakeStore) Stats(ctx context.Context) (stats []ChannelStats, err error) {
	err = s.call(ctx, "stats", 0, nil, func() {
		counts := map[string]int{}
		for k := range s.rows {
			counts[k.channel]++
		}
		for name, n := range counts {
			stats = append(stats, ChannelStats{Channel: Channel{SystemLatest, name}, Due: n})
		}
	})
	return stats, err
}
