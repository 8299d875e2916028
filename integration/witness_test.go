package integration

import (
	"context"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// publication is one entry of one call of a publish function.
type publication struct {
	key     string
	version outbox.Version
	attempt int
	at      time.Time
}

// witness is a destination that remembers what it was sent. It acknowledges
// everything.
type witness struct {
	mu    sync.Mutex
	seen  []publication
	calls int
}

func (w *witness) publish(_ context.Context, batch []*outbox.Entry[string]) error {
	w.saw(batch)
	return nil
}

func (w *witness) saw(batch []*outbox.Entry[string]) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.calls++
	for _, e := range batch {
		w.seen = append(w.seen, publication{e.Key, e.Version, e.Attempt, time.Now()})
	}
}

// all returns what was published, in order.
func (w *witness) all() []publication {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]publication(nil), w.seen...)
}

// of returns what was published of a key, in order.
func (w *witness) of(key string) (list []publication) {
	for _, p := range w.all() {
		if p.key == key {
			list = append(list, p)
		}
	}
	return list
}

// len returns how many entries were published.
func (w *witness) len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.seen)
}

// newest returns the highest version published of each key.
func (w *witness) newest() map[string]outbox.Version {
	high := map[string]outbox.Version{}
	for _, p := range w.all() {
		high[p.key] = max(high[p.key], p.version)
	}
	return high
}

// twice returns the versions that were published more than once.
func (w *witness) twice() (list []string) {
	count := map[outbox.Version]int{}
	for _, p := range w.all() {
		if count[p.version]++; count[p.version] == 2 {
			list = append(list, fmt.Sprintf("%s@%d", p.key, p.version))
		}
	}
	return list
}

// logbook keeps what relays log and tell their observers.
type logbook struct {
	mu     sync.Mutex
	lines  []string
	events []outbox.Event
}

// Write takes one line of a slog.TextHandler.
func (l *logbook) Write(line []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.lines = append(l.lines, string(line))
	return len(line), nil
}

func (l *logbook) observe(e outbox.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.events = append(l.events, e)
}

// options returns relay options that write into the logbook.
func (l *logbook) options() outbox.RelayOptions {
	return outbox.RelayOptions{
		PollInterval: 50 * time.Millisecond,
		Logger:       slog.New(slog.NewTextHandler(l, nil)),
		Observe:      l.observe,
	}
}

// grep returns the lines that contain a text.
func (l *logbook) grep(text string) (lines []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, line := range l.lines {
		if strings.Contains(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

// noise returns the warnings and errors.
func (l *logbook) noise() []string { return append(l.grep("level=WARN"), l.grep("level=ERROR")...) }

// count counts events of a kind.
func (l *logbook) count(kind outbox.EventKind) (n int) {
	for range l.of(kind) {
		n++
	}
	return n
}

// of returns the events of a kind.
func (l *logbook) of(kind outbox.EventKind) (list []outbox.Event) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, e := range l.events {
		if e.Kind == kind {
			list = append(list, e)
		}
	}
	return list
}

// latestOn is a Latest over a store of the test's choice.
func latestOn(t testing.TB, store outbox.LatestStore, channel string) *outbox.Latest[string] {
	l, err := outbox.NewLatest(store, outbox.LatestOptions[string]{Channel: channel})
	require.NoError(t, err)
	return l
}

// entry returns the waiting entry of a key; false: none waits.
func entry(t testing.TB, l *outbox.Latest[string], key string) (outbox.EntryInfo, bool) {
	t.Helper()
	infos, err := l.List(context.Background(), "", 10_000)
	require.NoError(t, err)
	for _, info := range infos {
		if info.Key == key {
			return info, true
		}
	}
	return outbox.EntryInfo{}, false
}

// empty reports whether the outbox holds no entry at all.
func (s *site) empty() bool { return s.count(`SELECT count(*) FROM {t:entries}`) == 0 }

// constant is a Backoff.
func constant(d time.Duration) func(int) time.Duration {
	return func(int) time.Duration { return d }
}
