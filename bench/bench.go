package main

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// sizes say how much is measured. Rows are those of one round of the fastest
// variants.
type sizes struct {
	rounds    int           // of what has a target
	few       int           // of what has none
	write     time.Duration // of one round of writers
	drain     int           // rows
	relays    []int         // how many at once
	batches   []int         // rows of a claim
	latency   time.Duration // of one round
	backlog   int           // rows of the greatest backlog, and of the scheduled
	ended     int           // dead, and leased
	chunk     int           // rows of a chunk that flows under a held snapshot
	chunks    int
	steady    int // rows a second of the slow flow under a held snapshot
	steadyFor time.Duration
	hot       int // cycles
	sqlite    int // rows of a drain on SQLite
	cost      int // messages
	idle      time.Duration
}

var (
	full = sizes{rounds: 7, few: 3, write: time.Second, drain: 100_000, relays: []int{1, 2, 4}, batches: []int{50, 100, 500, 1000, 5000}, latency: 3 * time.Second, backlog: 1_000_000, ended: 100_000,
		chunk: 20_000, chunks: 10, steady: 1000, steadyFor: time.Minute, hot: 10_000, sqlite: 30_000, cost: 4000, idle: 10 * time.Second}
	quick = sizes{rounds: 3, few: 1, write: 150 * time.Millisecond, drain: 10_000, relays: []int{1, 4}, batches: []int{100, 1000}, latency: 300 * time.Millisecond, backlog: 100_000, ended: 10_000,
		chunk: 5000, chunks: 4, steady: 1000, steadyFor: time.Second, hot: 500, sqlite: 6000, cost: 400, idle: 3 * time.Second}
)

// A bench is one run.
type bench struct {
	ctx    context.Context // of every statement of every variant
	size   sizes
	server *server
	site   *site
	*report
	warm bool // this round warms up: it may be short, and does not count
}

// rows returns n, or less in a round that warms up.
func (b *bench) rows(n int) int {
	if b.warm {
		return max(1, n/10)
	}
	return n
}

func (b *bench) span(d time.Duration) time.Duration {
	if b.warm {
		return d / 4
	}
	return d
}

// A variant is measured once a round: higher is better, unless a ratio of it
// says otherwise.
type variant struct {
	name string
	kind kind
	run  func() (float64, error)
}

// samples are what variants reached, by their names, round by round: values of
// the same index are of the same round.
type samples struct {
	variants []variant
	of       map[string][]float64
}

// measure runs each variant in turn, n times over, after a round that warms
// up. Each round begins with another variant, so that none always runs in the
// wake of the same one.
func (b *bench) measure(vs []variant, n int) (samples, error) {
	s := samples{vs, map[string][]float64{}}
	for round := range n + 1 {
		b.warm = round == 0
		for i := range vs {
			v := vs[(i+round)%len(vs)]
			if err := b.ctx.Err(); err != nil {
				return s, err
			}
			runtime.GC()
			x, err := v.run()
			if err != nil {
				return s, fmt.Errorf("%s: %w", v.name, err)
			}
			if round > 0 {
				s.of[v.name] = append(s.of[v.name], x)
			}
		}
	}
	b.warm = false
	return s, nil
}

// best returns the name of the variant of a kind with the highest median.
func (s samples) best(k kind) string {
	var name string
	for _, v := range s.variants {
		if v.kind == k && (name == "" || median(s.of[v.name]) > median(s.of[name])) {
			name = v.name
		}
	}
	return name
}

// negative returns the same samples with the sign turned, for what is better
// when it is lower.
func (s samples) negative() samples {
	t := samples{s.variants, map[string][]float64{}}
	for name, xs := range s.of {
		for _, x := range xs {
			t.of[name] = append(t.of[name], -x)
		}
	}
	return t
}

// compared makes a table of samples: the median, the quartiles, and the ratio
// to one variant, the reference, over the paired rounds, with its interval.
func (s samples) compared(title, unit, reference string, rounds int, notes ...string) *table {
	t := &table{
		title: title,
		notes: append(notes, fmt.Sprintf("Medians and quartiles of %d rounds; the ratio is the median over the paired rounds, with its interval.", rounds)),
		head:  []string{"", unit, "quartiles", "÷ " + reference, "interval"},
	}
	for _, v := range s.variants {
		x := s.of[v.name]
		r := newRatio("", s, v.name, reference)
		t.rows = append(t.rows, []string{v.name, digits(median(x)), digits(quantile(x, 0.25)) + "–" + digits(quantile(x, 0.75)),
			ratioText(r.value), span(r.lo, r.hi)})
		t.bars = append(t.bars, bar{v.name, median(x), v.kind})
	}
	return t
}

// describe is a table of peers' settings.
func describe(title string, ps []*peer) *table {
	t := &table{title: title, head: []string{"", "settings", "what it does not do that this library does"}}
	for _, p := range ps {
		t.rows = append(t.rows, []string{p.name, p.settings, p.lacks})
	}
	return t
}

// machine tells what everything ran on.
func (b *bench) machine() ([]string, error) {
	about := []string{fmt.Sprintf("%s, %s/%s, %d CPUs, shared by the clients and the server", runtime.Version(), runtime.GOOS, runtime.GOARCH, runtime.NumCPU())}
	line := "PostgreSQL"
	for _, name := range append([]string{"server_version=", "fsync=", "synchronous_commit=", "full_page_writes="}, settings...) {
		name, _, _ = strings.Cut(name, "=")
		var value string
		if err := b.site.std.QueryRowContext(b.ctx, `SELECT current_setting($1)`, name).Scan(&value); err != nil {
			return nil, err
		}
		line += fmt.Sprintf(", %s %s", name, value)
	}
	about = append(about, line)
	if info, ok := debug.ReadBuildInfo(); ok {
		var deps []string
		for _, d := range info.Deps {
			for _, name := range []string{"riverqueue/river", "watermill-sql/v4", "vgarvardt/gue/v5", "maragu.dev/goqite", "mikestefanello/backlite", "jackc/pgx/v5", "modernc.org/sqlite"} {
				if strings.HasSuffix(d.Path, name) {
					deps = append(deps, d.Path+" "+d.Version)
				}
			}
		}
		about = append(about, strings.Join(deps, ", "))
	}
	return append(about, fmt.Sprintf("payloads of %d bytes; every statement with the same cancellable context", len(payload(12345)))), nil
}

// writers runs f from n goroutines for a while, with numbers that never repeat,
// and returns calls a second.
func (b *bench) writers(n int, d time.Duration, f func(ctx context.Context, seq int64) error) (float64, error) {
	var done atomic.Int64
	var mu sync.Mutex
	var failed error
	var wg sync.WaitGroup
	start := time.Now()
	for range n {
		wg.Go(func() {
			for time.Since(start) < d {
				if err := f(b.ctx, sequence.Add(1)); err != nil {
					mu.Lock()
					failed = errors.Join(failed, err)
					mu.Unlock()
					return
				}
				done.Add(1)
			}
		})
	}
	wg.Wait()
	return float64(done.Load()) / time.Since(start).Seconds(), failed
}

// sequence numbers messages across all rounds: above those that fills use.
var sequence = func() *atomic.Int64 {
	var n atomic.Int64
	n.Store(1_000_000_000)
	return &n
}()

// patience is how long a drain may take before it counts as stuck.
const patience = 2 * time.Minute

// drainOne times how long a relay takes until n waiting messages are handled
// and acknowledged, and returns messages a second.
func drainOne(ctx context.Context, p *peer, o relayOptions, n int, waiting func() (int, error)) (float64, error) {
	var handled atomic.Int64
	done := make(chan struct{})
	start := time.Now()
	stop, err := p.relay(ctx, o, func(int64, []byte) {
		if handled.Add(1) == int64(n) {
			close(done)
		}
	})
	if err != nil {
		return 0, err
	}
	err = await(ctx, done, func() error {
		return fmt.Errorf("%d of %d messages handled in %s", handled.Load(), n, patience)
	})
	if err == nil {
		err = empty(ctx, waiting)
	}
	took := time.Since(start)
	if err := errors.Join(err, stop()); err != nil {
		return 0, err
	}
	if h := handled.Load(); h != int64(n) {
		return 0, fmt.Errorf("%d messages handled of %d: some twice", h, n)
	}
	return float64(n) / took.Seconds(), nil
}

// await waits for done, and no longer than patience.
func await(ctx context.Context, done <-chan struct{}, late func() error) error {
	timer := time.NewTimer(patience)
	defer timer.Stop()
	select {
	case <-done:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return late()
	}
}

// empty waits until nothing waits any more: all was acknowledged.
func empty(ctx context.Context, waiting func() (int, error)) error {
	deadline := time.Now().Add(patience)
	for {
		n, err := waiting()
		if err != nil || n == 0 {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d messages were handled and not acknowledged", n)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(2 * time.Millisecond):
		}
	}
}

// left counts what waits at a peer on Postgres.
func (s *site) left(ctx context.Context, p *peer) func() (int, error) {
	return func() (n int, err error) {
		err = s.std.QueryRowContext(ctx, p.waiting).Scan(&n)
		return n, err
	}
}

// drainPeer fills a peer with n rows, or its share of them, and drains it.
func (b *bench) drainPeer(p *peer, o relayOptions, n int) (float64, error) {
	n = max(1, n/max(1, p.share))
	if err := b.site.prepare(b.ctx, p, n); err != nil {
		return 0, err
	}
	return drainOne(b.ctx, p, o, n, b.site.left(b.ctx, p))
}
