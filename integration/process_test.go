package integration

import (
	"fmt"
	"math/rand/v2"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// fullPass is how long a row may wait beyond its lease, by G7, and slack is
// what a loaded machine may add.
const (
	fullPass = 5 * time.Second
	slack    = 3 * time.Second
)

// A process killed with SIGKILL at each step between a claim and its
// settlement leaves nothing lost and nothing stuck: a relay that has long been
// running, and whose claims start where it left off, takes over.
func TestG7KilledRelayLeavesNothingLostOrStuckAtAnyStep(t *testing.T) {
	const lease = time.Second
	for _, test := range []struct {
		at      step
		seen    bool // the killed process had published
		attempt int  // of the survivor's publication; 0: there is none
	}{
		{beforeClaim, false, 1},
		{afterClaim, false, 2},
		{inPublish, true, 2},
		{beforeSettle, true, 2},
		{afterSettle, true, 0},
	} {
		t.Run(string(test.at), func(t *testing.T) {
			onBoth(t, func(t *testing.T, s *site) {
				l := s.latest("")
				first := s.stage(l, "plain", "one")
				s.stage(l, "restaged", "old")
				w := s.startWorker(order{Lease: lease, InFlight: 1, HaltAt: test.at})
				w.await("at ")
				last := s.stage(l, "restaged", "new")
				// Long before what the survivor's claims start from.
				s.exec(s.dialect.Render(`UPDATE {t:entries} SET due = due - 60000000`))

				var survivor witness
				s.run(new(logbook).options(), l.Publisher(survivor.publish, outbox.PublishOptions{Lease: lease}))
				s.stage(l, "later", "x")
				eventually(t, "the survivor to be at work", func() bool { return len(survivor.of("later")) > 0 })
				w.kill()
				killed := time.Now()

				eventually(t, "all to be published and settled", s.empty)
				require.Less(t, time.Since(killed), lease+fullPass+slack)
				require.Equal(t, test.seen, w.publishedKey("plain"))
				require.Equal(t, last, survivor.newest()["restaged"], "the newest value went out")
				require.Len(t, survivor.of("restaged"), 1)
				if test.attempt == 0 {
					require.Empty(t, survivor.of("plain"), "it was settled before the kill")
					return
				}
				require.Len(t, survivor.of("plain"), 1)
				require.Equal(t, first, survivor.of("plain")[0].version)
				require.Equal(t, test.attempt, survivor.of("plain")[0].attempt, "attempts count at the claim")
			})
		})
	}
}

// Wherever in its work, inside a statement too, a relay is killed.
func TestG7RelayKilledAgainAndAgainLosesNothing(t *testing.T) {
	const lease, kills, each = time.Second, 8, 40
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		staged := map[string]outbox.Version{}
		published := map[string]outbox.Version{}
		for round := range kills {
			w := s.startWorker(order{Lease: lease, BatchSize: 5, Hold: time.Millisecond})
			w.await("ready")
			for n := range each {
				key := fmt.Sprintf("%d-%d", round, n)
				staged[key] = s.stage(l, key, "x")
				staged["hot"] = s.stage(l, "hot", key)
			}
			time.Sleep(rand.N(50 * time.Millisecond)) // a kill at any instruction
			w.kill()
			for _, p := range w.published() {
				published[p.key] = max(published[p.key], p.version)
			}
		}
		killed := time.Now()
		var survivor witness
		s.run(new(logbook).options(), l.Publisher(survivor.publish, outbox.PublishOptions{Lease: lease}))
		eventually(t, "all to be published and settled", s.empty)
		require.Less(t, time.Since(killed), lease+fullPass+slack)
		for key, v := range survivor.newest() {
			published[key] = max(published[key], v)
		}
		require.Equal(t, staged, published, "the newest version of every key went out")
	})
}

// A value whose publication kills the process is tried once per lease, each
// time counted, and keys in other batches go out meanwhile.
func TestG7ProcessThatDiesPublishingCountsItsAttempts(t *testing.T) {
	const lease, deaths = 700 * time.Millisecond, 3
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		s.stage(l, "poison", "x")
		s.stageMany(l, "good", 5)
		good := map[string]bool{}
		began := time.Now()
		for death := 1; death <= deaths; death++ {
			w := s.startWorker(order{Lease: lease, BatchSize: 1, InFlight: 1, DieOn: "poison"})
			require.Equal(t, killedExit, w.exited())
			for _, p := range w.published() {
				if p.key == "poison" {
					require.Equal(t, death, p.attempt)
				}
				good[p.key] = true
			}
			e, ok := entry(t, l, "poison")
			require.True(t, ok)
			require.Equal(t, death, e.Attempt, "attempts count at the claim")
		}
		require.Greater(t, time.Since(began), (deaths-1)*lease, "the lease is the backoff of a death")
		require.Greater(t, len(good), 3, "the others go out meanwhile, save what a death leaves leased")
		var survivor witness
		s.run(new(logbook).options(), l.Publisher(survivor.publish, outbox.PublishOptions{Lease: lease}))
		eventually(t, "all to be settled", s.empty)
		for key := range survivor.newest() {
			good[key] = true
		}
		require.Len(t, good, 6)
		require.Equal(t, deaths+1, survivor.of("poison")[0].attempt)
	})
}

// Two processes and the application share one file (or one server).
func TestG5ProcessesOnOneDatabasePublishEachVersionOnce(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("")
		a, b := s.startWorker(order{BatchSize: 10}), s.startWorker(order{BatchSize: 10})
		a.await("ready")
		b.await("ready")
		want := map[outbox.Version]int{}
		for n := range 300 {
			want[s.stage(l, fmt.Sprintf("k%d", n), "x")] = 1
		}
		eventually(t, "all to be published and settled", s.empty)
		got := map[outbox.Version]int{}
		for _, w := range []*worker{a, b} {
			w.stop()
			require.Equal(t, []string{"ended <nil>"}, w.said("ended"))
			for _, p := range w.published() {
				got[p.version]++
			}
		}
		require.Equal(t, want, got)
	})
}
