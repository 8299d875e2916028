//go:build unix

package integration

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

// A visit is one entry or message at the destination.
type visit struct {
	Relay, Channel, Key, Group string
	Number                     int64 // its version, or its number
	Attempt                    int
	Token                      outbox.Token // of its lease; of messages only
	Ambiguous                  bool
	Value                      string // of an entry
	Deleted                    bool

	at     string
	answer answer
}

func (v visit) item() item { return item{v.Channel, v.Key} }

// An answer is what a destination makes of a visit, and what the relay learns of it.
type answer string

const (
	taken    answer = "taken"
	slow     answer = "taken, slowly" // past the attempt's time, as a rule
	lost     answer = "taken, then an error"
	torn     answer = "taken, then a panic"
	gone     answer = "taken, then a goroutine's exit"
	refused  answer = "refused"
	later    answer = "refused, later"
	deferred answer = "not called"
	down     answer = "unavailable"
	never    answer = "refused for good"
	held     answer = "not called, as one before it in its group failed"
)

// took reports whether it took effect.
func (a answer) took() bool { return a == taken || a == slow || a == lost || a == torn || a == gone }

// refunds reports whether the attempt does not count.
func (a answer) refunds() bool { return a == deferred || a == down }

// whole reports whether the function as a whole fails by it.
func (a answer) whole() bool { return a == lost || a == torn || a == gone }

// err is what the function returns or marks.
func (a answer) err() error {
	switch a {
	case taken, slow:
		return nil
	case later:
		return outbox.RetryAfter(20*time.Millisecond, errRefused)
	case deferred:
		return outbox.Defer(10 * time.Millisecond)
	case down:
		return outbox.Unavailable(errRefused)
	case never:
		return outbox.Permanent(errRefused)
	}
	return errRefused
}

// endOf ends a call in the way that one of its answers asks for.
func endOf(answers []answer) error {
	for _, a := range answers {
		switch a {
		case torn:
			panic("torn")
		case gone:
			runtime.Goexit()
		case lost:
			return errors.New("no answer")
		}
	}
	return nil
}

// endpoint is the destination of all channels. It outlives every relay, and
// sees the sends of all of them in one order. States go into a guarded table.
type endpoint struct {
	od   *ordeal
	url  string
	calm atomic.Bool // it takes everything
	db   *sql.DB     // of its table
	sink *sink.Sink

	mu      sync.Mutex
	visits  []visit
	arrived map[item]int
	refused map[item]int // for good
	down    map[string]time.Time
}

func newEndpoint(od *ordeal) *endpoint {
	e := &endpoint{od: od, arrived: map[item]int{}, refused: map[item]int{}, down: map[string]time.Time{}}
	dsn := dialect.SQLiteDSN(filepath.Join(od.t.TempDir(), "sink.db"))
	s := &site{t: od.t, dialect: dialect.SQLite(), driver: "sqlite", dsn: strings.Replace(dsn, "synchronous(FULL)", "synchronous(OFF)", 1)}
	e.db = s.open()
	var err error
	e.sink, err = sink.New(e.db, s.dialect, sink.Options{Table: "mirror"})
	require.NoError(od.t, err)
	require.NoError(od.t, e.sink.Create(od.t.Context()))
	server := httptest.NewServer(e)
	od.t.Cleanup(server.Close)
	e.url = server.URL
	return e
}

func (e *endpoint) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var vs []visit
	if err := json.NewDecoder(r.Body).Decode(&vs); err != nil {
		return // the relay died as it sent this
	}
	answers, err := e.answer(r.Context(), vs)
	if err != nil {
		return
	}
	_ = json.NewEncoder(w).Encode(answers)
}

// answer takes visits, or not. Chance depends on the visit alone, so that a
// run repeats itself as far as it can.
func (e *endpoint) answer(ctx context.Context, vs []visit) ([]answer, error) {
	chance := rand.New(rand.NewPCG(e.od.seed, hash(fmt.Sprint(vs[0].item(), vs[0].Number, vs[0].Attempt))))
	if !pause(ctx, time.Duration(chance.Int64N(int64(3*time.Millisecond)))) {
		return nil, ctx.Err()
	}
	answers := e.take(vs)
	length := 3 * time.Millisecond
	switch {
	case slices.Contains(answers, slow):
		length = 2 * ordealLease
	case chance.IntN(5) == 0: // long enough for something to happen
		length = ordealLease / 4
	}
	pause(ctx, time.Duration(chance.Int64N(int64(length))))
	return answers, nil
}

func (e *endpoint) take(vs []visit) []answer {
	e.mu.Lock()
	defer e.mu.Unlock()
	answers := make([]answer, len(vs))
	var states []sink.Row
	failed := map[string]bool{}
	for i, v := range vs {
		if v.Group != "" && failed[v.Group] {
			answers[i] = held
			continue
		}
		v.at, v.answer = e.od.at(), e.choose(v)
		answers[i], failed[v.Group] = v.answer, v.answer != taken && v.answer != slow
		e.visits = append(e.visits, v)
		if v.answer == never {
			e.refused[v.item()]++
		}
		if !v.answer.took() {
			continue
		}
		e.arrived[v.item()]++
		if isState(v.Channel) {
			states = append(states, sink.Row{Key: v.Channel + " " + v.Key, Version: v.Number, Payload: []byte(v.Value), Deleted: v.Deleted})
		}
	}
	if len(states) > 0 {
		if _, err := e.sink.Apply(context.Background(), states); err != nil {
			e.od.fail(vs[0].item(), "guarded sink: %v", err)
		}
	}
	return answers
}

func isState(channel string) bool { return channel == stateChannel || channel == windowChannel }

// choose is by chance, but for what the state of things demands.
func (e *endpoint) choose(v visit) answer {
	if e.calm.Load() {
		return taken
	}
	if time.Now().Before(e.down[v.Channel]) {
		return down
	}
	switch n := rand.New(rand.NewPCG(e.od.seed, hash(fmt.Sprint(v.item(), v.Number, v.Attempt, v.Ambiguous)))).IntN(100); {
	case n < 3:
		return lost
	case n < 5:
		return torn
	case n < 6:
		return gone
	case n < 8:
		return refused
	case n < 14:
		return later
	case n < 20:
		return deferred
	case n < 22 && !isState(v.Channel) && e.refused[v.item()] == 0:
		return never
	case n < 24:
		return slow
	}
	return taken
}

// pause waits, and reports whether ctx is still wanted.
func pause(ctx context.Context, d time.Duration) bool {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
	return ctx.Err() == nil
}

func hash(text string) uint64 {
	h := fnv.New64a()
	_, _ = h.Write([]byte(text))
	return h.Sum64()
}

// goDown makes a channel's destination unavailable for a while.
func (e *endpoint) goDown(channel string, d time.Duration) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.down[channel] = time.Now().Add(d)
}

func (e *endpoint) has(it item) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.arrived[it] > 0
}

func (e *endpoint) count() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.visits)
}

// all returns the visits so far, in their order.
func (e *endpoint) all() []visit {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.visits[:len(e.visits):len(e.visits)]
}

func (e *endpoint) history(it item) (lines []string) {
	for _, v := range e.all() {
		if v.item() == it {
			lines = append(lines, fmt.Sprintf("%s  visit by %s: number %d, attempt %d, ambiguous %t, token %d, %s", v.at, v.Relay, v.Number, v.Attempt, v.Ambiguous, v.Token, v.answer))
		}
	}
	return lines
}
