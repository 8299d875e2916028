package outbox

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// journalRig is a relay with a Journal channel "c" on a fake store, in a
// synctest bubble.
type journalRig struct {
	*rig
	store   *fakeJournal
	journal *Journal

	sent sendLog
}

// sendLog remembers what a send function was given.
type sendLog struct {
	mu   sync.Mutex
	list []sendCall
}

type sendCall struct {
	at      time.Time
	key     string
	attempt int
}

func (l *sendLog) add(r *Record) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.list = append(l.list, sendCall{time.Now(), r.Key, r.Attempt})
}

func (l *sendLog) keys() []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	ks := make([]string, len(l.list))
	for i, c := range l.list {
		ks[i] = c.key
	}
	return ks
}

func (l *sendLog) times(key string) (n int) {
	for _, k := range l.keys() {
		if k == key {
			n++
		}
	}
	return n
}

func newJournalRig(t *testing.T, o SendOptions, f SendFunc) *journalRig {
	t.Helper()
	g := bareJournalRig(t)
	g.relay = g.newRelay(RelayOptions{}, g.journal.Sender(g.recorded(f), o))
	return g
}

func newBatchRig(t *testing.T, o SendOptions, f BatchFunc) *journalRig {
	t.Helper()
	g := bareJournalRig(t)
	g.relay = g.newRelay(RelayOptions{}, g.journal.BatchSender(func(ctx context.Context, batch []*Delivery) error {
		for _, d := range batch {
			g.sent.add(&d.Record)
		}
		return f(ctx, batch)
	}, o))
	return g
}

func bareJournalRig(t *testing.T) *journalRig {
	t.Helper()
	store := newFakeJournal()
	g := &journalRig{rig: &rig{t: t, store: store.fakeStore}, store: store}
	j, err := NewJournal(store, JournalOptions{Channel: "c"})
	require.NoError(t, err)
	g.journal = j
	return g
}

func (g *journalRig) recorded(f SendFunc) SendFunc {
	return func(ctx context.Context, r *Record) (string, error) {
		g.sent.add(r)
		if f == nil {
			return "ref-" + r.Key, nil
		}
		return f(ctx, r)
	}
}

// put puts ungrouped messages, committed at once.
func (g *journalRig) put(keys ...string) []PutResult {
	g.t.Helper()
	return g.putGroup("", keys...)
}

func (g *journalRig) putGroup(group string, keys ...string) []PutResult {
	g.t.Helper()
	ms := make([]Message, len(keys))
	for i, k := range keys {
		ms[i] = Message{Key: k, Group: group, Payload: []byte(k)}
	}
	rs, err := g.journal.PutIn(g.t.Context(), committed{}, ms...)
	require.NoError(g.t, err)
	return rs
}

func (g *journalRig) runOnce() Pass {
	g.t.Helper()
	pass, err := g.relay.RunOnce(context.Background())
	require.NoError(g.t, err)
	return pass
}

// is requires a message to be in a state and returns it.
func (g *journalRig) is(key string, s State) fakeMessage {
	g.t.Helper()
	m, ok := g.store.message(key)
	require.True(g.t, ok, "%s is gone", key)
	require.Equal(g.t, s.String(), m.State.String(), "%s: %s", key, m.LastError)
	return m
}

// count is how many messages are in a state.
func (g *journalRig) count(s State) (n int) {
	g.store.mu.Lock()
	defer g.store.mu.Unlock()
	for _, m := range g.store.messages {
		if m.State == s {
			n++
		}
	}
	return n
}

// lapse makes a message one whose holder died.
func (g *journalRig) lapse(keys ...string) {
	g.t.Helper()
	for _, k := range keys {
		_, err := g.journal.Begin(context.Background(), k, time.Second)
		require.NoError(g.t, err)
	}
	time.Sleep(time.Second + time.Millisecond)
}

func numbered(prefix string, n int) []string {
	ks := make([]string, n)
	for i := range ks {
		ks[i] = fmt.Sprintf("%s%03d", prefix, i)
	}
	return ks
}

func sorted(ks []string) []string {
	ks = slices.Clone(ks)
	slices.Sort(ks)
	return ks
}
