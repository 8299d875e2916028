package sink

import (
	"encoding/json"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// FuzzCheckObject: what is let through to a database's JSON functions is an
// object that Go reads too.
func FuzzCheckObject(f *testing.F) {
	for _, seed := range []string{`{}`, " \n{\"a\":1}", `[]`, `{`, `{"a":1}x`, "\ufeff{}", "{\"a\":\"\xff\"}", `null`, ``} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		if checkObject(payload) != nil {
			return
		}
		require.True(t, utf8.Valid(payload))
		var object map[string]json.RawMessage
		require.NoError(t, json.Unmarshal(payload, &object))
		require.NotNil(t, object)
	})
}

// FuzzTableName: a table's name that is not refused is one quoted name.
func FuzzTableName(f *testing.F) {
	for _, seed := range []string{"mirror", `a"b`, `"; DROP TABLE x; --`, "", "\x00", "\xff", "é世", strings.Repeat("x", 64)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, name string) {
		for _, d := range []dialect.Dialect{dialect.Postgres(), dialect.SQLite()} {
			if validName(d, name) != nil {
				continue
			}
			inner := strings.TrimSuffix(strings.TrimPrefix(d.Ident(name), `"`), `"`)
			require.NotContains(t, strings.ReplaceAll(inner, `""`, ""), `"`)
			require.Equal(t, name, strings.ReplaceAll(inner, `""`, `"`))
			require.NotContains(t, name, "\x00")
		}
	})
}
