package integration

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// TestJournalPlansNeverDependOnStatistics: with statistics that are missing,
// stale or fresh, a relay's statements walk an index and look at no more than
// a few rows per message of the batch, whatever lies beside: a large backlog,
// one group of many thousands, thousands of blocked groups, and dead messages.
func TestJournalPlansNeverDependOnStatistics(t *testing.T) {
	t.Parallel()
	onlyPostgres(t, func(t *testing.T, s *site) {
		for _, table := range []string{`{t:messages}`, `{t:groups}`} {
			s.exec(s.dialect.Render(`ALTER TABLE ` + table + ` SET (autovacuum_enabled = off)`))
		}
		analyse := func() {
			s.exec(s.dialect.Render(`VACUUM ANALYZE {t:messages}`))
			s.exec(s.dialect.Render(`VACUUM ANALYZE {t:groups}`))
		}
		for _, state := range []struct {
			name string
			make func()
		}{
			{"missing", func() { s.crowd(t) }},
			{"fresh", analyse},
			{"stale", func() { s.wipe(); analyse(); s.crowd(t) }},
		} {
			state.make()
			for _, mode := range []string{"auto", "force_custom_plan", "force_generic_plan"} {
				t.Run(state.name+", "+mode, func(t *testing.T) {
					db, p := s.explained(t, map[string]string{"plan_cache_mode": mode})
					s.sendExplained(t, db, p, true)
				})
			}
		}
		t.Run("plans kept since the journal was empty", func(t *testing.T) {
			s.wipe()
			analyse()
			db, p := s.explained(t, nil)
			s.sendExplained(t, db, p, false)
			s.crowd(t)
			s.sendExplained(t, db, p, true)
		})
	})
}

// crowd fills the journal.
func (s *site) crowd(t *testing.T) {
	const many = 10_000
	for i := range 3 {
		putRows(t, s.store, "mail", letters(fmt.Sprint("plain ", i), many, 0), 0)
		putRows(t, s.store, "nobody's", letters(fmt.Sprint("plain ", i), many, 0), 0)
		putRows(t, s.store, "mail", letters(fmt.Sprint("one group ", i), many, 1), 0)
	}
	// Groups, each blocked by a dead message, that nobody has looked at yet.
	s.exec(s.dialect.Render(`
		INSERT INTO {t:messages} (seq, channel, key, grp, due, created_at, outcome, completed_at, payload)
		SELECT i, 'mail', 'blocked ' || i, 'blocked ' || i / 2, i, i, CASE WHEN i % 2 = 0 THEN 4 ELSE 0 END, i % 2, ''
		FROM generate_series(2, 6001) AS i`))
	s.exec(s.dialect.Render(`
		INSERT INTO {t:groups} (channel, grp, due) SELECT 'mail', 'blocked ' || i, i FROM generate_series(1, 3000) AS i`))
}

// sendExplained makes every call of a relay and a putter, several times, in one session.
func (s *site) sendExplained(t *testing.T, db *sql.DB, p *plans, crowded bool) {
	const batch = 50
	store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
	require.NoError(t, err)
	ctx, ch := t.Context(), messageChannel("mail")
	var held []outbox.Row
	claim := func(full bool) func() {
		return func() {
			c, err := store.ClaimMessages(ctx, nil, outbox.Claim{Channel: "mail", Limit: batch, Lease: time.Hour, Full: full})
			require.NoError(t, err)
			if held = c.Rows; crowded {
				require.Len(t, held, batch)
			}
		}
	}
	settle := func(keep bool, outcomes ...outbox.Outcome) func() {
		return func() {
			ss := make([]outbox.Settlement, len(held))
			for i, r := range held {
				ss[i] = outbox.Settlement{Row: r, Outcome: outcomes[i%len(outcomes)], Delay: time.Hour, Keep: keep, Error: "why", Ref: "ref"}
			}
			_, err := store.Settle(ctx, ch, ss)
			require.NoError(t, err)
		}
	}
	some := 0
	put := func(n, groups int, again bool) func() {
		return func() {
			if !again {
				some++
			}
			putRows(t, store, "mail", letters(fmt.Sprintf("%p %d ", db, some), n, groups), 0)
		}
	}
	mixed := []outbox.Outcome{outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeRelease, outbox.OutcomeDead}
	for round := range 7 {
		for _, step := range []struct {
			name string
			rows int // looked at, at most
			call func()
		}{
			{"put one", 5, put(1, 0, false)},
			{"put one again", 10, put(1, 0, true)},
			{"put many", 15 * batch, put(3*batch, 0, false)},
			{"put many again", 30 * batch, put(3*batch, 0, true)},
			{"put in groups", 30 * batch, put(3*batch, 2*batch, false)},
			{"look", 400, func() {
				_, err := store.Look(ctx, []outbox.Channel{ch, messageChannel("none")})
				require.NoError(t, err)
			}},
			{"full claim", 100 * batch, claim(true)},
			{"settle, all sent", 12 * batch, settle(false, outbox.OutcomeDone)},
			{"claim", 100 * batch, claim(false)},
			{"extend", 8 * batch, func() { _, err := store.Extend(ctx, ch, held, time.Hour); require.NoError(t, err) }},
			{"settle, mixed", 30 * batch, settle(false, mixed...)},
			{"settle, the same again", 30 * batch, settle(false, mixed...)},
			{"claim", 100 * batch, claim(false)},
			{"settle, all sent and kept", 12 * batch, settle(true, outbox.OutcomeDone)},
			{"purge", 10 * batch, func() {
				_, err := store.PurgeMessages(ctx, "mail", outbox.Purge{States: []outbox.State{outbox.StateSent}, Limit: batch})
				require.NoError(t, err)
			}},
			{"begin", 30, func() { _, _ = store.BeginMessage(ctx, nil, "mail", "one group 00000001", time.Hour) }},
			{"stats", 150_000, func() { _, err := store.Stats(ctx); require.NoError(t, err) }},
		} {
			ran := p.during(t, step.call)
			require.NotEmpty(t, ran, "auto_explain told nothing of %s", step.name)
			if !crowded {
				continue
			}
			var w work
			for _, one := range ran {
				w.of(t, one.Root, fmt.Sprintf("%s, round %d: %s", step.name, round, one.Text))
			}
			if w.rows > step.rows {
				for _, one := range ran {
					b, _ := json.MarshalIndent(one.Root, "", " ")
					fmt.Println(one.Text, string(b))
				}
			}
			require.LessOrEqual(t, w.rows, step.rows, "%s, round %d, looked at %d rows", step.name, round, w.rows)
		}
	}
}
