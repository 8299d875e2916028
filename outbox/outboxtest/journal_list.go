package outboxtest

import (
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageListTests hold how messages are looked at.
var messageListTests = []journalTest{
	{"ListPagesThroughNumbers", listPagesThroughNumbers},
	{"ListNarrowsByEachFilter", listNarrowsByEachFilter},
	{"ListHasPayloadsOnlyIfAsked", listHasPayloadsOnlyIfAsked},
}

func listPagesThroughNumbers(f *journalFixture) {
	f.equal("messages of an empty channel", len(f.list(outbox.MessageList{Limit: 10})), 0)
	all := []string{}
	for i := range 25 {
		all = append(all, fmt.Sprintf("k%02d", 99-i)) // keys go down as numbers go up
	}
	for i, key := range all {
		f.put(key, []string{"", "g"}[i%2])
	}
	got, after := []string{}, outbox.Version(0)
	for _, size := range []int{10, 10, 5, 0} {
		page := f.list(outbox.MessageList{After: after, Limit: 10})
		f.equal("size of a page", len(page), size)
		got = append(got, keys(page)...)
		if size > 0 {
			after = page[size-1].Version
		}
	}
	f.equal("messages of all pages", got, all)
	f.equal("messages from a number on", keys(f.list(outbox.MessageList{After: f.get(all[3]).Version, Limit: 2})), all[4:6])
}

func listNarrowsByEachFilter(f *journalFixture) {
	f.scene()
	r := f.start("failed", long)
	f.settle("retry", outbox.Settlement{Row: r, Outcome: outbox.OutcomeRetry, Delay: long, Error: "x", Code: "E1"}, outbox.ResultDone)
	f.put("failed too", "h")
	f.settle("retry", outbox.Settlement{Row: f.start("failed too", long), Outcome: outbox.OutcomeRetry, Delay: long, Error: "x", Code: "E1"}, outbox.ResultDone)
	for _, c := range []struct {
		filter outbox.MessageFilter
		want   []string
	}{
		{outbox.MessageFilter{}, []string{"single", "failed", "dead", "unknown", "g1", "g2", "pending", "failed too"}},
		{outbox.MessageFilter{Key: "failed"}, []string{"failed"}},
		{outbox.MessageFilter{Key: "none"}, []string{}},
		{outbox.MessageFilter{Group: "g"}, []string{"g1", "g2"}},
		{outbox.MessageFilter{Group: "none"}, []string{}},
		{outbox.MessageFilter{Code: "E1"}, []string{"failed", "failed too"}},
		{outbox.MessageFilter{Code: "408"}, []string{"unknown"}},
		{outbox.MessageFilter{States: []outbox.State{outbox.StatePending}}, []string{"g2", "pending"}},
		{outbox.MessageFilter{States: []outbox.State{outbox.StateFailed}}, []string{"failed", "failed too"}},
		{outbox.MessageFilter{States: []outbox.State{outbox.StateSending}}, []string{"single", "g1"}},
		{outbox.MessageFilter{States: []outbox.State{outbox.StateSent}}, []string{}},
		{outbox.MessageFilter{States: []outbox.State{outbox.StateDead, outbox.StateUnknown}}, []string{"dead", "unknown"}},
		{outbox.MessageFilter{States: []outbox.State{outbox.StatePending}, Group: "g"}, []string{"g2"}},
		{outbox.MessageFilter{States: []outbox.State{outbox.StateFailed}, Code: "E1", Group: "h"}, []string{"failed too"}},
		{outbox.MessageFilter{Key: "failed", Group: "g"}, []string{}},
	} {
		got := f.list(outbox.MessageList{MessageFilter: c.filter, Limit: 100})
		f.equal(fmt.Sprintf("messages of the filter %+v", c.filter), keys(got), c.want)
		if first := f.list(outbox.MessageList{MessageFilter: c.filter, Limit: 1}); len(c.want) > 0 {
			f.equal(fmt.Sprintf("first message of the filter %+v", c.filter), keys(first), c.want[:1])
			rest := f.list(outbox.MessageList{MessageFilter: c.filter, Limit: 100, After: first[0].Version})
			f.equal(fmt.Sprintf("further messages of the filter %+v", c.filter), keys(rest), c.want[1:])
		}
	}
}

func listHasPayloadsOnlyIfAsked(f *journalFixture) {
	f.put("k", "")
	for _, payloads := range []bool{false, true} {
		rows, err := f.store.ListMessages(f.ctx, nil, f.channel, outbox.MessageList{Limit: 1, Payloads: payloads})
		f.ok("ListMessages", err)
		f.equal(fmt.Sprintf("payload (asked: %t)", payloads), string(rows[0].Payload), map[bool]string{true: "payload of k"}[payloads])
	}
}

// purgeTests hold what PurgeMessages deletes.
var purgeTests = []journalTest{
	{"PurgeDeletesWhatEndedLongAgo", purgeDeletesWhatEndedLongAgo},
	{"PurgeTakesTheOldestFirst", purgeTakesTheOldestFirst},
}

func (f *journalFixture) purge(what string, p outbox.Purge, want int) {
	f.Helper()
	n, err := f.store.PurgeMessages(f.ctx, f.channel, p)
	f.ok("PurgeMessages", err)
	f.equal("messages purged "+what, n, want)
}

func purgeDeletesWhatEndedLongAgo(f *journalFixture) {
	f.scene()
	f.settle("sent", kept(f.get("single"), "ref"), outbox.ResultDone)
	f.settle("sent", kept(f.get("g1"), "ref"), outbox.ResultDone)
	f.pass(short / 5)
	sent := outbox.Purge{States: []outbox.State{outbox.StateSent}, Limit: 10}
	old, dry, before := sent, sent, sent
	old.Age = long
	f.purge("of what was sent an hour ago", old, 0)
	dry.DryRun = true
	f.purge("in a dry run", dry, 2)
	f.purge("in a dry run, again", dry, 2)
	before.Before = f.get("single").CompletedAt // not before itself
	f.purge("of what was sent before the first", before, 0)
	for _, far := range []time.Time{ // to a store that counts from the epoch they are 0, or too many
		time.Unix(0, 0), time.UnixMicro(-1), time.Date(-400_000, 1, 1, 0, 0, 0, 0, time.UTC), time.Unix(-1<<62, 0),
	} {
		before.Before = far
		f.purge(fmt.Sprint("of what was sent before the year ", far.Year()), before, 0)
	}
	before.Before = time.Date(2500, 1, 1, 0, 0, 0, 0, time.FixedZone("far", 3600))
	f.purge("of what was sent", before, 2)
	f.equal("messages left", keys(f.list(outbox.MessageList{Limit: 10})), []string{"failed", "dead", "unknown", "g2", "pending"})
	f.purge("of what is dead", outbox.Purge{States: []outbox.State{outbox.StateDead}, Limit: 10}, 1)
	f.purge("of what is unknown", outbox.Purge{States: ended, Limit: 10}, 1)
	f.equal("messages left then", keys(f.list(outbox.MessageList{Limit: 10})), []string{"failed", "g2", "pending"})
}

func purgeTakesTheOldestFirst(f *journalFixture) {
	f.puts("", "a", "b", "c", "d", "e")
	rows := f.claim()
	for _, i := range []int{3, 1, 4, 0, 2} {
		f.settle("sent", kept(rows[i], ""), outbox.ResultDone)
		f.pass(short / 50)
	}
	p := outbox.Purge{States: ended, Limit: 2}
	for _, left := range [][]string{{"a", "c", "e"}, {"c"}, {}, {}} {
		f.purge("in one go", p, min(2, len(f.list(outbox.MessageList{Limit: 10}))))
		f.equal("messages left", keys(f.list(outbox.MessageList{Limit: 10})), left)
	}
}
