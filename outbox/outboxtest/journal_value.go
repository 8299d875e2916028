package outboxtest

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageValueTests hold that what is put comes back byte by byte.
var messageValueTests = []journalTest{
	{"PayloadsOfMessagesComeBackAsPut", payloadsOfMessagesComeBackAsPut},
	{"HeadersOfMessagesComeBackAsPut", headersOfMessagesComeBackAsPut},
	{"KeysOfMessagesAreComparedByteByByte", keysOfMessagesAreComparedByteByByte},
	{"GroupsAreComparedByteByByte", groupsAreComparedByteByByte},
	{"LongestKeysAndGroupsFit", longestKeysAndGroupsFit},
}

func payloadsOfMessagesComeBackAsPut(f *journalFixture) {
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	mebibyte := make([]byte, 1<<20)
	_, _ = rand.NewChaCha8([32]byte{}).Read(mebibyte)
	f.messageRoundTrip([]outbox.PutRow{
		{Key: "empty", Payload: []byte{}},
		{Key: "every byte", Payload: every, Group: "g"},
		{Key: "hexadecimal", Payload: []byte(`\x414243`)},
		{Key: "invalid utf-8", Payload: []byte("\xff\xfe\x00\xc3("), Group: "g"},
		{Key: "json", Payload: []byte(`{"b": 9223372036854775807,  "a":1.0, "a":null}`)},
		{Key: "mebibyte", Payload: mebibyte},
		{Key: "nil"},
		{Key: "nil of a group", Group: "g"},
		{Key: "placeholders", Payload: []byte(`$1 ?1 {t:messages} %s '' \' \\`)},
		{Key: "zeroes", Payload: make([]byte, 8)},
	})
}

func headersOfMessagesComeBackAsPut(f *journalFixture) {
	f.messageRoundTrip([]outbox.PutRow{
		{Key: "controls", Header: outbox.Header{"n\t\n\x01": "\r\n\x7f\x1f"}},
		{Key: "eight kibibytes", Header: outbox.Header{"n": strings.Repeat("v", 8<<10-1)}, Group: "g"},
		{Key: "empty", Header: outbox.Header{}},
		{Key: "json", Header: outbox.Header{`"}`: `{"a":[1]}`, "<&>": `\u0041\`, "N": "", "n": "lower"}},
		{Key: "unicode", Header: outbox.Header{"schlüssel\u2028": "日本語 😀 \u00e9 e\u0301 \ufffd \ufeff"}, Group: "g"},
	})
}

// messageRoundTrip puts messages and reads them back in every way: all at once,
// all without their groups, and each alone, which a store may write differently.
func (f *journalFixture) messageRoundTrip(rows []outbox.PutRow) {
	f.Helper()
	f.roundTripOf(rows)
	plain := slices.Clone(rows)
	for i := range plain {
		f.on(newChannel()).roundTripOf(rows[i : i+1])
		plain[i].Group = ""
	}
	f.on(newChannel()).roundTripOf(plain)
}

func (f *journalFixture) roundTripOf(rows []outbox.PutRow) {
	f.Helper()
	want := map[string]outbox.Row{}
	for i, a := range f.putAll(rows...) {
		want[rows[i].Key] = pending(rows[i], a.Row.Version)
	}
	for i, a := range f.putAll(rows...) {
		f.like("PutRows of the existing key "+rows[i].Key, a.Row, want[rows[i].Key])
		f.equal("created and differs "+rows[i].Key, []bool{a.Created, a.Differs}, []bool{false, false})
	}
	for _, r := range f.list(outbox.MessageList{Limit: 100}) {
		w := want[r.Key]
		w.Payload = nil
		f.like("ListMessages of "+r.Key, r, w)
		f.like("ListMessages with payloads of "+r.Key, f.get(r.Key), want[r.Key])
	}
	claimed := f.claim()
	f.equal("number of claimed messages", len(claimed), len(rows))
	for _, r := range claimed {
		f.like("ClaimMessages of "+r.Key, r, sending(want[r.Key], r.Token))
		f.settle("retry", retry(r, 0, ""), outbox.ResultDone)
	}
	for _, row := range rows {
		if row.Group != "" { // its group lets the first be begun only
			continue
		}
		r := f.start(row.Key, long)
		w := sending(want[r.Key], r.Token)
		w.Attempt = 2
		f.like("BeginMessage of "+r.Key, r, w)
	}
	f.amend("discard", outbox.ActionDiscard, outbox.MessageFilter{}, len(rows)) // large ones slow down what comes next in a file
}

func keysOfMessagesAreComparedByteByByte(f *journalFixture) {
	rows := []outbox.PutRow{}
	for _, key := range alike {
		rows = append(rows, outbox.PutRow{Key: key, Payload: []byte("payload of " + key)})
	}
	as := f.putAll(rows...)
	for i, key := range alike {
		f.like(fmt.Sprintf("message of the key %q", key), f.get(key), pending(rows[i], as[i].Row.Version))
	}
	f.settle("of a", retry(f.start("a", long), long, "x"), outbox.ResultDone)
	f.amend("discard a", outbox.ActionDiscard, byKey("a"), 1)
	for i, key := range alike[1:] {
		f.like(fmt.Sprintf("message of the key %q after a was discarded", key), f.get(key), pending(rows[i+1], as[i+1].Row.Version))
	}
}

func groupsAreComparedByteByByte(f *journalFixture) {
	rows := []outbox.PutRow{}
	for _, group := range alike {
		rows = append(rows, message("key of "+group, group))
	}
	f.putAll(rows...)
	want := []string{}
	for _, r := range rows[1:] {
		want = append(want, r.Key)
	}
	f.start("key of a", long) // and so holds the group a, and no other
	f.equal("messages claimed beside those of a", sorted(keys(f.claim())), sorted(want))
	for _, group := range alike {
		l := outbox.MessageList{MessageFilter: outbox.MessageFilter{Group: group}, Limit: 10}
		f.equal(fmt.Sprintf("messages listed of group %q", group), keys(f.list(l)), []string{"key of " + group})
	}
}

func longestKeysAndGroupsFit(f *journalFixture) {
	f = f.on(f.channel + randomText(3, 128-len(f.channel)))
	text := randomText(4, 512)
	twin := text[:511] + "~" // differs in its last byte only
	rows := []outbox.PutRow{message(text, twin), message(twin, text)}
	as := f.putAll(rows...)
	for i, row := range rows {
		f.like("message of a key of 512 bytes", f.get(row.Key), pending(row, as[i].Row.Version))
	}
	claimed := f.claim()
	f.equal("keys claimed", slices.Contains(keys(claimed), twin) && slices.Contains(keys(claimed), text), true)
	f.finish(claimed...)
	f.gone(text, "done")
}

// brokenTests hold what becomes of a message that cannot be read.
var brokenTests = []journalTest{
	{"UnreadableHeadersAreToldAndHarmNobody", unreadableHeadersAreToldAndHarmNobody},
}

func unreadableHeadersAreToldAndHarmNobody(f *journalFixture) {
	for _, key := range []string{"a", "broken", "c"} {
		p := message(key, "")
		p.Header = outbox.Header{"tenant": "t"}
		f.putAll(p)
		f.pass(short / 50)
	}
	f.corrupt(f.T, f.db, f.channel, "broken")
	check := func(what string, rows []outbox.Row) {
		f.Helper()
		f.equal("keys: "+what, keys(rows), []string{"a", "broken", "c"})
		for _, r := range rows {
			f.equal(what+": broken "+r.Key, r.Broken != nil, r.Key == "broken")
		}
	}
	check("ListMessages", f.list(outbox.MessageList{Limit: 10}))
	f.equal("PutRows of its key: broken", f.putAll(message("broken", ""))[0].Row.Broken != nil, true)
	claimed := f.claim()
	check("ClaimMessages", claimed)
	f.settle("dead", dead(claimed[1]), outbox.ResultDone)
	f.amend("discard", outbox.ActionDiscard, byKey("broken"), 1)
	f.gone("broken", "discarded")
}
