package outbox

import (
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestRetentionDeletesSentMessagesOnly(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		g.relay = g.newRelay(RelayOptions{PollInterval: time.Hour}, g.journal.Sender(g.recorded(nil), SendOptions{Retention: time.Hour}))
		g.put(keys(2500)...)
		g.put("dead", "unknown", "waiting")
		g.store.change("dead", func(m *fakeMessage) { m.State, m.CompletedAt = StateDead, time.Now() })
		g.store.change("unknown", func(m *fakeMessage) { m.State, m.CompletedAt = StateUnknown, time.Now() })
		g.store.change("waiting", func(m *fakeMessage) { m.Due = time.Now().Add(1000 * time.Hour) })
		g.start()
		time.Sleep(59 * time.Minute)
		require.Equal(t, 2500, g.count(StateSent))
		time.Sleep(2*time.Minute + time.Second)
		require.Zero(t, g.count(StateSent), "batch after batch")
		time.Sleep(2 * time.Hour)
		for _, k := range []string{"dead", "unknown", "waiting"} {
			_, ok := g.store.message(k)
			require.True(t, ok, k)
		}
		for _, p := range g.store.purges {
			require.Equal(t, Purge{States: []State{StateSent}, Age: time.Hour, Limit: 1000}, p)
		}
		require.LessOrEqual(t, len(g.store.purges), 61*2+3+240, "about once a minute")
		require.Len(t, g.seen(EventPurge), 3)
		require.NoError(t, g.stop())
	})
}

func TestPurgeThatFailsIsTriedAgain(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{Retention: time.Second}, nil)
		g.put("k")
		fails := 3
		g.store.setFault(func(op string, _ bool) error {
			if op == "purge" && fails > 0 {
				fails--
				return errDown
			}
			return nil
		})
		g.start()
		time.Sleep(10 * time.Minute)
		_, ok := g.store.message("k")
		require.False(t, ok)
		require.Contains(t, g.logged(), "call=purge")
		require.NoError(t, g.stop())
	})
}

func TestDeleteOnSentNeedsNoPurge(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newJournalRig(t, SendOptions{Retention: DeleteOnSent}, nil)
		g.start()
		time.Sleep(time.Hour)
		require.Zero(t, g.store.count("purge"))
		require.NoError(t, g.stop())
	})
}
