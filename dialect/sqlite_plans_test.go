package dialect

import (
	"database/sql"
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

var (
	parameters = regexp.MustCompile(`\?(\d*)`)
	// A whole table, or a whole channel's part of one, by any index but that of
	// what is dead or unknown, of which an EXISTS reads one entry.
	widely = regexp.MustCompile(`^SCAN (main\.outbox_(messages|groups|entries)|[a-z])($| LEFT-JOIN| USING)|^SEARCH \S+ USING (COVERING )?(PRIMARY KEY|INDEX \S*(autoindex|due_idx|group_idx|ended_idx)\S*) \(channel=\?\)`)
	sorted = regexp.MustCompile(`^USE TEMP B-TREE FOR ORDER BY`)
)

// plans returns the steps of every statement of a text. What a plan has
// materialized itself it may scan.
func (b *bench) plans(st Statement) (steps []string) {
	b.Helper()
	for one := range strings.SplitSeq(st.Text, ";") {
		n := 0
		for _, m := range parameters.FindAllStringSubmatch(one, -1) {
			if i, err := strconv.Atoi(m[1]); err == nil {
				n = max(n, i)
			} else {
				n++
			}
		}
		var own []string
		err := each(b.Context(), b.db, Statement{"EXPLAIN QUERY PLAN " + one, st.Args[:n]}, func(r *sql.Rows) error {
			var id, parent, unused int
			var step string
			err := r.Scan(&id, &parent, &unused, &step)
			if name, made := strings.CutPrefix(step, "MATERIALIZE "); made {
				own = append(own, "SCAN "+name)
			}
			if !slices.ContainsFunc(own, func(scan string) bool { return strings.HasPrefix(step+" ", scan+" ") }) {
				steps = append(steps, step)
			}
			return err
		})
		require.NoError(b, err, one)
	}
	return steps
}

// work does what relays do, in every way, and returns the statements.
func (b *bench) work() []Statement {
	b.seen = nil
	b.put("u1", "u2", "g/a1", "g/a2", "h/b1", "h/b2")
	rows := b.claim(10, true)
	b.settle(OutcomeDone, rows[0], rows[2])
	b.settle(OutcomeRetry, rows[1], rows[3])
	b.settle(OutcomeDead, rows[4])
	b.own(func(run Runner) error {
		_, err := sqlite{}.extendMessages(b.Context(), run, b.d, ExtendMessages{
			Channel: "c", Keys: []string{rows[5].key}, Tokens: []int64{rows[5].token}, Lease: lease,
		}, b.now)
		return err
	})
	b.settle(OutcomeUnknown, rows[5])
	b.claim(10)
	b.amend(1, MessageFilter{States: []int16{5}})
	b.amend(2, MessageFilter{Key: "b2"})
	b.own(func(run Runner) error {
		_, err := sqlite{}.purgeMessages(b.Context(), run, b.d, PurgeMessages{Channel: "c", Outcomes: []int16{1, 4, 5}, Before: b.now + 1, Limit: 9}, b.now)
		return err
	})
	b.now += lease
	b.claim(10)
	return append(b.seen, b.d.Look(Look{Systems: []int16{1, 2}, Names: []string{"c", "c"}}, b.now))
}

// A table is analysed while it is empty, or never, or when it is full: what
// relays do is a look-up, or an ordered walk that a limit ends, all the same.
func TestPlansOfTheJournalDoNotDependOnStatistics(t *testing.T) {
	fill := func(b *bench) {
		for part := range 3 {
			names := make([]string, 1000)
			for i := range names {
				names[i] = fmt.Sprintf("k%d-%d", part, i)
				if i%2 == 0 {
					names[i] = fmt.Sprintf("f%d/%s", i%100, names[i])
				}
			}
			b.put(names...)
		}
	}
	analyse := func(b *bench) {
		_, err := b.db.Exec(`ANALYZE`)
		require.NoError(b, err)
		b.db.SetMaxIdleConns(0) // connections read the statistics when they open
		b.db.SetMaxIdleConns(2)
	}
	for name, prepare := range map[string]func(*bench){
		"none":          func(*bench) {},
		"of empty ones": analyse,
		"of few rows":   func(b *bench) { b.put("x", "y/z"); analyse(b) },
		"of many rows":  func(b *bench) { fill(b); analyse(b) },
		"stale":         func(b *bench) { b.put("x", "y/z"); analyse(b); fill(b) },
	} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			prepare(b)
			var all []string
			for _, st := range b.work() {
				steps := b.plans(st)
				all = append(all, steps...)
				few := strings.Contains(st.Text, "asked") || strings.Contains(st.Text, "completed_at, seq LIMIT")
				for _, step := range steps {
					assert.False(t, widely.MatchString(step), "%s\n%s", step, st.Text)
					assert.False(t, sorted.MatchString(step) && !few, "%s\n%s", step, st.Text)
				}
			}
			require.Contains(t, all, "SEARCH main.outbox_messages USING INDEX outbox_messages_due_idx (channel=? AND due<?)")
			require.Contains(t, all, "SEARCH m USING INDEX outbox_messages_group_idx (channel=? AND grp=? AND outcome=?)")
		})
	}
}

// A claim looks at a group that is blocked once, and then no more.
func TestBlockedGroupsCostAClaimNothing(t *testing.T) {
	b := newBench(t)
	const groups = 10_000
	for part := range groups / 500 {
		names := make([]string, 0, 1000)
		for i := range 500 {
			n := part*500 + i
			names = append(names, fmt.Sprintf("g%d/head%d", n, n), fmt.Sprintf("g%d/tail%d", n, n))
		}
		b.put(names...)
	}
	_, err := b.db.Exec(b.d.Render(`UPDATE {t:messages} SET outcome = 4, completed_at = 1 WHERE key LIKE 'head%'`))
	require.NoError(t, err)
	b.now++
	b.put("behind")
	require.Equal(t, "behind", keys(b.claim(100)))
	const waiting = `SELECT count(*) FROM {t:groups} WHERE due < 9223372036854775807`
	for claims := 0; b.count(waiting) > 0; claims++ {
		require.Less(t, claims, 20, "each claim puts groups aside by the thousand")
		require.Empty(t, b.claim(100))
	}
	b.seen = nil
	require.Empty(t, b.claim(100))
	require.Len(t, b.seen, 1, "the look that comes before the lock")
}
