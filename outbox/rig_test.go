package outbox

import (
	"bytes"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

// rig is a relay on a fake store, in a synctest bubble.
type rig struct {
	t      *testing.T
	store  *fakeStore
	latest *Latest[string]
	relay  *Relay

	mu     sync.Mutex
	events []Event
	calls  []publishCall
	log    bytes.Buffer

	cancel context.CancelFunc
	done   chan error
}

// publishCall is what a publish function was given.
type publishCall struct {
	at   time.Time
	keys []string
	vs   []Version
}

func bubble(t *testing.T, f func(t *testing.T)) {
	t.Helper()
	synctest.Test(t, f)
}

func newRig(t *testing.T, ro RelayOptions, po PublishOptions, f PublishFunc[string]) *rig {
	t.Helper()
	g := &rig{t: t, store: newFakeStore()}
	g.latest = g.channel("c")
	g.relay = g.newRelay(ro, g.latest.Publisher(g.record(f), po))
	return g
}

func (g *rig) channel(name string) *Latest[string] {
	l, err := NewLatest(g.store, LatestOptions[string]{Channel: name})
	require.NoError(g.t, err)
	return l
}

func (g *rig) newRelay(ro RelayOptions, as ...Attachment) *Relay {
	if ro.Logger == nil {
		ro.Logger = slog.New(slog.NewTextHandler(lockedWriter{g}, nil))
	}
	observe := ro.Observe
	ro.Observe = func(e Event) {
		g.mu.Lock()
		g.events = append(g.events, e)
		g.mu.Unlock()
		if observe != nil {
			observe(e)
		}
	}
	r, err := NewRelay(ro, as...)
	require.NoError(g.t, err)
	return r
}

type lockedWriter struct{ g *rig }

func (w lockedWriter) Write(p []byte) (int, error) {
	w.g.mu.Lock()
	defer w.g.mu.Unlock()
	return w.g.log.Write(p)
}

// record remembers what f is called with.
func (g *rig) record(f PublishFunc[string]) PublishFunc[string] {
	return func(ctx context.Context, batch []*Entry[string]) error {
		call := publishCall{at: time.Now()}
		for _, e := range batch {
			call.keys = append(call.keys, e.Key)
			call.vs = append(call.vs, e.Version)
		}
		g.mu.Lock()
		g.calls = append(g.calls, call)
		g.mu.Unlock()
		if f == nil {
			return nil
		}
		return f(ctx, batch)
	}
}

func (g *rig) start() {
	ctx, cancel := context.WithCancel(context.Background())
	g.cancel, g.done = cancel, make(chan error, 1)
	go func() { g.done <- g.relay.Run(ctx) }()
	synctest.Wait()
}

func (g *rig) stop() error {
	g.cancel()
	return <-g.done
}

// stage stages keys, committed at once, each with its key as the value.
func (g *rig) stage(keys ...string) []Version {
	items := make([]Item[string], len(keys))
	for i, k := range keys {
		items[i] = Item[string]{Key: k, Value: k}
	}
	vs, err := g.latest.StageIn(context.Background(), committed{}, items...)
	require.NoError(g.t, err)
	return vs
}

// committed is a transaction that is committed at once.
type committed struct{}

func (committed) Query(context.Context, string, ...any) (Rows, error) { panic("not SQL") }

func (g *rig) published() []publishCall {
	g.mu.Lock()
	defer g.mu.Unlock()
	return append([]publishCall(nil), g.calls...)
}

// times is how often a key was given to the publish function.
func (g *rig) times(key string) (n int) {
	for _, c := range g.published() {
		for _, k := range c.keys {
			if k == key {
				n++
			}
		}
	}
	return n
}

func (g *rig) seen(k EventKind) (list []Event) {
	g.mu.Lock()
	defer g.mu.Unlock()
	for _, e := range g.events {
		if e.Kind == k {
			list = append(list, e)
		}
	}
	return list
}

func (g *rig) logged() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.log.String()
}

func keys(n int) []string {
	ks := make([]string, n)
	for i := range ks {
		ks[i] = fmt.Sprintf("k%05d", i)
	}
	return ks
}
