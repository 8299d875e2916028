package integration

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// journal is a Journal of the site's store.
func (s *site) journal(channel string) *outbox.Journal {
	s.t.Helper()
	return journalOn(s.t, s.store, channel)
}

func journalOn(t testing.TB, store outbox.JournalStore, channel string) *outbox.Journal {
	t.Helper()
	j, err := outbox.NewJournal(store, outbox.JournalOptions{Channel: channel})
	require.NoError(t, err)
	return j
}

// messageChannel names a Journal channel to a store.
func messageChannel(name string) outbox.Channel {
	return outbox.Channel{System: outbox.SystemJournal, Name: name}
}

// put commits messages.
func (s *site) put(j *outbox.Journal, ms ...outbox.Message) []outbox.PutResult {
	s.t.Helper()
	tx := s.begin()
	rs, err := j.PutMany(context.Background(), tx, ms)
	require.NoError(s.t, err)
	require.NoError(s.t, tx.Commit())
	return rs
}

// post commits messages without a group, one for each key.
func (s *site) post(j *outbox.Journal, keys ...string) {
	s.t.Helper()
	ms := make([]outbox.Message, len(keys))
	for i, key := range keys {
		ms[i] = outbox.Message{Key: key, Payload: []byte("of " + key)}
	}
	s.put(j, ms...)
}

// letters are n messages with keys prefix0000000 and so on, spread over groups
// "group 0" and so on; with no groups they have no order.
func letters(prefix string, n, groups int) []outbox.Message {
	ms := make([]outbox.Message, n)
	for i := range ms {
		ms[i] = outbox.Message{Key: fmt.Sprintf("%s%07d", prefix, i), Payload: []byte("twenty bytes of text")}
		if groups > 0 {
			ms[i].Group = fmt.Sprint("group ", i%groups)
		}
	}
	return ms
}

// messages is the whole content of the journal.
func (s *site) messages() []string {
	return append(s.table(`SELECT * FROM {t:messages} ORDER BY channel, key`), s.table(`SELECT * FROM {t:groups} ORDER BY channel, grp`)...)
}

// wipe empties the journal.
func (s *site) wipe() {
	for _, table := range []string{`{t:messages}`, `{t:groups}`} {
		s.exec(s.dialect.Render(map[bool]string{true: `TRUNCATE `, false: `DELETE FROM `}[s.postgres()] + table))
	}
}

// states tells the states of a channel's messages.
func (s *site) states(j *outbox.Journal) map[string]outbox.State {
	s.t.Helper()
	states := map[string]outbox.State{}
	for _, r := range s.records(j) {
		states[r.Key] = r.State
	}
	return states
}

// records are a channel's messages, in the order of their numbers.
func (s *site) records(j *outbox.Journal) (all []outbox.Record) {
	s.t.Helper()
	for after := ""; ; {
		rs, next, err := j.List(context.Background(), outbox.Filter{After: after, Limit: 10_000})
		require.NoError(s.t, err)
		all = append(all, rs...)
		if after = next; after == "" {
			return all
		}
	}
}

// unfinished counts the messages of all channels that are neither sent nor ended.
func (s *site) unfinished() int {
	return s.count(`SELECT count(*) FROM {t:messages} WHERE outcome = 0`)
}

func (s *site) get(j *outbox.Journal, key string) outbox.Record {
	s.t.Helper()
	r, err := j.Get(context.Background(), key)
	require.NoError(s.t, err)
	return r
}

// take claims messages for a test that plays the relay.
func (s *site) take(channel string, limit int, lease time.Duration) []outbox.Row {
	s.t.Helper()
	claimed, err := s.store.ClaimMessages(context.Background(), nil, outbox.Claim{Channel: channel, Limit: limit, Lease: lease, Full: true})
	require.NoError(s.t, err)
	return claimed.Rows
}

// finish settles messages, all with one outcome; those that were sent are kept.
func (s *site) finish(channel string, o outbox.Outcome, delay time.Duration, rows ...outbox.Row) []outbox.Result {
	s.t.Helper()
	results, err := s.store.Settle(context.Background(), messageChannel(channel), endings(o, delay, rows))
	require.NoError(s.t, err)
	return results
}

func endings(o outbox.Outcome, delay time.Duration, rows []outbox.Row) []outbox.Settlement {
	ss := make([]outbox.Settlement, len(rows))
	for i, r := range rows {
		ss[i] = outbox.Settlement{Row: r, Outcome: o, Delay: delay, Keep: true}
		if o != outbox.OutcomeDone {
			ss[i].Error = "why"
		}
	}
	return ss
}

// sendOnce makes one pass of a relay over a journal.
func (s *site) sendOnce(j *outbox.Journal, f outbox.SendFunc, o outbox.SendOptions) outbox.Pass {
	s.t.Helper()
	return s.pass(j.Sender(f, o))
}

func (s *site) pass(a outbox.Attachment) outbox.Pass {
	s.t.Helper()
	r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, a)
	require.NoError(s.t, err)
	pass, err := r.RunOnce(context.Background())
	require.NoError(s.t, err)
	return pass
}

// senders runs n relays, each with a pool of its own, and returns how to stop
// them.
func (s *site) senders(n int, book *logbook, channel string, f outbox.SendFunc, o outbox.SendOptions) (stop func()) {
	s.t.Helper()
	var stops []func() error
	for range n {
		stops = append(stops, s.run(book.options(), journalOn(s.t, s.newStore(sqlstore.Options{}), channel).Sender(f, o)))
	}
	return func() {
		for _, stop := range stops {
			require.NoError(s.t, stop())
		}
	}
}

// receiver is where messages are sent to. It remembers what it was sent, and
// accepts everything.
type receiver struct {
	mu  sync.Mutex
	got []receipt
}

type receipt struct {
	key, group string
	seq        int64
	attempt    int
	ambiguous  bool
	at         time.Time
}

func (r *receiver) send(_ context.Context, m *outbox.Record) (string, error) {
	r.took(m)
	return "ref of " + m.Key, nil
}

func (r *receiver) took(m *outbox.Record) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.got = append(r.got, receipt{m.Key, m.Group, m.Seq, m.Attempt, m.Ambiguous, time.Now()})
}

func (r *receiver) all() []receipt {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.got)
}

func (r *receiver) len() int {
	r.mu.Lock()
	defer r.mu.Unlock()
	return len(r.got)
}

// keys are those received, in order.
func (r *receiver) keys() (keys []string) {
	for _, m := range r.all() {
		keys = append(keys, m.key)
	}
	return keys
}

// times tells how often each message was received.
func (r *receiver) times() map[string]int {
	times := map[string]int{}
	for _, m := range r.all() {
		times[m.key]++
	}
	return times
}

// each is a count of n for each key.
func each(n int, keys ...string) map[string]int {
	times := map[string]int{}
	for _, key := range keys {
		times[key] = n
	}
	return times
}

// all is one state for each key.
func all(state outbox.State, keys ...string) map[string]outbox.State {
	states := map[string]outbox.State{}
	for _, key := range keys {
		states[key] = state
	}
	return states
}

func keysOf(ms []outbox.Message) (keys []string) {
	for _, m := range ms {
		keys = append(keys, m.Key)
	}
	return keys
}

func rowKeys(rows []outbox.Row) (keys []string) {
	for _, r := range rows {
		keys = append(keys, r.Key)
	}
	return keys
}
