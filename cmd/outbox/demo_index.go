package main

import (
	"context"
	"encoding/json"
	"fmt"
	mrand "math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

// What the index and the network before it do to those who call.
const (
	refusedPart  = 0.02 // of entries: refused one by one
	repeatedPart = 0.05 // of requests: delivered once more, late
	repeatLate   = 500 * time.Millisecond
	networkDelay = 4 * time.Millisecond // each way, at most
)

type indexState int

const (
	indexUp     indexState = iota
	indexDown              // 503: the destination as a whole cannot be reached
	indexBroken            // 500: this call failed
)

// A posting is one entry, as the relay sends it.
type posting struct {
	Key     string         `json:"key"`
	Version outbox.Version `json:"version"`
	Deleted bool           `json:"deleted"`
	Order   order          `json:"order"`
}

// An answer is that to one posting.
type answer struct {
	OK    bool   `json:"ok"`
	Error string `json:"error,omitempty"`
}

// index is a service that keeps the newest state of each order, in a table
// that package sink guards. It also is the unreliable network before it.
type index struct {
	sink   *sink.Sink
	url    string
	server *http.Server
	late   sync.WaitGroup // requests to be repeated

	mu     sync.Mutex
	rng    *mrand.Rand
	state  indexState
	coming int // requests in the works, repetitions included
	armed  *strike
	log    deliveries
}

// deliveries is what came, as the index saw it.
type deliveries struct {
	arrived    map[outbox.Version]time.Time // when each version first came
	newest     map[string]posting           // the newest by order
	applied    int
	duplicates int // of the version that the index had
	outdated   int // of an older one: refused
	refused    int // entries that the index did not take at random
	failed     int // requests answered with 503 or 500
	repeated   int // requests that came again, late
	problems   []string
}

// moment is when a strike hits the relay.
type moment int

const (
	strikeBefore moment = iota // the index has seen nothing of the batch
	strikeAfter                // the index has it, the relay was not told
)

// A strike is one call of hit, in the middle of a publication.
type strike struct {
	at   moment
	hit  func() (pid int)
	done chan [2]int // the process, and the size of the batch
}

func openIndex(s *site, seed uint64) (*index, error) {
	x := &index{
		sink: s.sink, rng: mrand.New(mrand.NewPCG(seed, 1<<32)),
		log: deliveries{arrived: map[outbox.Version]time.Time{}, newest: map[string]posting{}},
	}
	var err error
	x.url, x.server, err = serve(map[string]http.HandlerFunc{"POST": x.replace})
	return x, err
}

func (x *index) close() {
	x.server.Close()
	x.late.Wait()
}

func (x *index) set(s indexState) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.state = s
}

// quiet reports whether no request is in the works.
func (x *index) quiet() bool {
	x.mu.Lock()
	defer x.mu.Unlock()
	return x.coming == 0
}

// strike calls hit in the middle of the next publication, and returns what it
// did and to how many entries; zeros where no publication came.
func (x *index) strike(ctx context.Context, at moment, hit func() int) (pid, batch int, err error) {
	s := &strike{at: at, hit: hit, done: make(chan [2]int, 1)}
	x.mu.Lock()
	x.armed = s
	x.mu.Unlock()
	defer func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.armed = nil
	}()
	select {
	case r := <-s.done:
		return r[0], r[1], nil
	case <-time.After(strikeWithin):
		return 0, 0, nil
	case <-ctx.Done():
		return 0, 0, ctx.Err()
	}
}

// struck reports whether the relay that waits for an answer was hit.
func (x *index) struck(at moment, batch int) bool {
	x.mu.Lock()
	s := x.armed
	if s == nil || s.at != at {
		x.mu.Unlock()
		return false
	}
	x.armed = nil
	x.mu.Unlock()
	s.done <- [2]int{s.hit(), batch}
	return true
}

// replace is the index's only verb: take these states, where they are newer.
func (x *index) replace(w http.ResponseWriter, r *http.Request) {
	defer x.enter()()
	var batch []posting
	if err := json.NewDecoder(r.Body).Decode(&batch); err != nil {
		http.Error(w, "the body is not a list of postings", http.StatusBadRequest)
		return
	}
	time.Sleep(x.delay())
	if status := x.failure(); status != 0 {
		http.Error(w, http.StatusText(status), status)
		return
	}
	if x.struck(strikeBefore, len(batch)) {
		panic(http.ErrAbortHandler) // hangs up
	}
	answers, err := x.take(r.Context(), batch)
	if err != nil {
		http.Error(w, err.Error(), http.StatusInternalServerError)
		return
	}
	x.repeat(batch, answers)
	if x.struck(strikeAfter, len(batch)) {
		panic(http.ErrAbortHandler)
	}
	time.Sleep(x.delay())
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(answers) // an answer that does not arrive is the relay's affair
}

// enter notes a request in the works, and returns what notes its end.
func (x *index) enter() func() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.coming++
	return func() {
		x.mu.Lock()
		defer x.mu.Unlock()
		x.coming--
	}
}

func (x *index) delay() time.Duration {
	x.mu.Lock()
	defer x.mu.Unlock()
	return time.Duration(x.rng.Int64N(int64(networkDelay)))
}

// failure returns the status of a request that fails as a whole, or 0.
func (x *index) failure() int {
	x.mu.Lock()
	defer x.mu.Unlock()
	switch x.state {
	case indexDown:
		x.log.failed++
		return http.StatusServiceUnavailable
	case indexBroken:
		x.log.failed++
		return http.StatusInternalServerError
	}
	return 0
}

// take writes a batch, but for entries that are refused at random.
func (x *index) take(ctx context.Context, batch []posting) ([]answer, error) {
	x.mu.Lock()
	defer x.mu.Unlock()
	answers := make([]answer, len(batch))
	var taken []posting
	for i, p := range batch {
		if x.rng.Float64() < refusedPart {
			x.log.refused++
			answers[i].Error = "the index is busy with this one"
			continue
		}
		answers[i].OK = true
		taken = append(taken, p)
	}
	return answers, x.write(ctx, taken)
}

// write writes postings and enters them in the log. The caller hanging up does
// not stop it half-way: the log would not know what was written.
func (x *index) write(ctx context.Context, ps []posting) error {
	rows := make([]sink.Row, len(ps))
	for i, p := range ps {
		row, err := sink.JSON(p.Key, p.Version, p.Deleted, p.Order)
		if err != nil {
			return err
		}
		rows[i] = row
	}
	result, err := x.sink.Apply(context.WithoutCancel(ctx), rows)
	if err != nil {
		return err
	}
	if applied := x.log.enter(ps); applied != result.Applied {
		x.log.problems = append(x.log.problems,
			fmt.Sprintf("of %d entries %d were newer than what the index had, but it took %d", len(ps), applied, result.Applied))
	}
	return nil
}

// enter returns how many of ps were newer than what the index had.
func (l *deliveries) enter(ps []posting) (applied int) {
	now := time.Now()
	for _, p := range ps {
		if _, known := l.arrived[p.Version]; !known {
			l.arrived[p.Version] = now
		}
		switch have := l.newest[p.Key]; {
		case p.Version < have.Version:
			l.outdated++
		case p.Version == have.Version:
			l.duplicates++
		default:
			applied++
			if !p.Deleted && !have.Deleted && p.Order.Revision <= have.Order.Revision {
				l.problems = append(l.problems, fmt.Sprintf("%s went back from revision %d to %d although the version rose",
					p.Key, have.Order.Revision, p.Order.Revision))
			}
			l.newest[p.Key] = p
		}
	}
	l.applied += applied
	return applied
}

// repeat lets the network deliver some requests once more, when newer ones may
// have overtaken them.
func (x *index) repeat(batch []posting, answers []answer) {
	x.mu.Lock()
	again := x.rng.Float64() < repeatedPart
	x.mu.Unlock()
	if !again {
		return
	}
	taken := slices.Clone(batch[:0:0])
	for i, p := range batch {
		if answers[i].OK {
			taken = append(taken, p)
		}
	}
	leave := x.enter()
	x.late.Go(func() {
		defer leave()
		time.Sleep(repeatLate)
		x.mu.Lock()
		defer x.mu.Unlock()
		x.log.repeated++
		if err := x.write(context.Background(), taken); err != nil {
			x.log.problems = append(x.log.problems, fmt.Sprintf("repeated request: %v", err))
		}
	})
}
