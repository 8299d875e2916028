package integration

import (
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

var sqliteParameter = regexp.MustCompile(`\?(\d+)`)

// TestSQLitePlansDoNotDependOnStatistics: an outbox is nearly empty when it is
// analysed. A relay's statements look rows up, or walk the due index as far as
// their limit, all the same; none reads the whole table.
func TestSQLitePlansDoNotDependOnStatistics(t *testing.T) {
	for name, before := range map[string]int{"none": -1, "of an empty table": 0, "of one row": 1, "of many rows": 5000} {
		t.Run(name, func(t *testing.T) {
			s := onSQLite(t)
			l := s.latest("orders")
			if before >= 0 {
				s.stageMany(l, "old", before)
				s.exec(`ANALYZE`)
			}
			db, c := s.counted(t) // connections read the statistics when they open
			store, err := sqlstore.New(db, s.dialect, sqlstore.Options{})
			require.NoError(t, err)
			s.stageMany(l, "k", 100)
			ch := latestChannel("orders")
			c.during(func() {
				claimed, err := store.ClaimRows(t.Context(), outbox.Claim{Channel: "orders", Limit: 50, Lease: time.Minute})
				require.NoError(t, err)
				require.Len(t, claimed.Rows, 50)
				_, err = store.Extend(t.Context(), ch, claimed.Rows, time.Minute)
				require.NoError(t, err)
				ss := make([]outbox.Settlement, len(claimed.Rows))
				for i, r := range claimed.Rows {
					ss[i] = outbox.Settlement{Row: r, Outcome: outcomes[i%len(outcomes)]}
				}
				_, err = store.Settle(t.Context(), ch, ss)
				require.NoError(t, err)
				_, err = store.Look(t.Context(), []outbox.Channel{ch})
				require.NoError(t, err)
			})
			seen := 0
			for _, text := range c.last {
				for one := range strings.SplitSeq(text, ";") {
					if !strings.Contains(one, "outbox_entries") {
						continue
					}
					seen++
					for _, step := range s.sqlitePlan(one) {
						require.NotRegexp(t, `SCAN (main\.outbox_entries|e)\b`, step, one)
						if !strings.Contains(one, "asked") { // Look sorts the channels it was asked about
							require.NotContains(t, step, "FOR ORDER BY", one)
						}
					}
				}
			}
			require.Greater(t, seen, 5, "a claim, an extension, and each kind of settlement")
		})
	}
}

// sqlitePlan returns the steps of a statement's plan, on a new connection.
func (s *site) sqlitePlan(text string) (steps []string) {
	var args []any
	for _, m := range sqliteParameter.FindAllStringSubmatch(text, -1) {
		n, err := strconv.Atoi(m[1])
		require.NoError(s.t, err)
		for len(args) < n {
			args = append(args, 1)
		}
	}
	rows, err := s.open().Query("EXPLAIN QUERY PLAN "+text, args...)
	require.NoError(s.t, err, text)
	defer rows.Close()
	for rows.Next() {
		var id, parent, unused int
		var step string
		require.NoError(s.t, rows.Scan(&id, &parent, &unused, &step))
		steps = append(steps, step)
	}
	require.NoError(s.t, rows.Err())
	return steps
}
