package outbox

import (
	"context"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPassClaimsOneBatchOfEachChannelInOrder(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		var order []string
		var as []Attachment
		for _, name := range []string{"z", "a", "m"} {
			l := g.channel(name)
			_, err := l.StageIn(t.Context(), committed{}, Item[string]{Key: "1"}, Item[string]{Key: "2"}, Item[string]{Key: "3"})
			require.NoError(t, err)
			as = append(as, l.Publisher(func(_ context.Context, b []*Entry[string]) error {
				order = append(order, name)
				require.Len(t, b, 2)
				return nil
			}, PublishOptions{BatchSize: 2, InFlight: 8}))
		}
		r := g.newRelay(RelayOptions{}, as...)
		pass, err := r.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, []string{"z", "a", "m"}, order)
		require.Equal(t, Pass{Claimed: 6, Published: 6}, pass)
		require.Equal(t, 3, g.store.size())
		require.Equal(t, 3, g.store.count("claim"))
		require.Equal(t, 3, g.store.count("settle"))
	})
}

func TestFlushPublishesEverythingThatIsDue(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 7, Backoff: second}, func(_ context.Context, b []*Entry[string]) error {
			for _, e := range b {
				if e.Key == "k00013" {
					e.Retry(0)
				}
			}
			return nil
		})
		g.stage(keys(100)...)
		start := time.Now()
		pass, err := g.relay.Flush(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 100, Published: 99, Retried: 1}, pass)
		require.Zero(t, time.Since(start), "backoffs are not waited for")
		require.Equal(t, 1, g.times("k00013"))
	})
}

// Field cases S02 and S29: rows that are due again at once end no flush, and
// do not keep the others from being published.
func TestFlushEndsWithRowsThatAreDueAgainAtOnce(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 10}, func(_ context.Context, b []*Entry[string]) error {
			for _, e := range b {
				if e.Key < "k00050" {
					e.Fail(Defer(0))
				}
			}
			return nil
		})
		g.stage(keys(60)...)
		pass, err := g.relay.Flush(t.Context())
		require.NoError(t, err)
		require.Equal(t, 10, pass.Published)
		require.Equal(t, 50, g.store.size())
		require.LessOrEqual(t, g.times("k00000"), 2)
	})
}

func TestFlushStopsAtTheFirstErrorOfTheStore(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 1}, nil)
		g.stage("a", "b", "c")
		claims := 0
		g.store.setFault(func(op string, after bool) error {
			if op == "claim" && !after {
				if claims++; claims > 2 {
					return errDown
				}
			}
			return nil
		})
		pass, err := g.relay.Flush(t.Context())
		require.ErrorIs(t, err, errDown)
		require.Equal(t, Pass{Claimed: 2, Published: 2}, pass)
	})
}

func TestPassWhoseContextEndsLetsItsPublicationFinish(t *testing.T) {
	bubble(t, func(t *testing.T) {
		var cause error
		g := newRig(t, RelayOptions{}, PublishOptions{BatchSize: 1}, takes(5*time.Second, &cause))
		g.stage("a", "b")
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		pass, err := g.relay.Flush(ctx)
		require.ErrorIs(t, err, context.DeadlineExceeded)
		require.Equal(t, Pass{Claimed: 1, Published: 1}, pass)
		require.NoError(t, cause)
	})
}

func TestPassRefusesAChannelWhosePublicationsAllHang(t *testing.T) {
	bubble(t, func(t *testing.T) {
		release := make(chan struct{})
		g := newRig(t, RelayOptions{}, PublishOptions{InFlight: 1, AttemptTimeout: time.Second}, func(context.Context, []*Entry[string]) error {
			<-release
			return nil
		})
		g.stage("a")
		_, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		_, err = g.relay.RunOnce(t.Context())
		require.ErrorIs(t, err, errNoSlot)
		close(release)
		time.Sleep(time.Minute)
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, 1, pass.Published)
	})
}
