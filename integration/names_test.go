package integration

import (
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

var oddNames = []string{
	"my-schema", "User", "select", "o'brien", `a"b`, "a.b", "a$$b", "1x", " ", "{t:entries}", "%s", `\`, "--", "a;b", "é世",
}

// in returns the same database with an outbox of other names in it.
func (s *site) in(t *testing.T, schema, prefix string) *site {
	t.Helper()
	other := *s
	other.t = t
	other.dialect = s.dialect.In(schema, prefix)
	require.NoError(t, migrations.Up(t.Context(), s.db, other.dialect))
	require.NoError(t, migrations.Up(t.Context(), s.db, other.dialect), "again")
	other.store = other.newStore(sqlstore.Options{})
	return &other
}

// Odd names of schemas and prefixes work, or are refused up front.
func TestG10OddNamesWorkThroughout(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		for i, name := range oddNames {
			t.Run(name, func(t *testing.T) {
				schema, prefix := "", name
				if s.postgres() { // each name as a schema, and beside another as a prefix
					schema, prefix = name, oddNames[(i+1)%len(oddNames)]
				}
				odd := s.in(t, schema, prefix)
				require.NoError(t, odd.store.Check(t.Context()))
				l := odd.latest("")
				odd.stage(l, "k", "one")
				odd.stageMany(l, "many", 3)
				var w witness
				pass := odd.once(l, outbox.PublishOptions{}, w.publish)
				require.Equal(t, 4, pass.Published)
				_, _, err := odd.store.Fence(t.Context())
				require.NoError(t, err)
				require.NoError(t, odd.store.Pause(t.Context(), "default", 0, ""))
				require.NoError(t, migrations.Down(t.Context(), s.db, odd.dialect, false))
			})
		}
	})
}

func TestG10LongestNamesWorkAndLongerAreRefused(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		longest := 0
		for n := range 64 {
			if s.dialect.In("", strings.Repeat("p", n)).Validate() == nil {
				longest = n
			}
		}
		require.Greater(t, longest, 20)
		schema := ""
		if s.postgres() {
			schema = strings.Repeat("s", 63)
			require.Error(t, s.dialect.In(schema+"s", "").Validate())
		}
		one := s.in(t, schema, strings.Repeat("p", longest))
		two := s.in(t, schema, strings.Repeat("p", longest-1)+"q") // differs in its last byte
		requireApart(t, one, two)
		none := s.in(t, schema, "")
		requireApart(t, one, none)
		for _, bad := range []string{"a\nb", "a\x00b", "\xff", "$outbox$", strings.Repeat("p", 64)} {
			d := s.dialect.In("", bad)
			require.Error(t, d.Validate(), "%q", bad)
			_, err := sqlstore.New(s.db, d, sqlstore.Options{})
			require.ErrorIs(t, err, outbox.ErrInvalid)
			require.Error(t, migrations.Up(t.Context(), s.db, d))
		}
	})
}

// Two outboxes in one database, and in one process, never meet.
func TestG10OutboxesOfDifferentNamesNeverMeet(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		requireApart(t, s, s.in(t, "", "other_"))
		if s.postgres() { // to SQLite names that differ in case are the same
			requireApart(t, s, s.in(t, "", "Outbox_"))
			requireApart(t, s, s.in(t, "elsewhere", "outbox_"))
		}
	})
}

func requireApart(t *testing.T, a, b *site) {
	t.Helper()
	la, lb := a.latest(""), b.latest("")
	va, vb := a.stage(la, "k", "a"), b.stage(lb, "k", "b")
	var wa, wb witness
	pass := a.once(la, outbox.PublishOptions{}, wa.publish)
	require.Equal(t, 1, pass.Published)
	require.False(t, b.empty())
	pass = b.once(lb, outbox.PublishOptions{}, wb.publish)
	require.Equal(t, 1, pass.Published)
	require.Equal(t, va, wa.all()[0].version)
	require.Equal(t, vb, wb.all()[0].version)
	require.NoError(t, a.store.Pause(t.Context(), "default", 1e18, "x"))
	b.stage(lb, "k", "c")
	require.Equal(t, 1, b.once(lb, outbox.PublishOptions{}, wb.publish).Published, "paused is the other one")
	require.NoError(t, a.store.Pause(t.Context(), "default", 0, ""))
	require.NoError(t, migrations.Down(t.Context(), b.db, b.dialect, false))
	require.NoError(t, a.store.Check(t.Context()))
}
