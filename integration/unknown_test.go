package integration

import (
	"context"
	"errors"
	"runtime"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// TestG8PublicationOfUnknownOutcomeIsNeverTakenForDone: the sink has the value
// each time, and the relay cannot know: it is published again, under the same
// version, until a call says that it worked.
func TestG8PublicationOfUnknownOutcomeIsNeverTakenForDone(t *testing.T) {
	for name, ending := range map[string]func(ctx context.Context) error{
		"says so":           func(context.Context) error { return outbox.Unknown(errors.New("connection reset")) },
		"panics":            func(context.Context) error { panic("after the request was sent") },
		"exits":             func(context.Context) error { runtime.Goexit(); return nil },
		"times out":         func(ctx context.Context) error { <-ctx.Done(); return ctx.Err() },
		"times out quietly": func(ctx context.Context) error { <-ctx.Done(); return nil },
	} {
		t.Run(name, func(t *testing.T) {
			onBoth(t, func(t *testing.T, s *site) {
				l := s.latest("")
				v := s.stage(l, "key", "value")
				var sink []outbox.Version
				var settled atomic.Int32
				observe := func(e outbox.Event) {
					if e.Kind == outbox.EventSettle {
						settled.Add(1)
					}
				}
				calls := 0
				stop := s.run(outbox.RelayOptions{Observe: observe}, l.Publisher(func(ctx context.Context, batch []*outbox.Entry[string]) error {
					sink = append(sink, batch[0].Version)
					if calls++; calls < 3 {
						require.Zero(t, settled.Load())
						return ending(ctx)
					}
					return nil
				}, outbox.PublishOptions{AttemptTimeout: 50 * time.Millisecond, InFlight: 1, Backoff: constant(time.Millisecond)}))
				eventually(t, "the outbox to be empty", s.empty)
				require.NoError(t, stop())
				require.Equal(t, []outbox.Version{v, v, v}, sink)
				require.EqualValues(t, 1, settled.Load())
			})
		})
	}
}
