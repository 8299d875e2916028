//go:build unix

package integration

import (
	"context"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A process that stands still for longer than its lease, as a paused virtual
// machine does, has lost its rows when it goes on: its publication is
// cancelled, and what it would settle is refused.
func TestG5ProcessSuspendedPastItsLeaseChangesNothing(t *testing.T) {
	const lease = time.Second
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		v := s.stage(l, "k", "one")
		w := s.startWorker(order{Lease: lease, Hold: time.Minute})
		w.await("published k")
		require.NoError(t, w.cmd.Process.Signal(syscall.SIGSTOP))

		var other witness
		resumed, held := make(chan struct{}), make(chan struct{})
		book := new(logbook)
		s.run(book.options(), l.Publisher(func(ctx context.Context, batch []*outbox.Entry[string]) error {
			other.saw(batch)
			close(held)
			<-resumed
			return ctx.Err()
		}, outbox.PublishOptions{Lease: lease}))
		<-held // only once the lease has lapsed
		require.Equal(t, v, other.of("k")[0].version)
		require.Equal(t, 2, other.of("k")[0].attempt)

		require.NoError(t, w.cmd.Process.Signal(syscall.SIGCONT))
		w.await("cancelled " + outbox.ErrLeaseLost.Error())
		w.await("lost 1")
		_, waits := entry(t, l, "k")
		require.True(t, waits, "the resumed process took nothing away")
		close(resumed)
		eventually(t, "the new holder to settle", s.empty)
		require.Zero(t, book.count(outbox.EventLost))
		require.Len(t, w.published(), 1)
		require.Len(t, other.all(), 1)
	})
}
