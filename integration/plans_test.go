package integration

import (
	"database/sql"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/stdlib"
	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// plans gathers what auto_explain tells a session about every statement it
// ran, those inside functions included.
type plans struct {
	mu   sync.Mutex
	list []plan
	bad  error
}

type plan struct {
	Text string `json:"Query Text"`
	Root node   `json:"Plan"`
}

type node struct {
	Type     string  `json:"Node Type"`
	Relation string  `json:"Relation Name"`
	Index    string  `json:"Index Name"`
	Rows     float64 `json:"Actual Rows"`
	Removed  float64 `json:"Rows Removed by Filter"`
	Loops    float64 `json:"Actual Loops"`
	Hits     int     `json:"Shared Hit Blocks"`
	Reads    int     `json:"Shared Read Blocks"`
	Children []node  `json:"Plans"`
}

func (p *plans) notice(_ *pgconn.PgConn, n *pgconn.Notice) {
	_, text, ok := strings.Cut(n.Message, "plan:\n")
	if !ok {
		return
	}
	var one plan
	err := json.Unmarshal([]byte(text), &one)
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.list = append(p.list, one); err != nil {
		p.bad = err
	}
}

// during returns the plans of what ran while f did.
func (p *plans) during(t *testing.T, f func()) []plan {
	t.Helper()
	p.mu.Lock()
	p.list = nil
	p.mu.Unlock()
	f()
	p.mu.Lock()
	defer p.mu.Unlock()
	require.NoError(t, p.bad)
	return p.list
}

// work is what plans read of the outbox's tables: index entries and rows
// looked at, whether they served or not.
type work struct{ rows int }

func (w *work) of(t *testing.T, n node, where string) {
	t.Helper()
	require.NotEqual(t, "Seq Scan", n.Type, "%s: on %s", where, n.Relation)
	if strings.HasPrefix(n.Relation, "outbox_") || strings.HasPrefix(n.Index, "outbox_") {
		w.rows += int((n.Rows + n.Removed) * n.Loops)
	}
	for _, child := range n.Children {
		w.of(t, child, where)
	}
}

// explained opens a session that explains itself; settings are its own.
func (s *site) explained(t *testing.T, settings map[string]string) (*sql.DB, *plans) {
	t.Helper()
	config, err := pgx.ParseConfig(s.dsn)
	require.NoError(t, err)
	p := new(plans)
	config.OnNotice = p.notice
	for name, value := range map[string]string{
		"session_preload_libraries": "auto_explain", "client_min_messages": "log",
		"auto_explain.log_min_duration": "0", "auto_explain.log_nested_statements": "on",
		"auto_explain.log_analyze": "on", "auto_explain.log_timing": "off", "auto_explain.log_buffers": "on", "auto_explain.log_format": "json",
	} {
		config.RuntimeParams[name] = value
	}
	for name, value := range settings {
		config.RuntimeParams[name] = value
	}
	db := stdlib.OpenDB(*config)
	t.Cleanup(func() { db.Close() })
	db.SetMaxOpenConns(1)
	require.NoError(t, db.Ping(), "auto_explain is part of Postgres: install its contrib package, and connect as a superuser")
	return db, p
}

// TestPlansNeverDependOnStatistics: with statistics that are missing, stale
// (an outbox is analysed when it is empty) or fresh, with plans made for each
// call or once for all, a relay's statements walk an index and look at no more
// than a few rows per row of the batch, whatever lies behind.
func TestPlansNeverDependOnStatistics(t *testing.T) {
	onlyPostgres(t, func(t *testing.T, s *site) {
		const backlog = 60_000
		s.exec(s.dialect.Render(`ALTER TABLE {t:entries} SET (autovacuum_enabled = off)`))
		fill := func() {
			s.stageMany(s.latest("orders"), "k", backlog/2)
			s.stageMany(s.latest("nobody's"), "k", backlog/2) // costs the others nothing
		}
		empty := func() {
			s.exec(s.dialect.Render(`TRUNCATE {t:entries}`))
			s.exec(s.dialect.Render(`VACUUM ANALYZE {t:entries}`))
		}
		states := []struct {
			name string
			make func()
		}{
			{"missing", fill},
			{"fresh", func() { s.exec(s.dialect.Render(`ANALYZE {t:entries}`)) }},
			{"stale", func() { empty(); fill() }},
		}
		modes := []string{"auto", "force_custom_plan", "force_generic_plan"}
		for _, state := range states {
			state.make()
			for _, mode := range modes {
				t.Run(state.name+", "+mode, func(t *testing.T) { s.session(t, mode)(t, everything) })
			}
		}
		t.Run("plans kept since the outbox was empty", func(t *testing.T) {
			empty()
			var kept []func(*testing.T, scope)
			for _, mode := range modes {
				work := s.session(t, mode)
				work(t, nothing)
				kept = append(kept, work)
			}
			fill()
			for _, work := range kept {
				work(t, relaysOwn)
			}
		})
	})
}

// scope is whose plans must be good.
type scope int

const (
	nothing   scope = iota
	relaysOwn       // those of relays and stagers; a person's are planned like any other statement
	everything
)

// session opens a session and returns what runs every statement of an outbox
// in it, often enough for a kept plan.
func (s *site) session(t *testing.T, mode string) func(*testing.T, scope) {
	db, p := s.explained(t, map[string]string{"plan_cache_mode": mode})
	return func(t *testing.T, checked scope) { s.work(t, db, p, checked) }
}

func (s *site) work(t *testing.T, db *sql.DB, p *plans, checked scope) {
	const batch = 50
	store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
	require.NoError(t, err)
	ch := latestChannel("orders")
	l := latestOn(t, store, "orders")
	var held []outbox.Row
	settle := func(outcomes ...outbox.Outcome) func() {
		return func() {
			ss := make([]outbox.Settlement, len(held))
			for i, r := range held {
				ss[i] = outbox.Settlement{Row: r, Outcome: outcomes[i%len(outcomes)], Delay: time.Hour}
			}
			_, err := store.Settle(t.Context(), ch, ss)
			require.NoError(t, err)
		}
	}
	claim := func(full bool) func() {
		return func() {
			c, err := store.ClaimRows(t.Context(), outbox.Claim{Channel: "orders", Limit: batch, Lease: time.Hour, Full: full})
			require.NoError(t, err)
			require.Len(t, c.Rows, batch)
			held = c.Rows
		}
	}
	stage := func(n int) func() {
		return func() {
			require.NoError(t, store.Transact(t.Context(), nil, func(tx *sql.Tx) error {
				_, err := l.StageMany(t.Context(), tx, manyItems(n))
				return err
			}))
		}
	}
	for round := range 7 {
		for _, step := range []struct {
			name string
			rows int // looked at, at most
			call func()
		}{
			{"stage one", 5, stage(1)},
			{"stage many", 15 * batch, stage(3 * batch)},
			{"look", 300, func() {
				_, err := store.Look(t.Context(), []outbox.Channel{ch, latestChannel("none")})
				require.NoError(t, err)
			}},
			{"full claim", 4 * batch, claim(true)},
			{"settle, all done", 4 * batch, settle(outbox.OutcomeDone)},
			{"claim", 4 * batch, claim(false)},
			{"extend", 4 * batch, func() { _, err := store.Extend(t.Context(), ch, held, time.Hour); require.NoError(t, err) }},
			{"settle, mixed", 8 * batch, settle(outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeRelease)},
			{"settle, stale", 8 * batch, settle(outbox.OutcomeDone, outbox.OutcomeRetry, outbox.OutcomeRelease)},
			{"discard", 10, func() { _ = store.DiscardRow(t.Context(), "orders", "k0000001", 1) }},
			{"pending", 2, func() { _, _ = store.PendingRow(t.Context(), nil, "orders", "k0029999") }},
			{"list", 20, func() { _, err := store.ListRows(t.Context(), "orders", "k001", 10); require.NoError(t, err) }},
		} {
			persons := slices.Contains([]string{"discard", "pending", "list"}, step.name)
			var w work
			ran := p.during(t, step.call)
			require.NotEmpty(t, ran, "auto_explain told nothing of %s", step.name)
			if checked == nothing || checked == relaysOwn && persons {
				continue
			}
			pages := 0
			for _, one := range ran {
				w.of(t, one.Root, fmt.Sprintf("%s, round %d: %s", step.name, round, one.Text))
				pages += one.Root.Hits + one.Root.Reads
			}
			require.LessOrEqual(t, w.rows, step.rows, "%s, round %d, looked at %d rows", step.name, round, w.rows)
			require.LessOrEqual(t, pages, 60*batch, "%s, round %d, looked at %d pages", step.name, round, pages)
		}
	}
}

// TestClaimsAreHeapOnlyInSteadyFlow: no index has to be touched, because none
// mentions what a claim changes and each page keeps room for it.
func TestClaimsAreHeapOnlyInSteadyFlow(t *testing.T) {
	t.Parallel()
	onlyPostgres(t, func(t *testing.T, s *site) {
		const refill, batch = 2_000, 100
		l := s.latest("orders")
		db := s.open()
		db.SetMaxOpenConns(1)
		store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
		require.NoError(t, err)
		updates := func() (all, hot int) {
			time.Sleep(1100 * time.Millisecond) // sessions tell what they did once a second
			require.NoError(t, db.QueryRow(s.dialect.Render(`SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables WHERE relid = {s:entries}::regclass`)).Scan(&all, &hot))
			return all, hot
		}
		cycle := func() {
			s.stageMany(l, "k", refill)
			for n := 0; n < refill; n += batch {
				c, err := store.ClaimRows(t.Context(), outbox.Claim{Channel: "orders", Limit: batch, Lease: time.Minute, Full: n == 0})
				require.NoError(t, err)
				require.Len(t, c.Rows, batch)
				ss := make([]outbox.Settlement, batch)
				for i, r := range c.Rows {
					ss[i] = outbox.Settlement{Row: r, Outcome: outbox.OutcomeDone}
				}
				_, err = store.Settle(t.Context(), latestChannel("orders"), ss)
				require.NoError(t, err)
			}
		}
		for i := range 10 {
			cycle()
			if i%3 == 2 { // what autovacuum does about every minute
				s.exec(s.dialect.Render(`VACUUM {t:entries}`))
			}
		}
		before, hotBefore := updates()
		for range 5 {
			cycle()
		}
		after, hot := updates()
		claims, heapOnly := after-before, hot-hotBefore
		require.Equal(t, 5*refill, claims)
		require.GreaterOrEqual(t, float64(heapOnly), 0.95*float64(claims), "%d of %d claims were heap-only", heapOnly, claims)
	})
}
