package outbox

import (
	"context"
	"testing"
)

// feed is a store that has rows without end and settles at once, to measure
// the relay alone.
type feed struct {
	*fakeStore
	rows []Row
	left int
}

func (f *feed) ClaimRows(_ context.Context, c Claim) (Claimed, error) {
	n := min(c.Limit, f.left)
	f.left -= n
	return Claimed{Rows: f.rows[:n:n]}, nil
}

func (f *feed) Settle(_ context.Context, _ Channel, ss []Settlement) ([]Result, error) {
	rs := make([]Result, len(ss))
	for i := range rs {
		rs[i] = ResultDone
	}
	return rs, nil
}

// BenchmarkRelay tells the cost of the relay per entry, a small JSON value
// decoded.
func BenchmarkRelay(b *testing.B) {
	type value struct {
		ID   int
		Name string
	}
	const size = 1000
	f := &feed{fakeStore: newFakeStore(), rows: make([]Row, size)}
	for i := range f.rows {
		f.rows[i] = Row{ID: int64(i), Key: keys(size)[i], Version: Version(i + 1), Token: 1, Attempt: 1, Payload: []byte(`{"ID":7,"Name":"somebody"}`)}
	}
	l, err := NewLatest(f, LatestOptions[value]{})
	if err != nil {
		b.Fatal(err)
	}
	r, err := NewRelay(RelayOptions{}, l.Publisher(func(context.Context, []*Entry[value]) error { return nil }, PublishOptions{BatchSize: size}))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	f.left = b.N
	if _, err := r.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
}

// messages is feed for messages.
type messages struct {
	*fakeJournal
	feed feed
}

func (m *messages) ClaimMessages(ctx context.Context, _ Tx, c Claim) (Claimed, error) {
	return m.feed.ClaimRows(ctx, c)
}

func (m *messages) Settle(ctx context.Context, ch Channel, ss []Settlement) ([]Result, error) {
	return m.feed.Settle(ctx, ch, ss)
}

// BenchmarkSender tells the cost of the relay per message, each in a goroutine
// of its own.
func BenchmarkSender(b *testing.B) {
	const size = 1000
	m := &messages{fakeJournal: newFakeJournal(), feed: feed{rows: make([]Row, size)}}
	for i, k := range keys(size) {
		m.feed.rows[i] = Row{Key: k, Version: Version(i + 1), Token: 1, Attempt: 1, State: StateSending}
	}
	j, err := NewJournal(m, JournalOptions{})
	if err != nil {
		b.Fatal(err)
	}
	r, err := NewRelay(RelayOptions{}, j.Sender(func(context.Context, *Record) (string, error) { return "", nil }, SendOptions{BatchSize: size}))
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	b.ResetTimer()
	m.feed.left = b.N
	if _, err := r.Flush(b.Context()); err != nil {
		b.Fatal(err)
	}
}
