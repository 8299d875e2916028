package dialect

import (
	"context"
	"database/sql"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"
)

// bench is a database of messages with a clock that a test moves.
type bench struct {
	*testing.T
	d    Dialect
	db   *sql.DB
	now  int64
	seen []Statement // what ran
}

const (
	second = int64(1_000_000)
	lease  = 10 * second
)

func newBench(t *testing.T) *bench {
	d := SQLite()
	db, err := sql.Open("sqlite", SQLiteDSN(filepath.Join(t.TempDir(), "journal.db")))
	require.NoError(t, err)
	t.Cleanup(func() { db.Close() })
	for _, file := range []string{"0001_latest.sql", "0002_journal.sql"} {
		text, err := os.ReadFile(filepath.Join("..", "migrations", "sqlite", file))
		require.NoError(t, err)
		up, _, _ := strings.Cut(string(text), "-- +goose Down")
		_, err = db.Exec(d.Render(up))
		require.NoError(t, err)
	}
	return &bench{T: t, d: d, db: db, now: 4_000_000_000_000_000}
}

// own runs f in a transaction and notes its statements.
func (b *bench) own(f func(run Runner) error) {
	b.Helper()
	require.NoError(b, sqlite{}.own(b.Context(), b.db, func(run Runner) error {
		return f(func(ctx context.Context, st Statement, scan func(Scanner) error) error {
			b.seen = append(b.seen, st)
			return run(ctx, st, scan)
		})
	}))
}

// row is a message as scanned.
type row struct {
	at, seq, token, created, due, until, completed int64
	attempt, outcome                               int
	key, headers, lastError, group, ref, code      string
	payload                                        []byte
	lapses                                         int
}

func (r *row) scan(s Scanner, more ...any) error {
	return s.Scan(append([]any{
		&r.at, &r.key, &r.seq, &r.token, &r.attempt, &r.payload, &r.headers, &r.created, &r.due, &r.until,
		&r.lastError, &r.group, &r.outcome, &r.completed, &r.ref, &r.code, &r.lapses,
	}, more...)...)
}

// put puts messages, "key" or "group/key", and returns what was created.
func (b *bench) put(names ...string) []bool {
	b.Helper()
	answers, err := b.putWith(PutMessages{}, names...)
	require.NoError(b, err)
	created := make([]bool, len(answers))
	for i, a := range answers {
		created[i] = a.Created
	}
	return created
}

func (b *bench) putWith(p PutMessages, names ...string) (answers []PutMessage, err error) {
	p.Channel = "c"
	for _, name := range names {
		group, key, grouped := strings.Cut(name, "/")
		if !grouped {
			group, key = "", name
		}
		p.Keys, p.Groups = append(p.Keys, key), append(p.Groups, group)
		p.Payloads, p.Headers = append(p.Payloads, []byte("p")), append(p.Headers, "")
		if len(p.Delays) < len(p.Keys) {
			p.Delays = append(p.Delays, 0)
		}
	}
	own := sqlite{}.own(b.Context(), b.db, func(run Runner) error {
		answers, err = sqlite{}.put(b.Context(), run, b.d, p, b.now, func(int, Scanner) error { return nil })
		return err
	})
	return answers, own
}

func (b *bench) claim(limit int, skip ...bool) []row {
	b.Helper()
	var rows []row
	b.own(func(run Runner) error {
		c := ClaimMessages{Channel: "c", Limit: limit, Lease: lease, Full: true, SkipEnded: len(skip) > 0}
		return sqlite{}.claimMessages(b.Context(), run, b.d, c, b.now, func(s Scanner) error {
			var r row
			var probe bool
			err := r.scan(s, &probe)
			rows = append(rows, r)
			return err
		})
	})
	slices.SortFunc(rows, func(x, y row) int { return strings.Compare(x.key, y.key) })
	return rows
}

func keys(rows []row) string {
	var list []string
	for _, r := range rows {
		list = append(list, r.key)
	}
	return strings.Join(list, " ")
}

// settle ends leases with one outcome.
func (b *bench) settle(outcome int16, rows ...row) []int16 {
	b.Helper()
	n := len(rows)
	s := SettleMessages{Channel: "c", Delays: make([]int64, n), Errors: make([]string, n), Refs: make([]string, n), Codes: make([]string, n)}
	for _, r := range rows {
		s.Keys, s.Groups, s.Tokens = append(s.Keys, r.key), append(s.Groups, r.group), append(s.Tokens, r.token)
		s.Outcomes = append(s.Outcomes, outcome)
	}
	var results []int16
	b.own(func(run Runner) (err error) {
		results, err = sqlite{}.settleMessages(b.Context(), run, b.d, s, b.now)
		return err
	})
	return results
}

func (b *bench) amend(action int16, f MessageFilter) (count, last int64) {
	b.Helper()
	f.Channel = "c"
	if f.Limit == 0 {
		f.Limit = 100
	}
	b.own(func(run Runner) (err error) {
		count, last, err = sqlite{}.amendMessages(b.Context(), run, b.d, Amend{MessageFilter: f, Action: action, Ref: "ref"}, b.now)
		return err
	})
	return count, last
}

func (b *bench) list(f MessageFilter) []row {
	b.Helper()
	f.Channel = "c"
	if f.Limit == 0 {
		f.Limit = 100
	}
	var rows []row
	b.own(func(run Runner) error {
		return sqlite{}.listMessages(b.Context(), run, b.d, f, false, b.now, func(s Scanner) error {
			rows = append(rows, row{})
			return rows[len(rows)-1].scan(s)
		})
	})
	return rows
}

func (b *bench) count(query string) (n int) {
	b.Helper()
	require.NoError(b, b.db.QueryRow(b.d.Render(query)).Scan(&n))
	return n
}

func TestGroupsGoInRunsInTheirOrder(t *testing.T) {
	b := newBench(t)
	b.put("g/a1", "h/b1", "g/a2", "h/b2", "g/a3", "u1", "u2", "u3", "u4", "u5")
	rows := b.claim(8)
	require.Equal(t, "a1 a2 b1 b2 u1 u2 u3 u4", keys(rows))
	require.Equal(t, "u5", keys(b.claim(8)))
	require.Equal(t, []int16{1}, b.settle(OutcomeDone, rows[0]))
	require.Empty(t, b.claim(8), "a2 is out")
	require.Equal(t, []int16{1}, b.settle(OutcomeRetry, rows[1]))
	require.Equal(t, "a2 a3", keys(b.claim(8)))
	require.Equal(t, []int16{1, 1}, b.settle(OutcomeDone, rows[2:4]...))
	require.Zero(t, b.count(`SELECT count(*) FROM {t:groups} WHERE grp = 'h'`))
}

func TestADeadHeadBlocksItsGroupUntilItIsRetried(t *testing.T) {
	b := newBench(t)
	b.put("g/a1", "g/a2", "g/a3")
	rows := b.claim(1)
	require.Equal(t, "a1", keys(rows))
	b.settle(OutcomeDead, rows...)
	require.Empty(t, b.claim(10))
	require.Equal(t, 1, b.count(`SELECT due = 9223372036854775807 FROM {t:groups}`), "put aside")
	b.put("g/a4")
	require.Empty(t, b.claim(10))
	count, _ := b.amend(1, MessageFilter{States: []int16{5}})
	require.EqualValues(t, 1, count)
	rows = b.claim(10)
	require.Equal(t, "a1 a2 a3 a4", keys(rows))
	require.Equal(t, 1, rows[0].attempt)
	b.settle(OutcomeUnknown, rows[0])
	b.settle(OutcomeRelease, rows[1:]...)
	require.Empty(t, b.claim(10))
	require.Equal(t, "a2 a3 a4", keys(b.claim(10, true)), "skipped")
}

func TestDiscardOfALeasedHeadLetsItsGroupGo(t *testing.T) {
	b := newBench(t)
	b.put("g/a1", "g/a2")
	rows := b.claim(1)
	b.amend(2, MessageFilter{Key: "a1"})
	require.Equal(t, "a2", keys(b.claim(1)))
	require.Equal(t, []int16{ResultStale}, b.settle(OutcomeDone, rows...))
}

func TestAMessageThatLapsedTwiceIsClaimedAlone(t *testing.T) {
	b := newBench(t)
	b.put("a", "b", "g/c", "g/d")
	require.Equal(t, "a b c d", keys(b.claim(10)))
	b.now += lease
	rows := b.claim(10)
	require.Equal(t, "a b c d", keys(rows))
	for _, r := range rows {
		require.Positive(t, r.lapses)
		require.Equal(t, 1, r.attempt)
	}
	b.now += lease
	b.put("new", "h/new2")
	var order []string
	for range 8 {
		rows := b.claim(10)
		order = append(order, keys(rows))
		for _, r := range rows {
			require.Equal(t, 1, r.attempt)
		}
		b.settle(OutcomeDone, rows...)
	}
	require.Equal(t, []string{"a", "b", "c", "d", "new new2", "", "", ""}, order)
}

func TestASickMessageIsLeftForLaterWhereAnotherIsOlder(t *testing.T) {
	b := newBench(t)
	b.put("old", "older group/head")
	b.now++
	b.put("sick", "g/sick head", "older group/sick tail", "new")
	_, err := b.db.Exec(b.d.Render(`UPDATE {t:messages} SET lease_until = ?, lapses = 1, attempt = 1 WHERE key LIKE 'sick%'`), b.now)
	require.NoError(t, err)
	rows := b.claim(10)
	require.Equal(t, "head new old", keys(rows))
	require.Equal(t, "sick", keys(b.claim(10)))
	require.Equal(t, "sick head", keys(b.claim(10)))
	require.Empty(t, b.claim(10))
	b.settle(OutcomeDone, rows[0])
	require.Equal(t, "sick tail", keys(b.claim(10)))
}

func TestALapseAloneCounts(t *testing.T) {
	b := newBench(t)
	b.put("a")
	attempts := make([]int, 0)
	for range 5 {
		attempts = append(attempts, b.claim(10)[0].attempt)
		b.now += lease
	}
	require.Equal(t, []int{1, 1, 1, 2, 3}, attempts)
}

func TestTheSameSettlementAgainIsDone(t *testing.T) {
	b := newBench(t)
	for _, outcome := range []int16{OutcomeRetry, OutcomeRelease, OutcomeDead, OutcomeUnknown} {
		key := fmt.Sprintf("k%d", outcome)
		b.put(key)
		rows := b.claim(10)
		rows = rows[slices.IndexFunc(rows, func(r row) bool { return r.key == key }):][:1]
		require.Equal(t, []int16{ResultDone}, b.settle(outcome, rows...))
		require.Equal(t, []int16{ResultDone}, b.settle(outcome, rows...))
		require.Equal(t, []int16{ResultStale}, b.settle(OutcomeDone, rows...))
		b.amend(2, MessageFilter{Key: key})
	}
}

func TestARunThatAnotherRelayTookCannotBeExtended(t *testing.T) {
	b := newBench(t)
	b.put("g/a", "g/b")
	old := b.claim(10)
	b.now += lease
	require.Equal(t, "a", keys(b.claim(1)))
	var results []int16
	b.own(func(run Runner) (err error) {
		results, err = sqlite{}.extendMessages(t.Context(), run, b.d, ExtendMessages{
			Channel: "c", Keys: []string{"a", "b"}, Tokens: []int64{old[0].token, old[1].token}, Lease: lease,
		}, b.now)
		return err
	})
	require.Equal(t, []int16{ResultStale, ResultStale}, results)
	require.Equal(t, []int16{ResultStale, ResultDone}, b.settle(OutcomeDone, old...), "b was sent, and nobody has it")
}

func TestAmendmentsGoThroughAllMessagesInParts(t *testing.T) {
	b := newBench(t)
	names := make([]string, 1000)
	for part := range 25 {
		for i := range names {
			names[i] = fmt.Sprintf("k%02d-%03d", part, i)
		}
		b.put(names...)
	}
	_, err := b.db.Exec(b.d.Render(`UPDATE {t:messages} SET attempt = 1 WHERE key BETWEEN 'k24-995' AND 'k24-999'`))
	require.NoError(t, err)
	var total, after int64
	calls := 0
	for calls = 1; ; calls++ {
		count, last := b.amend(1, MessageFilter{After: after, Limit: 2})
		total += count
		if after = last; last == 0 {
			break
		}
	}
	require.EqualValues(t, 5, total)
	require.Greater(t, calls, 2)
}

func TestPurgeDeletesWhatEndedFirstAndUnblocks(t *testing.T) {
	b := newBench(t)
	b.put("g/a", "g/b")
	b.settle(OutcomeDead, b.claim(1)...)
	b.put("u")
	b.now += second
	b.settle(OutcomeUnknown, b.claim(10)...)
	b.now += second
	require.Empty(t, b.claim(10))
	purge := func(p PurgeMessages) (n int64) {
		p.Channel, p.Outcomes = "c", []int16{1, 4, 5}
		b.own(func(run Runner) (err error) {
			n, err = sqlite{}.purgeMessages(t.Context(), run, b.d, p, b.now)
			return err
		})
		return n
	}
	require.EqualValues(t, 2, purge(PurgeMessages{Before: b.now, Limit: 10, DryRun: true}))
	require.EqualValues(t, 1, purge(PurgeMessages{Age: second / 2, Limit: 1}))
	require.Equal(t, "b u", keys(b.list(MessageFilter{})))
	require.Equal(t, "b", keys(b.claim(10)))
}

func TestAnEmptyClaimAndAListDoNotWaitForTheWriter(t *testing.T) {
	b := newBench(t)
	b.put("a")
	b.claim(1)
	writer, err := beginImmediate(t.Context(), b.db)
	require.NoError(t, err)
	defer func() { require.NoError(t, endImmediate(writer, nil)) }()
	require.Empty(t, b.claim(1))
	require.Len(t, b.list(MessageFilter{}), 1)
}
