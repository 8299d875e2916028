package integration

import (
	"cmp"
	"context"
	"database/sql"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// onlyPostgres and onlySQLite run what makes sense on one database only.
func onlyPostgres(t *testing.T, test func(t *testing.T, s *site)) {
	if !testing.Short() {
		t.Run("postgres", func(t *testing.T) { test(t, onPostgres(t)) })
	}
}

func onlySQLite(t *testing.T, test func(t *testing.T, s *site)) {
	t.Run("sqlite", func(t *testing.T) { test(t, onSQLite(t)) })
}

// onBothUnsynced is onBoth for tests of thousands of commits, whose subject is
// not what a power cut leaves of them.
func onBothUnsynced(t *testing.T, test func(t *testing.T, s *site)) {
	onBothAtOnce(t, func(t testing.TB) *site {
		dsn := dialect.SQLiteDSN(filepath.Join(t.TempDir(), "app.db"))
		return newSite(t, dialect.SQLite(), "sqlite", strings.Replace(dsn, "synchronous(FULL)", "synchronous(OFF)", 1))
	}, test)
}

// ledger keeps what was committed for each key, in the order of the commits.
// A stager takes its turn while it holds the key, which it does from Stage to
// the end of its transaction, so turns are in the order of the commits.
type ledger struct {
	turns atomic.Int64
	mu    sync.Mutex
	last  map[string]commit
	all   map[string][]commit
}

type commit struct {
	turn    int64
	version outbox.Version
	value   string
}

func newLedger() *ledger { return &ledger{last: map[string]commit{}, all: map[string][]commit{}} }

func (l *ledger) turn() int64 { return l.turns.Add(1) }

func (l *ledger) committed(key string, c commit) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.all[key] = append(l.all[key], c)
	if c.turn > l.last[key].turn {
		l.last[key] = c
	}
}

func (l *ledger) commits() (n int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, cs := range l.all {
		n += len(cs)
	}
	return n
}

// mirror is a destination that keeps the highest version of each key, and
// notes where a key's versions did not come in strictly increasing order.
type mirror struct {
	mu        sync.Mutex
	high      map[string]commit
	regressed []string
	published int
}

func newMirror() *mirror { return &mirror{high: map[string]commit{}} }

func (m *mirror) take(key string, v outbox.Version, value string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.published++
	if old := m.high[key]; v <= old.version {
		m.regressed = append(m.regressed, fmt.Sprintf("%s: %d (%s) after %d (%s)", key, v, value, old.version, old.value))
		return
	}
	m.high[key] = commit{version: v, value: value}
}

func (m *mirror) regressions() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.regressed...)
}

func (m *mirror) value(key string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.high[key].value
}

func (m *mirror) publish(_ context.Context, batch []*outbox.Entry[string]) error {
	for _, e := range batch {
		m.take(e.Key, e.Version, e.Value)
	}
	return nil
}

// differs tells for which keys the mirror does not show what was committed last.
func (m *mirror) differs(l *ledger) (keys []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	m.mu.Lock()
	defer m.mu.Unlock()
	for key, c := range l.last {
		if got := m.high[key]; got.version != c.version || got.value != c.value {
			keys = append(keys, fmt.Sprintf("%s: shows %d (%s), committed last was %d (%s)", key, got.version, got.value, c.version, c.value))
		}
	}
	return keys
}

// consume claims, takes and settles as fast as it can until ctx ends, with no
// pause between: what a relay does, without its patience.
func consume(ctx context.Context, t testing.TB, store *sqlstore.Store, channel string, take func(outbox.Row)) {
	for ctx.Err() == nil {
		if _, err := consumeOnce(store, channel, take); err != nil && !store.Retryable(err) {
			t.Errorf("consume: %v", err)
			return
		}
	}
}

// consumeOnce settles one batch; locked rows are settled until they are free.
func consumeOnce(store *sqlstore.Store, channel string, take func(outbox.Row)) (int, error) {
	ctx := context.Background()
	claimed, err := store.ClaimRows(ctx, outbox.Claim{Channel: channel, Limit: 50, Lease: time.Minute, Full: true})
	if err != nil || len(claimed.Rows) == 0 {
		return 0, err
	}
	var ss []outbox.Settlement
	for _, r := range claimed.Rows {
		take(r)
		ss = append(ss, outbox.Settlement{Row: r, Outcome: outbox.OutcomeDone})
	}
	ch := outbox.Channel{System: outbox.SystemLatest, Name: channel}
	for len(ss) > 0 {
		results, err := store.Settle(ctx, ch, ss)
		if err != nil {
			if store.Retryable(err) {
				continue
			}
			return 0, err
		}
		var busy []outbox.Settlement
		for i, r := range results {
			switch r {
			case outbox.ResultBusy:
				busy = append(busy, ss[i])
			case outbox.ResultStale:
				return 0, fmt.Errorf("settle key %q by its holder: %w", ss[i].Row.Key, outbox.ErrLeaseLost)
			}
		}
		ss = busy
	}
	return len(claimed.Rows), nil
}

// drained consumes until nothing is due.
func drained(t testing.TB, store *sqlstore.Store, channel string, take func(outbox.Row)) {
	t.Helper()
	for {
		n, err := consumeOnce(store, channel, take)
		require.NoError(t, err)
		if n == 0 {
			return
		}
	}
}

// table returns all rows of a query as text, to compare states with.
func (s *site) table(query string, args ...any) []string {
	s.t.Helper()
	return tableOf(s.t, s.db, s.dialect.Render(query), args...)
}

type queryer interface {
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
}

func tableOf(t testing.TB, q queryer, query string, args ...any) (list []string) {
	t.Helper()
	rows, err := q.QueryContext(context.Background(), query, args...)
	require.NoError(t, err)
	defer rows.Close()
	columns, err := rows.Columns()
	require.NoError(t, err)
	for rows.Next() {
		values, dest := make([]any, len(columns)), make([]any, len(columns))
		for i := range values {
			dest[i] = &values[i]
		}
		require.NoError(t, rows.Scan(dest...))
		list = append(list, fmt.Sprintf("%v", values))
	}
	require.NoError(t, rows.Err())
	return list
}

// entries is the whole content of the outbox.
func (s *site) entries() []string { return s.table(`SELECT * FROM {t:entries} ORDER BY channel, key`) }

// latestChannel names a Latest channel to a store.
func latestChannel(name string) outbox.Channel {
	return outbox.Channel{System: outbox.SystemLatest, Name: name}
}

// claim claims for a test that plays the relay.
func (s *site) claim(channel string, limit int, lease time.Duration) []outbox.Row {
	s.t.Helper()
	claimed, err := s.store.ClaimRows(context.Background(), outbox.Claim{Channel: channel, Limit: limit, Lease: lease, Full: true})
	require.NoError(s.t, err)
	return claimed.Rows
}

// settle settles rows, all with one outcome.
func (s *site) settle(channel string, o outbox.Outcome, delay time.Duration, rows ...outbox.Row) []outbox.Result {
	s.t.Helper()
	ss := make([]outbox.Settlement, len(rows))
	for i, r := range rows {
		ss[i] = outbox.Settlement{Row: r, Outcome: o, Delay: delay}
	}
	results, err := s.store.Settle(context.Background(), latestChannel(channel), ss)
	require.NoError(s.t, err)
	return results
}

// once makes one pass of a relay over a channel of strings.
func (s *site) once(l *outbox.Latest[string], o outbox.PublishOptions, f outbox.PublishFunc[string]) outbox.Pass {
	s.t.Helper()
	r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, l.Publisher(f, o))
	require.NoError(s.t, err)
	pass, err := r.RunOnce(context.Background())
	require.NoError(s.t, err)
	return pass
}

// upTo is a random duration below d.
func upTo(d time.Duration) time.Duration { return rand.N(d) }

// install installs an outbox beside that of the site.
func install(t testing.TB, db *sql.DB, d dialect.Dialect) {
	t.Helper()
	require.NoError(t, migrations.Up(context.Background(), db, d))
}

func uninstall(t testing.TB, db *sql.DB, d dialect.Dialect) {
	t.Helper()
	require.NoError(t, migrations.Down(context.Background(), db, d, true))
}

func sorted[T cmp.Ordered](list []T) []T {
	list = slices.Clone(list)
	slices.Sort(list)
	return list
}
