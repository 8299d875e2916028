package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// held measures draining while another transaction's snapshot keeps all dead
// rows in the tables.
func (b *bench) held() error {
	names := []string{ownLatest, ownJournal, rawClaim, "watermill-sql, queue"}
	before, after := func(n string) string { return n + ", before" }, func(n string) string { return n + ", after" }
	s := samples{nil, map[string][]float64{}}
	last := map[string][]stretch{}
	var vs []variant
	for _, name := range names {
		p := b.site.peer(name)
		vs = append(vs, variant{name, p.kind, func() (float64, error) {
			chunks := b.size.chunks
			if b.warm {
				chunks = 1
			}
			flow, err := b.flow(p, chunks, b.size.chunk)
			if err != nil {
				return 0, err
			}
			first, end := flow[0].rate, flow[len(flow)-1].rate
			if !b.warm {
				s.of[before(name)] = append(s.of[before(name)], first)
				s.of[after(name)] = append(s.of[after(name)], end)
				last[name] = flow
			}
			return end / first, nil
		}})
	}
	rounds := min(5, b.size.rounds)
	if _, err := b.measure(vs, rounds); err != nil {
		return err
	}
	total := b.size.chunk * b.size.chunks
	t := &table{
		title: fmt.Sprintf("Draining under a held snapshot: before it, and after %s messages", count(float64(total))),
		notes: []string{
			fmt.Sprintf("Messages/s over %s messages, of one relay that runs throughout; medians of %d rounds, the ratio over the paired rounds.", count(float64(b.size.chunk)), rounds),
		},
		head: []string{"", "before", "after", "after ÷ before", "interval", "claim p50 ms, before", "after", "longest", "dead rows", "tables MB"},
	}
	for _, name := range names {
		r := newRatio("held_xmin", s, after(name), before(name))
		flow := last[name]
		first, end := flow[0], flow[len(flow)-1]
		t.rows = append(t.rows, []string{name, digits(median(s.of[before(name)])), digits(median(s.of[after(name)])), ratioText(r.value), span(r.lo, r.hi),
			digits(first.p50), digits(end.p50), digits(end.longest), count(end.dead), digits(end.megabytes)})
	}
	b.add(t)
	of := func(name string) ratio { return newRatio("held_xmin", s, after(name), before(name)) }
	b.ratio(worse(of(ownLatest), of(ownJournal)))
	b.add(series("Over time, under the held snapshot", last, names))
	return errors.Join(b.fullPasses(), b.steadily())
}

// A stretch is what was measured over one chunk of a flow.
type stretch struct {
	rate            float64
	p50, longest    float64 // of claims, ms; NaN where the peer does not tell
	dead, megabytes float64
}

func series(title string, flows map[string][]stretch, names []string) *table {
	t := &table{title: title, notes: []string{"The last round. Each line is one chunk; the first is from before the snapshot."},
		head: []string{"chunk"}}
	for _, name := range names {
		t.head = append(t.head, name+", messages/s", "claim p50 ms", "longest", "dead rows")
	}
	for i := range flows[names[0]] {
		row := []string{fmt.Sprint(i)}
		for _, name := range names {
			x := flows[name][i]
			row = append(row, digits(x.rate), digits(x.p50), digits(x.longest), count(x.dead))
		}
		t.rows = append(t.rows, row)
	}
	return t
}

// flow fills and drains chunks, the first before a snapshot is held and the
// others while it is. One relay runs all along; while a chunk is filled a gate
// holds its handlers back, so that the clock sees draining only.
func (b *bench) flow(p *peer, chunks, chunk int) ([]stretch, error) {
	if err := errors.Join(b.site.clear(b.ctx, p), b.site.settle(b.ctx, p)); err != nil {
		return nil, err
	}
	g := &gate{}
	g.shut()
	claims := &claimTimes{}
	stop, err := p.relay(b.ctx, relayOptions{relays: 1, prompt: true, claims: claims.add}, func(int64, []byte) { g.pass() })
	if err != nil {
		return nil, err
	}
	var flow []stretch
	var hold *snapshot
	for i := -1; i <= chunks && err == nil; i++ { // -1 warms up
		if i == 1 {
			if hold, err = b.hold(); err != nil {
				break
			}
		}
		claims.take()
		var x stretch
		if x.rate, err = b.chunk(p, g, chunk); err != nil {
			break
		}
		x.p50, x.longest = claims.take()
		x.dead, x.megabytes, err = b.site.weigh(b.ctx, p)
		if i >= 0 {
			flow = append(flow, x)
		}
	}
	g.open()
	if hold != nil {
		err = errors.Join(err, hold.end())
	}
	return flow, errors.Join(err, stop())
}

// chunk leaves n messages and times how long they take once the gate opens.
func (b *bench) chunk(p *peer, g *gate, n int) (float64, error) {
	target := g.passed.Load() + int64(n)
	done := g.tellAt(target)
	var err error
	if p.bulk != nil {
		for i := 0; i < n && err == nil; i += 1000 {
			k := min(1000, n-i)
			err = p.bulk(b.ctx, sequence.Add(int64(k))-int64(k)+1, k)
		}
	} else {
		err = p.fill(b.ctx, n)
	}
	if err != nil {
		return 0, err
	}
	// The relay has got as far as the gate, so that looking for work is no part
	// of the time.
	if err := b.until(func() bool { return g.waiting.Load() > 0 }); err != nil {
		return 0, fmt.Errorf("wait for the relay to claim: %w", err)
	}
	start := time.Now()
	g.open()
	err = await(b.ctx, done, func() error { return fmt.Errorf("%d messages of a chunk were not handled", target-g.passed.Load()) })
	took := time.Since(start)
	g.shut()
	if err != nil {
		return 0, err
	}
	if err := empty(b.ctx, b.site.left(b.ctx, p)); err != nil {
		return 0, err
	}
	if extra := g.passed.Load() - target; extra != 0 {
		return 0, fmt.Errorf("%d messages were handled twice", extra)
	}
	return float64(n) / took.Seconds(), nil
}

// until waits for a condition, and no longer than patience.
func (b *bench) until(ok func() bool) error {
	deadline := time.Now().Add(patience)
	for !ok() {
		if time.Now().After(deadline) {
			return fmt.Errorf("not within %s", patience)
		}
		select {
		case <-b.ctx.Done():
			return b.ctx.Err()
		case <-time.After(time.Millisecond):
		}
	}
	return nil
}

// A gate lets handlers pass while it is open, and counts them.
type gate struct {
	mu              sync.RWMutex // write-locked while it is shut
	passed, waiting atomic.Int64
	target          atomic.Int64
	done            atomic.Pointer[chan struct{}]
}

func (g *gate) shut() { g.mu.Lock() }
func (g *gate) open() { g.mu.Unlock() }

func (g *gate) pass() {
	g.waiting.Add(1)
	g.mu.RLock()
	g.waiting.Add(-1)
	if g.passed.Add(1) == g.target.Load() {
		close(*g.done.Load())
	}
	g.mu.RUnlock()
}

// tellAt returns a channel that is closed when so many have passed. The gate is
// shut.
func (g *gate) tellAt(n int64) <-chan struct{} {
	done := make(chan struct{})
	g.done.Store(&done)
	g.target.Store(n)
	return done
}

// claimTimes gathers how long claims that found something took.
type claimTimes struct {
	mu sync.Mutex
	ms []float64
}

func (c *claimTimes) add(rows int, took time.Duration) {
	if rows > 0 {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.ms = append(c.ms, milliseconds(took))
	}
}

// take returns the median and the longest since the last take.
func (c *claimTimes) take() (p50, longest float64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	p50, longest = median(c.ms), quantile(c.ms, 1)
	c.ms = nil
	return p50, longest
}

// A snapshot is held open by a transaction that has read and written, as a
// report or a migration would.
type snapshot struct {
	db *sql.DB
	tx *sql.Tx
}

func (b *bench) hold() (*snapshot, error) {
	db, err := openStd(b.site.dsn, 1, nil)
	if err != nil {
		return nil, err
	}
	tx, err := db.BeginTx(b.ctx, &sql.TxOptions{Isolation: sql.LevelRepeatableRead})
	if err != nil {
		return nil, errors.Join(err, db.Close())
	}
	var id string
	err = tx.QueryRowContext(b.ctx, `SELECT pg_current_xact_id()::text`).Scan(&id)
	if err != nil {
		return nil, errors.Join(err, tx.Rollback(), db.Close())
	}
	return &snapshot{db, tx}, nil
}

func (h *snapshot) end() error { return errors.Join(h.tx.Rollback(), h.db.Close()) }

// weigh returns the dead rows in a peer's tables, as the statistics have them,
// and the size of the tables with their indexes.
func (s *site) weigh(ctx context.Context, p *peer) (dead, megabytes float64, err error) {
	for _, table := range p.tables {
		var d, bytes float64
		err = errors.Join(err, s.std.QueryRowContext(ctx, `
			SELECT coalesce(pg_stat_get_dead_tuples($1::regclass), 0)::float8, pg_total_relation_size($1::regclass)::float8`, table).Scan(&d, &bytes))
		dead, megabytes = dead+d, megabytes+bytes/(1<<20)
	}
	return dead, megabytes, err
}

// fullPasses times the claims that look at every row, which a relay makes from
// time to time, without a snapshot held and with one.
func (b *bench) fullPasses() error {
	own := b.site.own
	t := &table{
		title: fmt.Sprintf("Full passes: a claim of 1,000 that looks at every row, ms, before and after %s messages under a held snapshot", count(float64(b.size.chunk*b.size.chunks))),
		notes: []string{"A relay makes one at least every 5 s, more often where they are cheap."},
		head:  []string{"", "before", "after"},
	}
	for _, name := range []string{ownLatest, ownJournal} {
		p := b.site.peer(name)
		if err := errors.Join(b.site.clear(b.ctx, p), b.site.settle(b.ctx, p)); err != nil {
			return err
		}
		pass := func() (float64, error) {
			if err := p.bulk(b.ctx, sequence.Add(1000)-999, 1000); err != nil {
				return 0, err
			}
			c := outbox.Claim{Channel: channel, Limit: 1000, Lease: time.Minute, Full: true}
			claim := own.store.ClaimRows
			if name == ownJournal {
				c.Channel += "-messages"
				claim = func(ctx context.Context, c outbox.Claim) (outbox.Claimed, error) {
					return own.store.ClaimMessages(ctx, nil, c)
				}
			}
			start := time.Now()
			got, err := claim(b.ctx, c)
			took := milliseconds(time.Since(start))
			if err == nil && len(got.Rows) != 1000 {
				err = fmt.Errorf("a full pass claimed %d rows of 1,000", len(got.Rows))
			}
			return took, err
		}
		first, err := pass()
		if err != nil {
			return err
		}
		if err := b.site.clear(b.ctx, p); err != nil {
			return err
		}
		hold, err := b.hold()
		if err != nil {
			return err
		}
		for range b.size.chunks {
			if err == nil {
				err = p.fill(b.ctx, b.size.chunk)
			}
			if err == nil {
				_, err = drainOne(b.ctx, p, relayOptions{relays: 1}, b.size.chunk, b.site.left(b.ctx, p))
			}
		}
		var end float64
		if err == nil {
			end, err = pass()
		}
		if err := errors.Join(err, hold.end()); err != nil {
			return err
		}
		t.rows = append(t.rows, []string{name, digits(first), digits(end)})
	}
	b.add(t)
	return nil
}

// steadily watches claims at a moderate rate under a held snapshot.
func (b *bench) steadily() error {
	const windows, batch = 6, 50
	t := &table{
		title: fmt.Sprintf("%s a second under a held snapshot: claims, ms", count(float64(b.size.steady))),
		head:  []string{"after", ownLatest + ", p50", "longest", "dead rows", ownJournal + ", p50", "longest", "dead rows"},
	}
	n := int(b.size.steadyFor.Seconds() * float64(b.size.steady) / windows / batch) // calls in a window
	rows := make([][]string, windows)
	for _, name := range []string{ownLatest, ownJournal} {
		p := b.site.peer(name)
		if err := errors.Join(b.site.clear(b.ctx, p), b.site.settle(b.ctx, p)); err != nil {
			return err
		}
		hold, err := b.hold()
		if err != nil {
			return err
		}
		claims := &claimTimes{}
		var handled atomic.Int64
		stop, err := p.relay(b.ctx, relayOptions{relays: 1, prompt: true, claims: claims.add}, func(int64, []byte) { handled.Add(1) })
		if err != nil {
			return errors.Join(err, hold.end())
		}
		for w := range windows {
			err = b.stageAt(b.size.steady/batch, n, func(int) error { return p.bulk(b.ctx, sequence.Add(batch)-batch+1, batch) })
			if err != nil {
				break
			}
			p50, longest := claims.take()
			var dead float64
			if dead, _, err = b.site.weigh(b.ctx, p); err != nil {
				break
			}
			if rows[w] == nil {
				rows[w] = []string{(time.Duration(w+1) * b.size.steadyFor / windows).String()}
			}
			rows[w] = append(rows[w], digits(p50), digits(longest), count(dead))
		}
		if err == nil {
			err = empty(b.ctx, b.site.left(b.ctx, p))
		}
		if err := errors.Join(err, stop(), hold.end()); err != nil {
			return err
		}
		if want := int64(windows * n * batch); handled.Load() != want {
			return fmt.Errorf("%s: %d of %d messages handled", name, handled.Load(), want)
		}
	}
	t.rows = rows
	b.add(t)
	return nil
}
