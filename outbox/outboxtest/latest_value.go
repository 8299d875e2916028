package outboxtest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// valueTests hold that what is staged comes back byte by byte.
var valueTests = []latestTest{
	{"PayloadsComeBackAsStaged", payloadsComeBackAsStaged},
	{"HeadersComeBackAsStaged", headersComeBackAsStaged},
	{"TombstonesAreClaimedLikeValues", tombstonesAreClaimedLikeValues},
	{"KeysAreComparedByteByByte", keysAreComparedByteByByte},
	{"LongestKeysAndChannelsFit", longestKeysAndChannelsFit},
}

func payloadsComeBackAsStaged(f *fixture) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	mebibyte := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(mebibyte)
	f.roundTrip([]outbox.StageRow{
		{Key: "empty", Payload: []byte{}},
		{Key: "every byte", Payload: every},
		{Key: "hexadecimal", Payload: []byte(`\x414243`)},
		{Key: "invalid utf-8", Payload: []byte("\xff\xfe\x00\xc3(")},
		{Key: "json", Payload: []byte(`{"b": 9223372036854775807,  "a":1.0, "a":null}`)}, // not to be normalised
		{Key: "mebibyte", Payload: mebibyte},
		{Key: "nil"},
		{Key: "placeholders", Payload: []byte(`$1 ?1 {t:entries} %s '' \' \\`)},
		{Key: "zeroes", Payload: make([]byte, 8)},
	})
}

func headersComeBackAsStaged(f *fixture) {
	f.roundTrip([]outbox.StageRow{
		{Key: "controls", Header: outbox.Header{"n\t\n\x01": "\r\n\x7f\x1f"}},
		{Key: "eight kibibytes", Header: outbox.Header{"n": strings.Repeat("v", 8<<10-1)}},
		{Key: "empty", Header: outbox.Header{}},
		{Key: "empty value", Header: outbox.Header{"n": ""}},
		{Key: "json", Header: outbox.Header{`"}`: `{"a":[1]}`, "<&>": `\u0041\`}},
		{Key: "nil", Header: nil},
		{Key: "two", Header: outbox.Header{"N": "upper", "n": "lower"}},
		{Key: "unicode", Header: outbox.Header{"schlüssel\u2028": "日本語 😀 \u00e9 e\u0301 \ufffd \ufeff"}},
	})
}

// roundTrip stages rows, which are sorted, and reads them back in every way.
func (f *fixture) roundTrip(rows []outbox.StageRow) {
	f.Helper()
	want := map[string]outbox.Row{}
	for i, v := range f.stage(0, rows...) {
		want[rows[i].Key] = unclaimed(rows[i], v)
	}
	for key, w := range want {
		f.sameRow("PendingRow of "+key, f.row(key), w)
	}
	listed := f.list("", 100)
	f.equal("number of listed rows", len(listed), len(rows))
	for _, r := range listed {
		w := want[r.Key]
		w.Payload = nil
		f.sameRow("ListRows of "+r.Key, r, w)
	}
	claimed := f.claim()
	f.equal("number of claimed rows", len(claimed), len(rows))
	for _, r := range claimed {
		w := want[r.Key]
		w.Attempt, w.Token, w.LeaseUntil = 1, r.Token, leased
		f.sameRow("ClaimRows of "+r.Key, r, w)
	}
}

func tombstonesAreClaimedLikeValues(f *fixture) {
	grave := outbox.StageRow{Key: "k", Deleted: true, Header: outbox.Header{"by": "whom"}}
	f.put("k", "v")
	v := f.stage(0, grave)[0]
	f.sameRow("PendingRow of a tombstone", f.row("k"), unclaimed(grave, v))

	r := f.claimOne(long)
	want := unclaimed(grave, v)
	want.Attempt, want.Token, want.LeaseUntil = 1, r.Token, leased
	f.sameRow("ClaimRows of a tombstone", r, want)

	v = f.put("k", "alive")
	f.settle("the tombstone", done(r), outbox.ResultSuperseded)
	f.sameRow("PendingRow of the value after it", f.rowWithoutToken("k"), unclaimed(value("k", "alive"), v))
}

// rowWithoutToken returns a row without the token of the lease that ended last.
func (f *fixture) rowWithoutToken(key string) outbox.Row {
	f.Helper()
	r := f.row(key)
	r.Token = 0
	return r
}

// alike are keys that one collation, normalisation or conversion or other
// takes for the same, and ones that break careless statements.
var alike = []string{
	"a", "A", "á", "a\u0301", "Á", "ä", "ae", "æ", "ß", "ss", "SS", "ſs", "i", "I", "İ", "ı",
	" a", "a ", "a\t", "a\n", "a\u00a0", "a\u200b", "\ufeffa", "a\u00ad", "\x01", "a\x7f",
	"1", "01", "1.0", "１", "+1", "-1", "null", "NULL", "true", "t", "{}", "{a,b}", "[]",
	"'", "''", `"`, `\`, `\\`, "%", "_", "a%", "$1", "?1", "a;b", "--", "a/b", "a.b", "{t:entries}",
	"😀", "😁", "日本", "ヿ", "\U0010ffff", "\ufffd", "é", "e\u0301", "n", "ñ", "ll", "ch",
}

func keysAreComparedByteByByte(f *fixture) {
	sorted := slices.Sorted(slices.Values(alike)) // Go sorts strings by their bytes
	rows := []outbox.StageRow{}
	for _, key := range sorted {
		rows = append(rows, value(key, "value of "+key))
	}
	vs := f.stage(0, rows...)
	f.equal("listed keys", keys(f.list("", len(rows)+1)), sorted)
	for i, key := range sorted {
		f.sameRow(fmt.Sprintf("PendingRow of %q", key), f.row(key), unclaimed(rows[i], vs[i]))
	}
	v := f.put("a", "newer")
	for i, key := range sorted {
		want := unclaimed(rows[i], vs[i])
		if key == "a" {
			want = unclaimed(value("a", "newer"), v)
		}
		f.sameRow(fmt.Sprintf("PendingRow of %q after a restage of a", key), f.row(key), want)
	}
}

func longestKeysAndChannelsFit(f *fixture) {
	// Random text, since an index takes longer keys where they compress.
	f = f.on(f.channel + randomText(1, 128-len(f.channel)))
	first := randomText(2, 512)
	twin := first[:511] + "~" // differs in its last byte only; sorts after the ASCII padding
	rows := []outbox.StageRow{value(first, "1"), value(twin, "2")}
	vs := f.stage(0, rows...)
	for i, row := range rows {
		f.sameRow("PendingRow of a key of 512 bytes", f.row(row.Key), unclaimed(row, vs[i]))
	}
	claimed := f.claim()
	f.equal("number of claimed rows", len(claimed), 2)
	look := f.look(f.ch())[0]
	f.equal("Look at a channel of 128 bytes: something is due", look.Wait == 0, false)
	for _, r := range claimed {
		f.settle("a key of 512 bytes", done(r), outbox.ResultDone)
	}
	f.gone(first, "acknowledged")
}

// randomText returns n bytes of random UTF-8 that ends in ASCII.
func randomText(seed uint64, n int) string {
	r := rand.New(rand.NewPCG(seed, 0))
	b := []byte{}
	for len(b) < n-4 {
		c := rune(0x80 + r.IntN(utf8.MaxRune-0x80))
		if utf8.ValidRune(c) {
			b = utf8.AppendRune(b, c)
		}
	}
	for len(b) < n {
		b = append(b, byte('a'+r.IntN(26)))
	}
	return string(b)
}
