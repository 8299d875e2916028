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
