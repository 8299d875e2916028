package integration

import (
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// TestG3ValueStagedDuringItsPublicationIsPublished is field case S20: whatever
// becomes of the publication under way, and whenever the new value comes.
func TestG3ValueStagedDuringItsPublicationIsPublished(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		const keys, interleavings = 20, 1000 / min(raceFactor, 2)
		l := s.latest("orders")
		m, book := newMirror(), newLedger()
		for round := range interleavings / keys {
			during(t, s, l, keys, round, m, book)
			require.Empty(t, m.differs(book))
			require.True(t, s.empty())
		}
	})
}

// during stages every key, and again while it is published, with all endings.
func during(t *testing.T, s *site, l *outbox.Latest[string], keys, round int, m *mirror, book *ledger) {
	stage := func(key, value string) {
		tx, err := s.db.BeginTx(context.Background(), nil)
		if err != nil {
			t.Error(err)
			return
		}
		defer tx.Rollback()
		v, err := l.Stage(context.Background(), tx, key, value)
		turn := book.turn()
		if err == nil {
			err = tx.Commit()
		}
		if err != nil {
			t.Error(err)
			return
		}
		book.committed(key, commit{turn, v, value})
	}
	for i := range keys {
		stage(fmt.Sprint("k", i), fmt.Sprint(round, " old"))
	}
	restaged := rand.Perm(keys)[:keys*3/4]
	var beside sync.WaitGroup
	first := true
	publish := func(_ context.Context, batch []*outbox.Entry[string]) error {
		if !first {
			for _, e := range batch {
				m.note(e)
			}
			return nil
		}
		first = false
		for n, i := range restaged {
			key := fmt.Sprint("k", i)
			if n%2 == 0 {
				stage(key, fmt.Sprint(round, " new"))
			} else {
				beside.Go(func() { // at any time until after the settlement
					time.Sleep(upTo(3 * time.Millisecond))
					stage(key, fmt.Sprint(round, " new"))
				})
			}
		}
		for _, e := range batch {
			switch m.note(e); rand.N(6) {
			case 0:
				e.Retry(time.Millisecond)
			case 1:
				e.Fail(outbox.Unknown(errDown))
			}
		}
		switch round % 5 {
		case 0:
			return errDown
		case 1:
			panic("in the middle of it")
		case 2:
			runtime.Goexit()
		}
		return nil
	}
	r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, l.Publisher(publish, outbox.PublishOptions{Backoff: constant(time.Millisecond)}))
	require.NoError(t, err)
	for quietPasses := 0; quietPasses < 3; {
		pass, err := r.RunOnce(t.Context())
		require.NoError(t, err)
		beside.Wait()
		if pass.Claimed == 0 {
			quietPasses++
			time.Sleep(2 * time.Millisecond)
		}
	}
}

// note keeps the highest version, whose repetition is no fault here.
func (m *mirror) note(e *outbox.Entry[string]) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if e.Version >= m.high[e.Key].version {
		m.high[e.Key] = commit{version: e.Version, value: e.Value}
	}
}

// TestG3StageEndsWellFromEveryState is field case S22.
func TestG3StageEndsWellFromEveryState(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		const lease = 150 * time.Millisecond
		claimed := func(l *outbox.Latest[string], channel string) outbox.Row {
			s.stage(l, "k", "old")
			return s.claim(channel, 1, lease)[0]
		}
		for state, prepare := range map[string]func(l *outbox.Latest[string], channel string){
			"unknown":          func(*outbox.Latest[string], string) {},
			"pending":          func(l *outbox.Latest[string], ch string) { s.stage(l, "k", "old") },
			"leased by a dead": func(l *outbox.Latest[string], ch string) { claimed(l, ch) },
			"lease lapsed":     func(l *outbox.Latest[string], ch string) { claimed(l, ch); time.Sleep(lease) },
			"in backoff": func(l *outbox.Latest[string], ch string) {
				s.settle(ch, outbox.OutcomeRetry, time.Hour, claimed(l, ch))
			},
			"deferred": func(l *outbox.Latest[string], ch string) {
				s.settle(ch, outbox.OutcomeRelease, time.Hour, claimed(l, ch))
			},
			"published":          func(l *outbox.Latest[string], ch string) { s.settle(ch, outbox.OutcomeDone, 0, claimed(l, ch)) },
			"superseded, leased": func(l *outbox.Latest[string], ch string) { claimed(l, ch); s.stage(l, "k", "newer") },
			"superseded, in flight": func(l *outbox.Latest[string], ch string) {
				r := claimed(l, ch)
				s.stage(l, "k", "newer")
				s.settle(ch, outbox.OutcomeDone, 0, r)
			},
			"superseded, failed": func(l *outbox.Latest[string], ch string) {
				r := claimed(l, ch)
				s.stage(l, "k", "newer")
				s.settle(ch, outbox.OutcomeRetry, time.Hour, r)
			},
			"headers broken": func(l *outbox.Latest[string], ch string) { s.stage(l, "k", "old"); s.breakHeaders(ch) },
			"payload broken": func(l *outbox.Latest[string], ch string) { s.stage(l, "k", "old"); s.breakPayload(ch) },
			"found to be broken": func(l *outbox.Latest[string], ch string) {
				s.stage(l, "k", "old")
				s.breakPayload(ch)
				s.once(l, outbox.PublishOptions{}, failing)
			},
			"a tombstone": func(l *outbox.Latest[string], ch string) {
				require.NoError(t, s.store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
					_, err := l.StageDelete(t.Context(), tx, "k")
					return err
				}))
			},
			"channel paused": func(l *outbox.Latest[string], ch string) {
				require.NoError(t, s.store.Pause(t.Context(), ch, lease, "by an operator"))
			},
			"destination down": func(l *outbox.Latest[string], ch string) {
				require.NoError(t, s.store.Outage(t.Context(), latestChannel(ch), true, "down"))
			},
		} {
			t.Run(state, func(t *testing.T) {
				channel := state
				l := s.latest(channel)
				prepare(l, channel)
				v := s.stage(l, "k", "newest")
				m := newMirror()
				publish := func(_ context.Context, batch []*outbox.Entry[string]) error {
					for _, e := range batch {
						m.note(e)
					}
					return nil
				}
				stop := s.run(outbox.RelayOptions{PollInterval: 20 * time.Millisecond, Logger: quiet},
					l.Publisher(publish, outbox.PublishOptions{Lease: lease}))
				eventually(t, "the newest value to be published and settled", func() bool {
					return m.value("k") == "newest" && s.empty()
				})
				require.NoError(t, stop())
				require.Equal(t, v, m.high["k"].version)
			})
		}
	})
}

func (s *site) breakHeaders(channel string) {
	s.exec(s.dialect.Render(`UPDATE {t:entries} SET headers = '{"broken' WHERE channel = $1`), channel)
}

func (s *site) breakPayload(channel string) {
	s.exec(s.dialect.Render(`UPDATE {t:entries} SET payload = $2 WHERE channel = $1`), channel, []byte("no JSON"))
}
