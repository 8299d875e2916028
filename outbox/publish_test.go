package outbox

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

var errSink = errors.New("sink says no")

func second(int) time.Duration { return time.Second }

func TestReturningNilAcknowledgesTheUnmarked(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{Backoff: second}, func(_ context.Context, batch []*Entry[string]) error {
			for _, e := range batch {
				switch e.Key {
				case "retry":
					e.Retry(0)
				case "later":
					e.Retry(time.Hour)
				case "negative":
					e.Retry(-time.Hour)
				case "fail":
					e.Fail(errSink)
				case "nil":
					e.Fail(nil)
				}
			}
			return nil
		})
		g.stage("fail", "good", "later", "negative", "nil", "retry")
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 6, Published: 1, Retried: 5}, pass)

		for key, want := range map[string]struct {
			delay time.Duration
			text  string
		}{
			"retry":    {time.Second, "marked to be tried again"},
			"later":    {time.Hour, "marked to be tried again"},
			"negative": {time.Second, "marked to be tried again"},
			"fail":     {time.Second, "sink says no"},
			"nil":      {time.Second, "marked as failed without a reason"},
		} {
			row, ok := g.store.row("c", key)
			require.True(t, ok, key)
			require.Equal(t, want.delay, time.Until(row.Due), key)
			require.Equal(t, want.text, row.LastError, key)
			require.Equal(t, 1, row.Attempt, key)
		}
		_, ok := g.store.row("c", "good")
		require.False(t, ok)
	})
}

func TestMarksHoldWhenTheFunctionReturnsAnError(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{Backoff: second}, func(_ context.Context, batch []*Entry[string]) error {
			batch[0].Retry(time.Hour)
			batch[1].Fail(RetryAfter(time.Minute, errors.New("busy")))
			return errSink
		})
		g.stage("a", "b", "c")
		_, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		for key, want := range map[string]time.Duration{"a": time.Hour, "b": time.Minute, "c": time.Second} {
			row, _ := g.store.row("c", key)
			require.Equal(t, want, time.Until(row.Due), key)
		}
		a, _ := g.store.row("c", "a")
		require.Equal(t, "sink says no", a.LastError)
	})
}

func TestErrorClassesDecideWhatBecomesOfARow(t *testing.T) {
	for name, c := range map[string]struct {
		err      error
		low      time.Duration
		high     time.Duration
		attempts int
		text     string
		down     bool
	}{
		"plain":              {errSink, time.Second, time.Second, 1, "sink says no", false},
		"wrapped":            {fmt.Errorf("x: %w", RetryAfter(time.Minute, nil)), time.Minute, time.Minute, 1, "x: retry later (in 1m0s)", false},
		"retry after zero":   {RetryAfter(0, errSink), time.Second, time.Second, 1, "retry later: sink says no", false},
		"retry after an age": {RetryAfter(1<<62, nil), maxDelay, maxDelay, 1, "", false},
		"permanent":          {Permanent(errSink), backoffCap / 2, backoffCap, 1, "permanent: sink says no", false},
		"defer":              {Defer(time.Minute), time.Minute, time.Minute, 0, "deferred (in 1m0s)", false},
		"defer now":          {Defer(-1), time.Microsecond, time.Microsecond, 0, "deferred", false},
		"unavailable":        {Unavailable(errSink), 0, 0, 0, "destination unavailable: sink says no", true},
		"unknown":            {Unknown(errSink), time.Second, time.Second, 1, "outcome unknown: sink says no", false},
		"coded":              {WithCode("E1", Defer(time.Minute)), time.Minute, time.Minute, 0, "E1: deferred (in 1m0s)", false},
		"cancelled by itself": {
			context.Canceled, time.Second, time.Second, 1, "context canceled", false},
		"deadline of its own": {
			context.DeadlineExceeded, time.Second, time.Second, 1, "context deadline exceeded", false},
		"methods panic": {(*brokenError)(nil), time.Second, time.Second, 1, "<nil>", false},
		"odd text":      {errors.New("a\x00b\xff"), time.Second, time.Second, 1, "a\uFFFDb\uFFFD", false},
		"long text":     {errors.New(strings.Repeat("é", 5000)), time.Second, time.Second, 1, "", false},
	} {
		for _, marked := range []bool{false, true} {
			t.Run(fmt.Sprintf("%s marked %t", name, marked), func(t *testing.T) {
				bubble(t, func(t *testing.T) {
					g := newRig(t, RelayOptions{}, PublishOptions{Backoff: second}, func(_ context.Context, batch []*Entry[string]) error {
						if marked {
							batch[0].Fail(c.err)
							return nil
						}
						return c.err
					})
					g.stage("k")
					_, err := g.relay.RunOnce(t.Context())
					require.NoError(t, err)
					row, ok := g.store.row("c", "k")
					require.True(t, ok)
					delay := time.Until(row.Due)
					require.True(t, delay >= c.low && delay <= c.high, delay)
					require.Equal(t, c.attempts, row.Attempt)
					require.LessOrEqual(t, len(row.LastError), MaxErrorText)
					if c.text != "" {
						require.Equal(t, c.text, row.LastError)
					}
					require.Equal(t, c.down, g.store.count("down") == 1)
				})
			})
		}
	}
}

// brokenError has methods that panic on nil.
type brokenError struct{ s string }

func (e *brokenError) Error() string { return e.s }
func (e *brokenError) Unwrap() error { return errors.New(e.s) }

func TestPanicEndsTheAttemptWithItsTextAndStack(t *testing.T) {
	var nilMap map[string]int
	for name, c := range map[string]struct {
		panics func()
		text   string
	}{
		"string":  {func() { panic("boom") }, "panic: boom"},
		"error":   {func() { panic(Permanent(errSink)) }, "panic: permanent: sink says no"},
		"nil":     {func() { panic(nil) }, "panic: panic called with nil argument"},
		"custom":  {func() { panic(struct{ A int }{7}) }, "panic: {7}"},
		"runtime": {func() { nilMap["a"] = 1 }, "panic: assignment to entry in nil map"},
		"long":    {func() { panic(strings.Repeat("x", 1<<20)) }, "panic: xxx"},
		"exit":    {runtime.Goexit, "publish function exited its goroutine"},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				g := newRig(t, RelayOptions{}, PublishOptions{Backoff: second}, func(_ context.Context, batch []*Entry[string]) error {
					batch[0].Retry(time.Hour)
					if g := batch[1].Attempt; g == 1 {
						c.panics()
					}
					return nil
				})
				g.stage("marked", "other")
				pass, err := g.relay.RunOnce(t.Context())
				require.NoError(t, err)
				require.Equal(t, Pass{Claimed: 2, Retried: 2}, pass)
				marked, _ := g.store.row("c", "marked")
				require.Equal(t, time.Hour, time.Until(marked.Due))
				other, _ := g.store.row("c", "other")
				require.Equal(t, time.Second, time.Until(other.Due))
				require.Contains(t, other.LastError, c.text)
				require.LessOrEqual(t, len(other.LastError), MaxErrorText)
				if name != "exit" {
					require.Contains(t, g.logged(), "stack=")
					require.Contains(t, g.logged(), "publish_test.go")
				}
			})
		})
	}
}

func TestAttemptTimeoutRetriesTheUnmarked(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{Backoff: second, AttemptTimeout: 20 * time.Second}, func(ctx context.Context, batch []*Entry[string]) error {
			deadline, ok := ctx.Deadline()
			require.True(t, ok)
			require.Equal(t, 20*time.Second, time.Until(deadline))
			batch[0].Retry(time.Hour)
			<-ctx.Done()
			return nil // swallows the error: that must not acknowledge
		})
		g.stage("a", "b")
		start := time.Now()
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 2, Retried: 2}, pass)
		require.Equal(t, 20*time.Second, time.Since(start))
		b, _ := g.store.row("c", "b")
		require.Equal(t, "attempt timed out after 20s", b.LastError)
		a, _ := g.store.row("c", "a")
		require.Equal(t, time.Hour, time.Until(a.Due))
	})
}

func TestFunctionThatIgnoresItsContextHoldsItsSlotAndIsNotMultiplied(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		late := make(chan *Entry[string], 1)
		g := newRig(t, RelayOptions{}, PublishOptions{Backoff: second, AttemptTimeout: 10 * time.Second, InFlight: 1, Lease: time.Second},
			func(ctx context.Context, batch []*Entry[string]) error {
				if batch[0].Attempt == 1 {
					late <- batch[0]
					<-release
				}
				return nil
			})
		g.stage("k")
		g.start()
		e := <-late
		time.Sleep(14 * time.Second)
		require.Zero(t, g.store.count("settle"), "its leases are held while it may return")
		time.Sleep(time.Second)
		synctest.Wait()
		row, _ := g.store.row("c", "k")
		require.Equal(t, "publish function ignores its cancelled context: attempt timed out after 10s", row.LastError)
		e.Fail(errSink) // too late to count

		time.Sleep(time.Hour)
		require.Len(t, g.published(), 1, "its slot is taken")
		stats, err := g.relay.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, 1, stats[0].Hung)
		require.Len(t, g.seen(EventHung), 1)
		require.Equal(t, 1, strings.Count(g.logged(), "level=ERROR"), "logged once")

		close(release)
		time.Sleep(2 * time.Second)
		synctest.Wait()
		require.Len(t, g.published(), 2)
		require.Len(t, g.seen(EventReturned), 1)
		require.Zero(t, g.store.size())
		require.NoError(t, g.stop())
	})
}

func TestHungPublicationLeavesTheOtherSlotsUsable(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 1, AttemptTimeout: time.Second}, func(ctx context.Context, batch []*Entry[string]) error {
			if batch[0].Key == "bad" {
				<-release
			}
			return nil
		})
		g.stage("bad")
		g.start()
		time.Sleep(3 * time.Second)
		g.stage(keys(100)...)
		time.Sleep(time.Second)
		synctest.Wait()
		for _, k := range keys(100) {
			require.Equal(t, 1, g.times(k))
		}
		close(release)
		require.NoError(t, g.stop())
	})
}

func TestUnreadableEntriesNeverBlockTheirBatch(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{Backoff: second}, nil)
		g.stage(keys(22)...)
		g.store.edit("c", "k00003", func(r *fakeRow) { r.Payload = []byte(`{"secret":`) })
		g.store.edit("c", "k00009", func(r *fakeRow) { r.Broken = errors.New("headers are no JSON object") })
		g.start()
		synctest.Wait()
		require.Equal(t, 2, g.store.size())
		require.Len(t, g.published()[0].keys, 20)
		for key, text := range map[string]string{
			"k00003": "decode value: decode JSON: malformed at byte 10",
			"k00009": "read stored row: headers are no JSON object",
		} {
			row, _ := g.store.row("c", key)
			require.Equal(t, text, row.LastError)
			require.Greater(t, time.Until(row.Due), 2*time.Minute, "the slowest backoff")
			require.Contains(t, g.logged()+key, key)
		}
		require.NotContains(t, g.logged(), "secret")
		require.NoError(t, g.stop())

		infos, err := g.latest.List(t.Context(), "", 0)
		require.NoError(t, err)
		require.Len(t, infos, 2)
		e, err := g.latest.Pending(t.Context(), nil, "k00003")
		require.ErrorContains(t, err, "decode JSON")
		require.NoError(t, g.latest.Discard(t.Context(), e.Key, e.Version))
		require.Equal(t, 1, g.store.size())
	})
}

func TestBatchOfUnreadableEntriesOnlyCallsNoFunction(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.stage("a")
		g.store.edit("c", "a", func(r *fakeRow) { r.Payload = nil })
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 1, Retried: 1}, pass)
		require.Empty(t, g.published())
	})
}

func TestContextIsRestoredFromTheHeadersThatABatchShares(t *testing.T) {
	type ctxKey struct{}
	for name, c := range map[string]struct {
		headers []Header
		want    Header
	}{
		"one":       {[]Header{{"trace": "1", "a": "b"}}, Header{"trace": "1", "a": "b"}},
		"none":      {[]Header{nil}, nil},
		"same":      {[]Header{{"trace": "1", "t": "x"}, {"trace": "1", "t": "x"}}, Header{"trace": "1", "t": "x"}},
		"partly":    {[]Header{{"trace": "1", "t": "x"}, {"trace": "2", "t": "x"}}, Header{"t": "x"}},
		"different": {[]Header{{"trace": "1"}, {"trace": "2"}}, nil},
		"missing":   {[]Header{{"trace": "1"}, nil}, nil},
	} {
		t.Run(name, func(t *testing.T) {
			bubble(t, func(t *testing.T) {
				var got any
				restore := func(ctx context.Context, h Header) context.Context {
					return context.WithValue(ctx, ctxKey{}, h)
				}
				g := newRig(t, RelayOptions{Context: restore}, PublishOptions{}, func(ctx context.Context, batch []*Entry[string]) error {
					got = ctx.Value(ctxKey{})
					for i, e := range batch {
						require.Equal(t, c.headers[i], e.Header, "not changed")
					}
					return nil
				})
				for i, h := range c.headers {
					_, err := g.latest.StageIn(t.Context(), committed{}, Item[string]{Key: keys(9)[i], Header: h})
					require.NoError(t, err)
				}
				_, err := g.relay.RunOnce(t.Context())
				require.NoError(t, err)
				if c.want == nil {
					require.Nil(t, got)
				} else {
					require.Equal(t, c.want, got)
				}
			})
		})
	}
}
