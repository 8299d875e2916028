package migrations

import (
	"io/fs"
	"regexp"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// token is a quoted name, a literal, a comment, or one character of the rest.
var token = regexp.MustCompile(`(?s)"(?:[^"]|"")*"|'(?:[^']|'')*'|--[^\n]*|.`)

// shape is a text of SQL with its names and literals taken out.
func shape(text string) string {
	return token.ReplaceAllStringFunc(text, func(s string) string {
		switch s[0] {
		case '"':
			return `""`
		case '\'':
			return `''`
		}
		return s
	})
}

// FuzzFiles: odd names of a schema and a prefix change the names in the
// migrations, and nothing of what they do.
func FuzzFiles(f *testing.F) {
	for _, seed := range [][2]string{
		{"public", "outbox_"}, {`a"b`, `"`}, {`"; DROP TABLE x; --`, `'`}, {"o'brien", "--"}, {"{t:x}", "{schema}"}, {"é", "/*"}, {"-- +goose Down", "$$"}, {"s", ""},
	} {
		f.Add(seed[0], seed[1])
	}
	f.Fuzz(func(t *testing.T, schema, prefix string) {
		for _, plain := range []dialect.Dialect{dialect.Postgres(), dialect.SQLite()} {
			odd := plain.In(schema, prefix)
			if odd.Validate() != nil {
				continue
			}
			want, err := Files(plain)
			require.NoError(t, err)
			got, err := Files(odd)
			require.NoError(t, err)
			require.NoError(t, fs.WalkDir(want, ".", func(name string, e fs.DirEntry, err error) error {
				if err != nil || !strings.HasSuffix(name, ".sql") {
					return err
				}
				a, err := fs.ReadFile(want, name)
				require.NoError(t, err)
				b, err := fs.ReadFile(got, name)
				require.NoError(t, err)
				require.Equal(t, shape(string(a)), shape(string(b)), name)
				return nil
			}))
		}
	})
}
