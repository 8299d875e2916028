package dialect

import (
	"net/url"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

// FuzzNames: a schema and a prefix that are not refused are names and nothing
// else, wherever a statement has them.
func FuzzNames(f *testing.F) {
	for _, seed := range [][2]string{
		{"public", "outbox_"}, {`a"b`, `"`}, {`"; DROP TABLE x; --`, `'`}, {"o'brien", `''"`}, {"{t:x}", "{s:y}"},
		{"é世", "/*"}, {"", ""}, {"$outbox$", "\x00"}, {strings.Repeat("s", 64), strings.Repeat("p", 41)}, {"\xff", `\`},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, schema, prefix string) {
		for _, d := range []Dialect{Postgres(), SQLite()} {
			d = d.In(schema, prefix)
			if d.Validate() != nil {
				continue
			}
			rest := d.Render(`{schema}|{t:entries}|{i:due}|{s:seq}|`)
			rest = quoted(t, rest, '"', d.Schema(), "|")
			rest = quoted(t, rest, '"', d.Schema(), ".")
			rest = quoted(t, rest, '"', prefix+"entries", "|")
			rest = quoted(t, rest, '"', prefix+"due", "|")
			rest = quoted(t, rest, '\'', d.Ident(d.Schema())+"."+d.Ident(prefix+"seq"), "|")
			require.Empty(t, rest)
			require.LessOrEqual(t, len(d.Schema()), maxIdent)
			require.LessOrEqual(t, len(prefix+longestName), maxIdent)
			require.NotContains(t, schema+prefix, "\x00")
		}
	})
}

// quoted reads what stands in quotes at the start of text, as a database does:
// two are one, and the first single one is the end. It must be want, with then
// behind it, and what is left is returned.
func quoted(t *testing.T, text string, quote byte, want, then string) string {
	t.Helper()
	require.NotEmpty(t, text)
	require.Equal(t, quote, text[0])
	var got []byte
	i := 1
	for ; i < len(text); i++ {
		if text[i] == quote {
			if i+1 == len(text) || text[i+1] != quote {
				break
			}
			i++
		}
		got = append(got, text[i])
	}
	require.Less(t, i, len(text), "no closing quote")
	require.Equal(t, want, string(got))
	rest, ok := strings.CutPrefix(text[i+1:], then)
	require.True(t, ok, "%q behind a name", text[i+1:])
	return rest
}

// FuzzPlace: a ctid is read as what is written again, and anything else is an
// error or a place, but no panic.
func FuzzPlace(f *testing.F) {
	for _, seed := range []string{"(0,1)", "(4294967295,65535)", "", "(", ",", "(1,2", "(99999999999999999999,1)", "(-1,2)", "(1,2,3)"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var p, again Place
		if p.Scan(text) != nil {
			return
		}
		if p < 0 || int64(p)>>16 > 1<<32-1 {
			return // no ctid of Postgres, whose blocks have 32 bits
		}
		require.NoError(t, again.Scan(tids([]Place{p})[0]))
		require.Equal(t, p, again)
	})
}

// FuzzSQLiteDSN: whatever a path has in it stays in the path, so that no part
// of it is taken for a parameter, a host or a fragment.
func FuzzSQLiteDSN(f *testing.F) {
	for _, seed := range []string{
		"app.db", "/var/lib/app.db", "//host/app.db", "a?mode=memory", "a#b", "100%.db", "%3f", "a b", ":memory:", "日本.db", "a&_pragma=foreign_keys(0)", "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, path string) {
		dsn := SQLiteDSN(path)
		escaped, query, found := strings.Cut(strings.TrimPrefix(dsn, "file:"), "?")
		require.True(t, found)
		require.NotContains(t, dsn, "#")
		require.False(t, strings.HasPrefix(escaped, "//"), "%q names a host", dsn)
		got, err := url.PathUnescape(escaped)
		require.NoError(t, err)
		if strings.HasPrefix(path, "//") {
			path = "/" + strings.TrimLeft(path, "/")
		}
		require.Equal(t, path, got)
		_, plain, _ := strings.Cut(SQLiteDSN("x"), "?")
		require.Equal(t, plain, query)
	})
}
