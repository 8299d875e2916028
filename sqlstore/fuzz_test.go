package sqlstore

import (
	"encoding/json"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// FuzzHeader: a row's headers, which any hand may have changed, are read as
// what is stored as the same again, or refused.
func FuzzHeader(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"a":"b"}`, `null`, ` {} `, `{"a"`, `{"a":1}`, `["a"]`, `a=b`, `{"a":"b"} {"c":"d"}`, `{"a":null}`,
		`{"a":"\ud800"}`, "{\"\xff\":\"\\u0000\"}", `{"a":"1","a":"2"}`, "",
	} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		var h, again outbox.Header
		if readHeader(text, &h) != nil {
			return
		}
		once, err := json.Marshal(h)
		require.NoError(t, err)
		require.NoError(t, readHeader(string(once), &again))
		require.Equal(t, h, again)
	})
}
