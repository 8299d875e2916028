package outbox

import (
	"math"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/stretchr/testify/require"
)

// FuzzJSONCodec: a payload is decoded into what is encoded as the same again,
// or refused.
func FuzzJSONCodec(f *testing.F) {
	for _, seed := range []string{
		`{"id":9223372036854775807,"text":"<&>","list":["a"]}`, `{"id":1e400}`, `{"id":"canary"}`, `{"text":1}`, `{"`, ``, `null`,
		`{"text":"\ud800"}`, "\xff", `{"id":1}{"id":2}`, `{"ID":1,"id":2}`, strings.Repeat("[", 100),
	} {
		f.Add([]byte(seed))
	}
	type value struct {
		ID   int64    `json:"id"`
		Text string   `json:"text"`
		List []string `json:"list"`
	}
	f.Fuzz(func(t *testing.T, payload []byte) {
		var c jsonCodec[value]
		v, err := c.Decode(nil, payload)
		if err != nil {
			require.ErrorAs(t, err, new(*codecError))
			return
		}
		once, err := c.Encode(Header{}, v)
		require.NoError(t, err)
		again, err := c.Decode(nil, once)
		require.NoError(t, err)
		require.Equal(t, v, again)
	})
}

// FuzzCodecErrors: no error of the codec has a part of the value, whatever
// is wrong with it and wherever.
func FuzzCodecErrors(f *testing.F) {
	const canary = "c4n4ryv4lu3"
	for _, seed := range [][2]string{{"", ""}, {`{"id":"`, `"}`}, {`{"`, `":1}`}, {`{"id":1`, ``}, {`{"text":[`, `]}`}, {`{"text":[1,"`, `"]}`}} {
		f.Add(seed[0], seed[1])
	}
	type value struct {
		ID   int64           `json:"id"`
		Text string          `json:"text"`
		Map  map[string]int8 `json:"map"`
	}
	f.Add(`{"map":{"`, `":1000}}`)
	f.Fuzz(func(t *testing.T, before, after string) {
		_, err := jsonCodec[value]{}.Decode(nil, []byte(before+canary+after))
		if err != nil {
			require.NotContains(t, err.Error(), canary)
		}
	})
}

// FuzzCursor: a cursor is the one that List returned, or is refused.
func FuzzCursor(f *testing.F) {
	for _, seed := range []string{"", "1", "zz", "-1", "0", "+5", "00001", "1_0", "ABC", " 1", cursor(math.MaxInt64), "zzzzzzzzzzzzzzzz"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		v, err := parseCursor(text)
		switch {
		case err != nil:
			require.ErrorIs(t, err, ErrInvalid)
		case text == "":
			require.Zero(t, v)
		default:
			require.Positive(t, v)
			again, err := parseCursor(cursor(v))
			require.NoError(t, err)
			require.Equal(t, v, again)
		}
	})
}

// FuzzFilter: what a filter lets through can be stored and bounded, and a
// state is one that is written as it was read.
func FuzzFilter(f *testing.F) {
	f.Add("key", "group", "code", "dead", 1)
	f.Add("a\x00", "\xff", "", "no state", -1)
	f.Add(strings.Repeat("k", maxKeyBytes+1), "", strings.Repeat("c", maxCodeBytes+1), "Sent", 0)
	f.Fuzz(func(t *testing.T, key, group, code, state string, limit int) {
		s, err := ParseState(state)
		if err == nil {
			require.Equal(t, state, s.String())
		} else {
			require.ErrorIs(t, err, ErrInvalid)
		}
		filter := Filter{Key: key, Group: group, Code: code, States: []State{s}, Limit: limit}
		if err := filter.check(); err != nil {
			require.ErrorIs(t, err, ErrInvalid)
			return
		}
		require.GreaterOrEqual(t, limit, 0)
		for text, most := range map[string]int{key: maxKeyBytes, group: maxKeyBytes, code: maxKeyBytes} {
			require.True(t, utf8.ValidString(text) && len(text) <= most && !strings.Contains(text, "\x00"), "%q", text)
		}
	})
}

// FuzzErrorText: any text can be stored, in bounds, and stays as it is from
// then on.
func FuzzErrorText(f *testing.F) {
	for _, seed := range []string{"", "x", "\x00", "\xff\xfe", strings.Repeat("é", MaxErrorText), strings.Repeat("\xff", 2*MaxErrorText)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		got := ErrorText(text)
		require.True(t, utf8.ValidString(got))
		require.NotContains(t, got, "\x00")
		require.LessOrEqual(t, len(got), MaxErrorText)
		require.Equal(t, got, ErrorText(got))
	})
}
