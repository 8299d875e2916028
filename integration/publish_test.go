package integration

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// oddPanic is a panic whose text panics too.
type oddPanic struct{ note string }

func (p *oddPanic) Error() string { panic(p.note) }

// However a publish function ends other than by returning nil, its entries are
// kept with the reason, and the next attempt acknowledges them.
func TestG3HoweverACallFailsItsEntriesAreKept(t *testing.T) {
	const timeout = 300 * time.Millisecond
	var empty map[string]int
	failures := []struct {
		name, want string // in the row's last error
		f          func(ctx context.Context) error
	}{
		{"panic runtime", "nil map", func(context.Context) error { empty["x"] = 1; return nil }},
		{"error", "refused", func(context.Context) error { return errors.New("refused") }},
		{"own cancel", "context canceled", func(context.Context) error { return fmt.Errorf("call: %w", context.Canceled) }},
		{"panic string", "panic: boom", func(context.Context) error { panic("boom") }},
		{"panic error", "panic: broken", func(context.Context) error { panic(errors.New("broken")) }},
		{"panic nil", "panic: ", func(context.Context) error { panic(any(nil)) }},
		{"panic odd", "panic: ", func(context.Context) error { panic(&oddPanic{"note"}) }},
		{"goexit", "exited its goroutine", func(context.Context) error { runtime.Goexit(); return nil }},
		{"timeout", "timed out after 300ms", func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() }},
		{"timeout swallowed", "timed out after 300ms", func(ctx context.Context) error { <-ctx.Done(); return nil }},
	}
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		attempts := map[string]int{}
		book := new(logbook)
		relay, err := outbox.NewRelay(book.options(), l.Publisher(func(ctx context.Context, batch []*outbox.Entry[string]) error {
			e := batch[0]
			if attempts[e.Key]++; attempts[e.Key] > 1 {
				return nil
			}
			for _, failure := range failures {
				if failure.name == e.Key {
					return failure.f(ctx)
				}
			}
			return nil
		}, outbox.PublishOptions{BatchSize: 1, AttemptTimeout: timeout, Backoff: constant(time.Second)}))
		require.NoError(t, err)
		for _, failure := range failures {
			s.stage(l, failure.name, "x")
		}
		s.stage(l, "good", "x")
		_, err = relay.Flush(t.Context())
		require.NoError(t, err)
		for _, failure := range failures {
			e, ok := entry(t, l, failure.name)
			require.True(t, ok, failure.name)
			require.Contains(t, e.LastError, failure.want, failure.name)
			require.Equal(t, 1, e.Attempt, failure.name)
		}
		_, waits := entry(t, l, "good")
		require.False(t, waits)
		require.NotEmpty(t, book.grep("stack="))
		eventually(t, "all to be settled", func() bool {
			_, err := relay.Flush(t.Context())
			require.NoError(t, err)
			return s.empty()
		})
	})
}

// A function that ignores its context costs its slot, for all to see, but not
// the entries, which others may publish, nor the other slots, nor the stop.
func TestG3CallThatNeverReturnsCostsOneSlot(t *testing.T) {
	const timeout, good, bad = 200 * time.Millisecond, 20, 2
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		release := make(chan struct{})
		var w witness
		var hanging atomic.Int32
		book := new(logbook)
		o := book.options()
		o.ShutdownTimeout = 100 * time.Millisecond
		relay, err := outbox.NewRelay(o, l.Publisher(func(_ context.Context, batch []*outbox.Entry[string]) error {
			if strings.HasPrefix(batch[0].Key, "bad") {
				hanging.Add(1)
				<-release
				return nil
			}
			return w.publish(context.Background(), batch)
		}, outbox.PublishOptions{BatchSize: 1, InFlight: 4, AttemptTimeout: timeout, Backoff: constant(50 * time.Millisecond)}))
		require.NoError(t, err)
		s.stageMany(l, "bad", bad)
		s.stageMany(l, "good", good)
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		done := make(chan error, 1)
		go func() { done <- relay.Run(ctx) }()
		eventually(t, "the calls to be given up", func() bool { return book.count(outbox.EventHung) == bad })
		eventually(t, "the others to go out", func() bool { return s.count(`SELECT count(*) FROM {t:entries}`) == bad })
		time.Sleep(300 * time.Millisecond) // several backoffs
		stats, err := relay.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, bad, stats[0].Hung)
		require.Len(t, book.grep("ignores its cancelled context"), bad)
		infos, err := l.List(t.Context(), "", 10)
		require.NoError(t, err)
		for _, e := range infos {
			require.Contains(t, e.LastError, "ignores its cancelled context")
		}
		require.EqualValues(t, bad, hanging.Load(), "it is not called again for what it has not returned from")

		cancel()
		select {
		case err := <-done:
			require.ErrorContains(t, err, "ignores its cancelled context")
		case <-time.After(5 * time.Second):
			t.Fatal("the stop waits for calls that were given up")
		}
		s.exec(s.dialect.Render(`UPDATE {t:entries} SET due = 1`)) // the relay that hangs may have postponed them
		var other witness
		require.Equal(t, bad, s.once(l, outbox.PublishOptions{}, other.publish).Published, "others may publish them")
		close(release)
		eventually(t, "the slots to be given back", func() bool { return book.count(outbox.EventReturned) == bad })
	})
}

// Marks hold whatever the function returns, and the rest follows what it returns.
func TestG3MarksHoldHoweverTheCallEnds(t *testing.T) {
	keys := []string{"1 done", "2 retry", "3 fail", "4 permanent", "5 later", "6 defer", "7 not tried"}
	for name, test := range map[string]struct {
		end    func() error
		failed bool // the unmarked
	}{
		"nil":   {func() error { return nil }, false},
		"error": {func() error { return errors.New("connection reset") }, true},
		"panic": {func() error { panic("half-way") }, true},
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, s *site) {
				l := s.latest("")
				for _, key := range keys {
					s.stage(l, key, "x")
				}
				began := time.Now()
				s.once(l, outbox.PublishOptions{Backoff: constant(time.Minute)}, func(_ context.Context, batch []*outbox.Entry[string]) error {
					require.Len(t, batch, len(keys))
					batch[1].Retry(time.Hour)
					batch[2].Fail(errors.New("no such tenant"))
					batch[3].Fail(outbox.Permanent(errors.New("malformed")))
					batch[4].Fail(outbox.RetryAfter(2*time.Hour, errors.New("slow down")))
					batch[5].Fail(outbox.Defer(3 * time.Hour))
					return test.end()
				})
				wait := func(key string) (outbox.EntryInfo, time.Duration) {
					e, ok := entry(t, l, key)
					require.True(t, ok, key)
					return e, e.Due.Sub(began).Round(time.Minute)
				}
				for i, want := range map[int]time.Duration{1: time.Hour, 2: time.Minute, 4: 2 * time.Hour, 5: 3 * time.Hour} {
					_, in := wait(keys[i])
					require.InDelta(t, want, in, float64(time.Minute), keys[i])
				}
				e, _ := wait("3 fail")
				require.Equal(t, "no such tenant", e.LastError)
				require.Equal(t, 1, e.Attempt)
				e, in := wait("4 permanent")
				require.Contains(t, e.LastError, "malformed")
				require.GreaterOrEqual(t, in, 2*time.Minute, "the slowest backoff")
				e, _ = wait("6 defer")
				require.Zero(t, e.Attempt, "given back")
				for _, key := range []string{"1 done", "7 not tried"} {
					_, waits := entry(t, l, key)
					require.Equal(t, test.failed, waits, key)
				}
			})
		})
	}
}

// A stored row that cannot be read holds nobody up, says what it is, and can
// be listed and discarded.
func TestG3RowThatCannotBeReadHoldsNobodyUp(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		s.stageMany(l, "good", 10)
		bad := []string{"bad headers", "bad list", "bad payload", "bad type"}
		for _, key := range bad {
			s.stage(l, key, "secret")
		}
		update := func(key, column string, value any) {
			s.exec(s.dialect.Render(`UPDATE {t:entries} SET `+column+` = $1 WHERE key = $2`), value, key)
		}
		update("bad headers", "headers", `{"a":`)
		update("bad list", "headers", `["a"]`)
		update("bad payload", "payload", []byte("{secret"))
		update("bad type", "payload", []byte(`{"secret":1}`))
		var w witness
		book := new(logbook)
		s.run(book.options(), l.Publisher(w.publish, outbox.PublishOptions{BatchSize: 5}))
		eventually(t, "the good ones to go out", func() bool { return s.count(`SELECT count(*) FROM {t:entries}`) == len(bad) })
		require.Len(t, w.all(), 10)
		eventually(t, "the bad ones to be settled", func() bool { return s.count(`SELECT count(*) FROM {t:entries} WHERE last_error = ''`) == 0 })
		for _, key := range bad {
			e, ok := entry(t, l, key)
			require.True(t, ok)
			require.NotContains(t, e.LastError, "secret")
			require.NoError(t, l.Discard(t.Context(), key, e.Version))
		}
		require.NotEmpty(t, book.grep("discard or repair it"))
		require.Empty(t, book.grep("secret"))
		require.True(t, s.empty())
	})
}

// A settlement that fails after the call worked is tried again while the
// leases last, and is told as what it is: the call did not fail.
func TestG3SettlementThatFailsIsNoFailedCall(t *testing.T) {
	t.Run("sqlite", func(t *testing.T) {
		s := newSite(t, dialect.SQLite(), "sqlite",
			strings.Replace(dialect.SQLiteDSN(t.TempDir()+"/app.db"), "busy_timeout(5000)", "busy_timeout(50)", 1))
		settleFails(t, s, func() (heal func()) {
			lock, err := s.db.BeginTx(context.Background(), nil) // immediate
			require.NoError(t, err)
			return func() { require.NoError(t, lock.Rollback()) }
		})
	})
	onlyPostgres(t, func(t *testing.T, s *site) {
		name := s.dialect.Render(`{t:settle_1}`)
		settleFails(t, s, func() (heal func()) {
			s.exec(`ALTER FUNCTION ` + name + ` RENAME TO away`)
			return func() { s.exec(s.dialect.Render(`ALTER FUNCTION {schema}.away RENAME TO {i:settle_1}`)) }
		})
	})
}

func settleFails(t *testing.T, s *site, fail func() (heal func())) {
	var w witness
	book := new(logbook)
	called, failing := make(chan struct{}), make(chan struct{})
	l := s.latest("")
	s.stage(l, "k", "x")
	stop := s.run(book.options(), l.Publisher(func(_ context.Context, batch []*outbox.Entry[string]) error {
		w.saw(batch)
		close(called)
		<-failing
		return nil
	}, outbox.PublishOptions{}))
	<-called
	heal := fail()
	close(failing)
	eventually(t, "the settlement to fail", func() bool { return len(book.grep("call=settle")) > 0 })
	heal()
	eventually(t, "the row to be settled", s.empty)
	require.NoError(t, stop())
	require.Len(t, w.all(), 1, "it went out once")
	require.Empty(t, book.grep("publishing failed"))
	require.Zero(t, book.count(outbox.EventRetry)+book.count(outbox.EventLeft)+book.count(outbox.EventLost))
}
