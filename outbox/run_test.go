package outbox

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
)

func TestCleanStopLetsPublicationsFinish(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{}, takes(10*time.Second, &cause))
		g.stage("a")
		g.start()
		g.cancel()
		start := time.Now()
		require.NoError(t, <-g.done)
		require.Equal(t, 10*time.Second, time.Since(start))
		require.NoError(t, cause, "its context is not cancelled")
		require.Zero(t, g.store.size(), "and it is settled")
		require.NotContains(t, g.logged(), "level=ERROR")
		require.NotContains(t, g.logged(), "level=WARN")
		require.Len(t, g.seen(EventStop), 1)
	})
}

func TestStopCancelsWhatDoesNotFinishInTime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{ShutdownTimeout: 5 * time.Second}, PublishOptions{}, takes(10*time.Second, &cause))
		g.stage("a", "b", "c")
		g.start()
		start := time.Now()
		err := g.stop()
		require.EqualError(t, err, `outbox: run: left 3 entries of channel "c", to be published again: relay is stopping and its shutdown timeout has passed: context canceled`)
		require.Equal(t, 5*time.Second, time.Since(start))
		require.ErrorIs(t, cause, errShutdown)
		row, _ := g.store.row("c", "a")
		require.Equal(t, 1, row.Attempt, "it may have been sent")
		require.Equal(t, time.Now(), row.Due, "due at once for others")
		require.True(t, row.LeaseUntil.IsZero())
	})
}

func TestStopWithoutGraceCancelsAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{ShutdownTimeout: time.Nanosecond}, PublishOptions{}, takes(10*time.Second, &cause))
		g.stage("a")
		g.start()
		start := time.Now()
		require.Error(t, g.stop())
		require.Equal(t, time.Nanosecond, time.Since(start))
	})
}

// Field case S39: a stop does not wait for a function that ignores it.
func TestStopDoesNotWaitForAFunctionThatIgnoresItsContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{ShutdownTimeout: 2 * time.Second}, PublishOptions{Backoff: second}, func(_ context.Context, batch []*Entry[string]) error {
			if batch[0].Attempt == 1 {
				time.Sleep(time.Minute)
			}
			return nil
		})
		g.stage("a")
		g.start()
		start := time.Now()
		err := g.stop()
		require.ErrorContains(t, err, `left 1 entries of channel "c", to be published again: publish function ignores its cancelled context`)
		require.Equal(t, 2500*time.Millisecond, time.Since(start))
		calls := g.store.count("")
		row, _ := g.store.row("c", "a")
		require.True(t, row.LeaseUntil.IsZero(), "others may have it")
		time.Sleep(time.Minute)
		require.Equal(t, calls, g.store.count(""), "the abandoned goroutine writes nothing")

		g.start()
		require.NoError(t, g.stop(), "the relay can run again")
		require.Zero(t, g.store.size())
	})
}

func TestStopSaysThatAPublicationStillRuns(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		g := newRig(t, RelayOptions{}, PublishOptions{AttemptTimeout: time.Second}, func(context.Context, []*Entry[string]) error {
			<-release
			return nil
		})
		g.stage("a")
		g.start()
		time.Sleep(time.Minute) // long given up
		require.EqualError(t, g.stop(), `outbox: run: left 1 publications of channel "c" running: publish function ignores its cancelled context`)
		close(release)
	})
}

func TestStopLeavesRowsThatStayLocked(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{ShutdownTimeout: 5 * time.Second}, PublishOptions{}, nil)
		g.stage("a", "b")
		g.store.setFault(func(op string, after bool) error {
			if op == "claim" && after {
				g.store.edit("c", "a", func(r *fakeRow) { r.locked = true })
			}
			return nil
		})
		g.start()
		start := time.Now()
		err := g.stop()
		require.ErrorIs(t, err, ErrBusy)
		require.ErrorContains(t, err, `left 1 entries of channel "c"`)
		require.Equal(t, 5*time.Second, time.Since(start))
	})
}

func TestStopGivesBackWhatWasNotBegun(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.stage("a")
		g.store.edit("c", "a", func(r *fakeRow) { r.LastError = "before" })
		g.store.setFault(func(op string, after bool) error {
			if op == "claim" && after {
				g.cancel()
			}
			return nil
		})
		g.start()
		require.NoError(t, <-g.done)
		require.Empty(t, g.published())
		row, _ := g.store.row("c", "a")
		require.Zero(t, row.Attempt)
		require.Equal(t, time.Now(), row.Due)
		require.True(t, row.LeaseUntil.IsZero())
		require.Equal(t, "before", row.LastError)
	})
}

func TestStopWithADeadStoreEnds(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{ShutdownTimeout: 3 * time.Second}, PublishOptions{}, nil)
		g.stage("a")
		g.store.setFault(failing("settle"))
		g.start()
		start := time.Now()
		err := g.stop()
		require.ErrorContains(t, err, `left 1 entries of channel "c"`)
		require.Less(t, time.Since(start), 7*time.Second)
	})
}

func TestStopWaitsForAHangingClaimForAShortTimeOnly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		l, err := NewLatest(&deafStore{g.store}, LatestOptions[string]{Channel: "c"})
		require.NoError(t, err)
		g.relay = g.newRelay(RelayOptions{}, l.Publisher(g.record(nil), PublishOptions{}))
		g.stage("a")
		g.start()
		start := time.Now()
		require.NoError(t, g.stop())
		require.Equal(t, claimGrace, time.Since(start))
		require.NotContains(t, g.logged(), "level=WARN")
		require.NotContains(t, g.logged(), "level=ERROR")
	})
}

// deafStore answers no claim.
type deafStore struct{ *fakeStore }

func (s *deafStore) ClaimRows(ctx context.Context, c Claim) (Claimed, error) {
	<-ctx.Done()
	return Claimed{}, fmt.Errorf("claim: %w", ctx.Err())
}

// Field case S38: many publications under way, stopped at any moment.
func TestStopAtAnyMomentLosesNothing(t *testing.T) {
	for i := range 50 {
		bubble(t, func(t *testing.T) {
			g := newRig(t, RelayOptions{ShutdownTimeout: 40 * time.Millisecond}, PublishOptions{BatchSize: 3, InFlight: 5, Backoff: second},
				func(ctx context.Context, batch []*Entry[string]) error {
					select {
					case <-time.After(time.Duration(len(batch[0].Key)+int(batch[0].Version%7)) * time.Millisecond * 7):
						return nil
					case <-ctx.Done():
						return ctx.Err()
					}
				})
			g.store.setFault(func(string, bool) error { time.Sleep(time.Millisecond / 3); return nil })
			g.stage(keys(200)...)
			g.start()
			time.Sleep(time.Duration(i) * 3 * time.Millisecond)
			err := g.stop()
			left := 0
			for _, k := range keys(200) {
				if row, ok := g.store.row("c", k); ok {
					require.True(t, row.LeaseUntil.IsZero(), "given back")
					left++
				}
			}
			if err == nil {
				require.Empty(t, g.seen(EventRetry))
			}
			done := 0
			for _, e := range g.seen(EventSettle) {
				done += e.Rows
			}
			require.Equal(t, 200, left+done)
		})
	}
}

func TestOnlyOneRunAtATime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.start()
		require.ErrorIs(t, g.relay.Run(t.Context()), ErrState)
		_, err := g.relay.RunOnce(t.Context())
		require.ErrorIs(t, err, ErrState)
		_, err = g.relay.Flush(t.Context())
		require.ErrorIs(t, err, ErrState)
		require.NoError(t, g.stop())

		_, err = g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		g.start()
		g.stage("a")
		time.Sleep(time.Second)
		require.Len(t, g.published(), 1)
		require.NoError(t, g.stop())
	})
}

func TestRunWithAnEndedContextDoesNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		require.NoError(t, g.relay.Run(ctx))
		require.Zero(t, g.store.count(""))
		_, err := g.relay.RunOnce(ctx)
		require.ErrorIs(t, err, context.Canceled)
	})
}

func TestStopFromInsideAPublication(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var g *rig
		g = newRig(t, RelayOptions{}, PublishOptions{}, func(context.Context, []*Entry[string]) error {
			g.cancel()
			return nil
		})
		g.stage("a")
		g.start()
		require.NoError(t, <-g.done)
		require.Zero(t, g.store.size())
	})
}

func TestRunRefusesAMissingSchemaAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.store.setFault(func(op string, after bool) error {
			if op == "check" {
				return fmt.Errorf("check: %w: run the migrations", ErrSchema)
			}
			return nil
		})
		start := time.Now()
		require.ErrorIs(t, g.relay.Run(t.Context()), ErrSchema)
		require.Zero(t, time.Since(start))
		g.store.setFault(nil)
		g.start()
		require.NoError(t, g.stop(), "and can be tried again")
	})
}

func TestRunWaitsForADatabaseThatIsNotThereYet(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.stage("a")
		g.store.setFault(failing("check"))
		g.start()
		time.Sleep(time.Minute)
		require.Less(t, g.store.count("check"), 30)
		require.Empty(t, g.published())
		g.store.setFault(nil)
		time.Sleep(troubleCap)
		synctest.Wait()
		require.Len(t, g.published(), 1)
		require.NoError(t, g.stop())
	})
}

// Field cases S30 and S43: the database goes away and comes back.
func TestTroubleBacksOffIsLoggedSparselyAndHeals(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.start()
		g.store.setFault(func(op string, after bool) error {
			return fmt.Errorf("%w: %w", ErrSchema, errDown)
		})
		before := g.store.count("")
		for range 600 {
			g.store.hint(Hint{}) // a stager would, if it could
			time.Sleep(time.Second)
		}
		calls := g.store.count("") - before
		require.Less(t, calls, 300, "in ten minutes")
		require.Less(t, len(g.seen(EventTrouble)), 300)
		lines := countLines(g.logged())
		require.True(t, lines >= 2 && lines < 100, "%d lines in ten minutes", lines)
		require.NotContains(t, g.logged(), "level=ERROR")

		g.store.setFault(nil)
		g.stage("a")
		time.Sleep(troubleCap)
		require.Len(t, g.published(), 1)
		require.NotEmpty(t, g.seen(EventRecover))
		require.NoError(t, g.stop())
	})
}

func countLines(s string) (n int) {
	for _, c := range s {
		if c == '\n' {
			n++
		}
	}
	return n
}

func TestManyChannelsUseAtMostFourStatementsAtATime(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		var as []Attachment
		for _, k := range keys(60) {
			l := g.channel(k)
			as = append(as, l.Publisher(g.record(func(context.Context, []*Entry[string]) error {
				time.Sleep(5 * time.Second)
				return nil
			}), PublishOptions{BatchSize: 1, Lease: 3 * time.Second}))
			for _, key := range keys(3) {
				_, err := l.StageIn(t.Context(), committed{}, Item[string]{Key: key})
				require.NoError(t, err)
			}
		}
		g.relay = g.newRelay(RelayOptions{}, as...)
		now, most := 0, 0
		mu := make(chan struct{}, 1)
		count := func(d int) {
			mu <- struct{}{}
			now += d
			most = max(most, now)
			<-mu
		}
		g.store.setFault(func(op string, after bool) error {
			if after {
				count(-1)
				return nil
			}
			count(1)
			time.Sleep(time.Millisecond)
			return nil
		})
		g.start()
		time.Sleep(time.Minute)
		require.Zero(t, g.store.size())
		require.NoError(t, g.stop())
		count(0)
		require.LessOrEqual(t, most, maxStatements+1)
	})
}

func TestObserveThatPanicsStopsNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.relay = g.newRelay(RelayOptions{Observe: func(Event) { panic("no") }}, g.latest.Publisher(g.record(nil), PublishOptions{}))
		g.stage(keys(100)...)
		g.start()
		time.Sleep(time.Second)
		require.Zero(t, g.store.size())
		require.NoError(t, g.stop())
		require.Equal(t, 1, strings.Count(g.logged(), "level=ERROR"))
	})
}

func TestStatsShowAttachedChannelsThatHoldNothing(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		_, err := g.channel("b").StageIn(t.Context(), committed{}, Item[string]{Key: "k"})
		require.NoError(t, err)
		stats, err := g.relay.Stats(t.Context())
		require.NoError(t, err)
		require.Equal(t, []ChannelStats{
			{Channel: Channel{SystemLatest, "b"}, Due: 1},
			{Channel: Channel{SystemLatest, "c"}, Attached: true},
		}, stats)
		g.store.setFault(failing("stats"))
		_, err = g.relay.Stats(t.Context())
		require.ErrorIs(t, err, errDown)
	})
}

func TestNewRelayRefusesWhatContradictsItself(t *testing.T) {
	s := newFakeStore()
	l := func(s LatestStore, name string) *Latest[string] {
		l, err := NewLatest(s, LatestOptions[string]{Channel: name})
		require.NoError(t, err)
		return l
	}
	ok := func(context.Context, []*Entry[string]) error { return nil }
	with := func(o PublishOptions) []Attachment { return []Attachment{l(s, "a").Publisher(ok, o)} }
	good := with(PublishOptions{})
	for name, c := range map[string]struct {
		o    RelayOptions
		as   []Attachment
		want string
	}{
		"nothing attached":  {RelayOptions{}, nil, "nothing is attached"},
		"nil attachment":    {RelayOptions{}, []Attachment{nil}, "attachment 1 is nil"},
		"nil function":      {RelayOptions{}, []Attachment{l(s, "a").Publisher(nil, PublishOptions{})}, `publish function of channel "a" is nil`},
		"nil latest":        {RelayOptions{}, []Attachment{(*Latest[string])(nil).Publisher(ok, PublishOptions{})}, "not one of NewLatest"},
		"zero latest":       {RelayOptions{}, []Attachment{new(Latest[string]).Publisher(ok, PublishOptions{})}, "not one of NewLatest"},
		"twice":             {RelayOptions{}, append(with(PublishOptions{}), good...), `channel "a" is attached twice`},
		"two stores":        {RelayOptions{}, append(with(PublishOptions{}), l(newFakeStore(), "b").Publisher(ok, PublishOptions{})), "another store"},
		"two kinds":         {RelayOptions{}, append(with(PublishOptions{}), l(&deafStore{s}, "b").Publisher(ok, PublishOptions{})), "another store"},
		"one name, systems": {RelayOptions{}, append(with(PublishOptions{}), journalOf(s, "a")), "attached as latest and as journal"},
		"poll":              {RelayOptions{PollInterval: -1}, good, "PollInterval"},
		"poll 1 ns":         {RelayOptions{PollInterval: 1}, good, "PollInterval"},
		"poll huge":         {RelayOptions{PollInterval: 1<<63 - 1}, good, "PollInterval"},
		"shutdown":          {RelayOptions{ShutdownTimeout: -1}, good, "ShutdownTimeout"},
		"shutdown huge":     {RelayOptions{ShutdownTimeout: 1<<63 - 1}, good, "ShutdownTimeout"},
		"batch":             {RelayOptions{}, with(PublishOptions{BatchSize: -1}), "BatchSize"},
		"batch huge":        {RelayOptions{}, with(PublishOptions{BatchSize: 10_001}), "BatchSize"},
		"in flight":         {RelayOptions{}, with(PublishOptions{InFlight: -1}), "InFlight"},
		"in flight huge":    {RelayOptions{}, with(PublishOptions{InFlight: 65}), "InFlight"},
		"timeout":           {RelayOptions{}, with(PublishOptions{AttemptTimeout: -1}), "AttemptTimeout"},
		"timeout 1 ns":      {RelayOptions{}, with(PublishOptions{AttemptTimeout: 1}), "AttemptTimeout"},
		"timeout huge":      {RelayOptions{}, with(PublishOptions{AttemptTimeout: 1<<63 - 1}), "AttemptTimeout"},
		"lease":             {RelayOptions{}, with(PublishOptions{Lease: -1}), "Lease"},
		"lease short":       {RelayOptions{}, with(PublishOptions{Lease: 99 * time.Millisecond}), "Lease"},
		"lease huge":        {RelayOptions{}, with(PublishOptions{Lease: 1<<63 - 1}), "Lease"},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := NewRelay(c.o, c.as...)
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorContains(t, err, c.want)
			require.Nil(t, r)
		})
	}
	r, err := NewRelay(RelayOptions{}, append(good, l(s, "b").Publisher(ok, PublishOptions{}))...)
	require.NoError(t, err)
	require.NotNil(t, r)
	require.Zero(t, s.count(""), "no I/O")
}

// journalOf stands in for an attachment of the other system.
func journalOf(s RelayStore, name string) Attachment {
	return otherSystem{s: s, name: name}
}

type otherSystem struct {
	source
	s    RelayStore
	name string
}

func (o otherSystem) attach() (source, error) { return o, nil }
func (o otherSystem) channel() Channel        { return Channel{SystemJournal, o.name} }
func (o otherSystem) store() RelayStore       { return o.s }
func (o otherSystem) options() (PublishOptions, error) {
	return PublishOptions{}.withDefaults()
}

func TestErrorsOfARunStayReachable(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.store.setFault(failing("claim"))
		_, err := g.relay.RunOnce(t.Context())
		require.ErrorIs(t, err, errDown)
		require.EqualError(t, err, `outbox: run once: channel "c": database is down`)
		require.False(t, errors.Is(err, ErrState))
	})
}
