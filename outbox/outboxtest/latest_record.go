package outboxtest

import (
	"fmt"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// recordTests hold what people use to look at rows and to discard them.
var recordTests = []latestTest{
	{"ListShowsRowsInEveryState", listShowsRowsInEveryState},
	{"ListPagesThroughKeys", listPagesThroughKeys},
	{"DiscardDeletesThatVersionOnly", discardDeletesThatVersionOnly},
	{"DiscardTakesTheLeaseAway", discardTakesTheLeaseAway},
}

// list returns a page of rows, which have no payload: nil or empty.
func (f *fixture) list(after string, limit int) []outbox.Row {
	f.Helper()
	rows, err := f.store.ListRows(f.ctx, f.channel, after, limit)
	f.ok("ListRows", err)
	for i := range rows {
		if len(rows[i].Payload) == 0 {
			rows[i].Payload = nil
		}
	}
	return rows
}

func listShowsRowsInEveryState(f *fixture) {
	f.put("backoff", "v")
	r := f.claimOne(long)
	f.settle("retry", retry(r, long, "503"), outbox.ResultDone)
	f.put("leased", "v")
	f.claimOne(long)
	f.stage(century, value("scheduled", "v"))
	f.stage(0, outbox.StageRow{Key: "due", Payload: []byte("v"), Header: outbox.Header{"a": "b"}},
		outbox.StageRow{Key: "tombstone", Deleted: true})

	want := []outbox.Row{}
	for _, key := range []string{"backoff", "due", "leased", "scheduled", "tombstone"} {
		row := f.row(key)
		row.Payload = nil
		want = append(want, row)
	}
	f.equal("ListRows", f.list("", 100), want)
}

func listPagesThroughKeys(f *fixture) {
	all, rows := []string{}, []outbox.StageRow{}
	for i := range 25 {
		all = append(all, fmt.Sprintf("k%02d", i))
		rows = append(rows, value(all[i], "v"))
	}
	f.equal("ListRows of an empty channel", len(f.list("", 10)), 0)
	f.stage(0, rows...)
	got, after := []string{}, ""
	for range 4 {
		page := keys(f.list(after, 10))
		got = append(got, page...)
		if len(page) > 0 {
			after = page[len(page)-1]
		}
	}
	f.equal("keys of all pages", got, all)
	f.equal("from a key that has no row", keys(f.list("k09x", 2)), []string{"k10", "k11"})
	f.equal("from before all keys", keys(f.list("a", 1)), []string{"k00"})
	f.equal("from behind all keys", len(f.list("z", 10)), 0)
}

func discardDeletesThatVersionOnly(f *fixture) {
	discard := func(v outbox.Version) error { return f.store.DiscardRow(f.ctx, f.channel, "k", v) }
	f.fails("DiscardRow without a row", discard(1), outbox.ErrNotFound)
	old := f.put("k", "1")
	v := f.put("k", "2")
	f.put("other", "1")
	before := f.row("k")
	f.fails("DiscardRow of a former version", discard(old), outbox.ErrLeaseLost)
	f.equal("the row", f.row("k"), before)
	f.ok("DiscardRow", discard(v))
	f.gone("k", "discarded")
	f.fails("DiscardRow again", discard(v), outbox.ErrNotFound)
	f.equal("claimed keys", keys(f.claim()), []string{"other"})
}

func discardTakesTheLeaseAway(f *fixture) {
	v := f.put("k", "1")
	r := f.claimOne(long)
	f.ok("DiscardRow of a leased row", f.store.DiscardRow(f.ctx, f.channel, "k", v))
	f.gone("k", "discarded")
	f.extend("a discarded row", []outbox.Row{r}, long, outbox.ResultStale)
	f.settle("a discarded row", retry(r, 0, "x"), outbox.ResultStale)
	f.gone("k", "discarded")
	v2 := f.put("k", "2")
	f.increases("after the discard", v, v2)
	f.settle("a discarded row that has a successor", done(r), outbox.ResultStale)
	next := f.claimOne(long)
	f.equal("claimed version", next.Version, v2)
	if next.Token <= r.Token {
		f.Fatalf("token %d does not exceed its predecessor %d", next.Token, r.Token)
	}
}
