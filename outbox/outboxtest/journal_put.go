package outboxtest

import (
	"context"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// putTests hold what PutRows does to, and inside, the caller's transaction.
var putTests = []journalTest{
	{"PutCreatesAPendingMessage", putCreatesAPendingMessage},
	{"PutOfAnExistingKeyChangesNothing", putOfAnExistingKeyChangesNothing},
	{"PutOfAnExistingKeyLeavesItsGroupAlone", putOfAnExistingKeyLeavesItsGroupAlone},
	{"RolledBackPutLeavesNothing", rolledBackPutLeavesNothing},
	{"RolledBackSavepointTakesItsPutsBack", rolledBackSavepointTakesItsPutsBack},
	{"OnlyThePutterSeesItsMessageBeforeCommit", onlyThePutterSeesItsMessageBeforeCommit},
	{"PutWithoutATransactionIsDurable", putWithoutATransactionIsDurable},
	{"CancelledPutLeavesTheTransactionUsable", cancelledPutLeavesTheTransactionUsable},
	{"SameKeyTwiceInOneTransactionExists", sameKeyTwiceInOneTransactionExists},
	{"AnswersComeInTheOrderOfRows", answersComeInTheOrderOfRows},
	{"GroupIsNumberedInTheOrderOfRows", groupIsNumberedInTheOrderOfRows},
	{"NumbersAreUniqueAndSurviveJavaScript", numbersAreUniqueAndSurviveJavaScript},
	{"MessagesOfChannelsAreIndependent", messagesOfChannelsAreIndependent},
	{"DelayedMessageWaits", delayedMessageWaits},
	{"DelaysOfManyAreEachItsOwn", delaysOfManyAreEachItsOwn},
}

func putCreatesAPendingMessage(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		p := message("k"+group, group)
		p.Header = outbox.Header{"tenant": "t"}
		tx := f.begin()
		a := f.putIn(tx, 0, p)[0]
		f.commit(tx)
		f.equal("created and differs", []bool{a.Created, a.Differs}, []bool{true, false})
		want := pending(p, a.Row.Version)
		stored := f.get(p.Key)
		f.like("the stored message", stored, want)
		want.Payload, want.Header = nil, nil // the caller has them
		want.StagedAt, want.Due = stored.StagedAt, stored.Due
		f.same("the answer", a.Row, want)
	}
}

func putOfAnExistingKeyChangesNothing(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		key := "k" + group
		exists := func(state string) {
			f.Helper()
			f.pass(short / 50)
			before := f.get(key)
			other := message(key, group)
			other.Payload, other.Header, other.Delay = []byte("other"), outbox.Header{"other": "header"}, long
			elsewhere := message(key, "elsewhere")
			for i, p := range []outbox.PutRow{message(key, group), other, elsewhere} {
				a := f.putAll(p)[0]
				what := fmt.Sprintf("put %d of a %s message", i, state)
				f.equal(what+": created and differs", []bool{a.Created, a.Differs}, []bool{false, i > 0})
				f.same(what+": the answer", a.Row, before)
				f.same(what+": the stored message", f.get(key), before)
			}
		}
		f.putAll(outbox.PutRow{Key: key, Group: group, Payload: message(key, "").Payload, Header: outbox.Header{"a": "b"}})
		exists("pending")
		f.settle("retry", retry(f.claimOne(long), 0, "503"), outbox.ResultDone)
		exists("failed")
		r := f.claimOne(long)
		exists("leased")
		f.settle("sent", kept(r, "ref"), outbox.ResultDone)
		exists("sent")
		f.claimNone("its only message is sent, and 'elsewhere' has none")
	}
}

// A message that exists, perhaps in another group, has no say in when the
// group that was asked for is due.
func putOfAnExistingKeyLeavesItsGroupAlone(f *journalFixture) {
	f.put("single", "")
	f.put("elsewhere", "h")
	f.equal("messages claimed", len(f.claim()), 2)
	for i, key := range []string{"single", "elsewhere"} {
		group := fmt.Sprint("g", i)
		p := message(key, group)
		p.Delay = long
		f.putAll(p)
		f.waits("holds leased messages", long)
		f.put("first of "+group, group)
		f.finish(f.claimThese("of a group that no message was put into", "first of "+group)...)
		other := group + " too"
		p.Group = other
		f.putAll(p, message("first of "+other, other))
		r := f.claimThese("put beside one that exists", "first of "+other)[0]
		f.settle("dead", dead(r), outbox.ResultDone)
		f.claimNone("the group is blocked")
		f.putAll(p)
		f.put("second of "+other, other)
		f.amend("discard", outbox.ActionDiscard, byKey("first of "+other), 1)
		f.finish(f.claimThese("when the dead one was discarded", "second of "+other)...)
	}
}

func rolledBackPutLeavesNothing(f *journalFixture) {
	f.put("old", "g")
	tx := f.begin()
	f.putIn(tx, 0, message("new", ""), message("grouped", "g"), message("first", "h"))
	f.rollback(tx)
	for _, key := range []string{"new", "grouped", "first"} {
		f.gone(key, "rolled back")
	}
	f.claimThese("after the rollback", "old")
	f.put("new", "")
	f.put("first", "h")
	f.claimThese("after they were put again", "new", "first")
}

func rolledBackSavepointTakesItsPutsBack(f *journalFixture) {
	tx := f.begin()
	f.putIn(tx, 0, message("before", "g"))
	f.exec(tx, "SAVEPOINT a")
	f.putIn(tx, 0, message("inside", "g"), message("plain", ""))
	f.exec(tx, "ROLLBACK TO SAVEPOINT a")
	f.putIn(tx, 0, message("later", "g"))
	f.commit(tx)
	f.gone("inside", "rolled back to the savepoint")
	f.gone("plain", "rolled back to the savepoint")
	f.claimThese("after the commit", "before", "later")
}

func onlyThePutterSeesItsMessageBeforeCommit(f *journalFixture) {
	tx := f.begin()
	a := f.putIn(tx, 0, message("k", "g"))[0]
	r, there := f.find(tx, "k")
	f.equal("there in the transaction", there, true)
	f.like("the message in its transaction", r, pending(message("k", "g"), a.Row.Version))
	f.gone("k", "not committed")
	f.commit(tx)
	f.same("the message after the commit", f.get("k"), r)
}

func putWithoutATransactionIsDurable(f *journalFixture) {
	as := f.putIn(nil, 0, message("a", ""), message("b", "g"))
	for i, key := range []string{"a", "b"} {
		f.like("the message "+key, f.get(key), pending(message(key, []string{"", "g"}[i]), as[i].Row.Version))
	}
	again := f.putIn(nil, 0, message("b", "g"), message("c", "g"))
	f.equal("created, of an existing and a new one", []bool{again[0].Created, again[1].Created}, []bool{false, true})
}

func cancelledPutLeavesTheTransactionUsable(f *journalFixture) {
	cancelled, cancel := context.WithCancel(f.ctx)
	cancel()
	tx := f.begin()
	for _, group := range []string{"", "g"} {
		_, err := f.store.PutRows(cancelled, outbox.SQL(tx), f.channel, []outbox.PutRow{message("a", group)}, 0)
		f.fails("PutRows under a cancelled context", err, context.Canceled)
	}
	f.putIn(tx, 0, message("b", ""))
	f.commit(tx)
	f.gone("a", "its context was cancelled")
	f.get("b")
	_, err := f.store.PutRows(cancelled, nil, f.channel, []outbox.PutRow{message("c", "")}, 0)
	f.fails("PutRows under a cancelled context", err, context.Canceled)
	f.gone("c", "its context was cancelled")
}

func sameKeyTwiceInOneTransactionExists(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		tx := f.begin()
		first := f.putIn(tx, 0, message("k"+group, group))[0]
		second := f.putIn(tx, 0, message("k"+group, group), message("other"+group, group))
		f.equal("created", []bool{second[0].Created, second[1].Created}, []bool{false, true})
		f.equal("number of the one that exists", second[0].Row.Version, first.Row.Version)
		f.commit(tx)
	}
}

func answersComeInTheOrderOfRows(f *journalFixture) {
	rows := []outbox.PutRow{}
	for i, key := range []string{"m", "c", "z", "a", "q", "b"} {
		rows = append(rows, message(key, []string{"", "g", "h"}[i%3]))
	}
	f.put("z", "h")
	f.put("q", "elsewhere")
	as := f.putAll(rows...)
	for i, a := range as {
		key := rows[i].Key
		f.equal("key of the answer for "+key, a.Row.Key, key)
		f.equal("created "+key, a.Created, key != "z" && key != "q")
		f.equal("differs "+key, a.Differs, key == "q")
		f.equal("number of "+key, f.get(key).Version, a.Row.Version)
	}
}

func groupIsNumberedInTheOrderOfRows(f *journalFixture) {
	rows := []outbox.PutRow{}
	for i, key := range []string{"z", "m", "a", "y", "k", "b", "x", "l", "c"} {
		rows = append(rows, message(key, []string{"h", "g", "f"}[i%3]))
	}
	last := map[string]outbox.Version{}
	for _, part := range [][]outbox.PutRow{rows, {message("0", "h"), message("00", "g")}} {
		for i, a := range f.putAll(part...) {
			f.increases("of "+part[i].Key+" in its group", last[part[i].Group], a.Row.Version)
			last[part[i].Group] = a.Row.Version
		}
	}
	claimed := map[string][]string{}
	for _, r := range f.claim() {
		claimed[r.Group] = append(claimed[r.Group], r.Key)
	}
	f.equal("messages claimed", claimed, map[string][]string{"h": {"z", "y", "x", "0"}, "g": {"m", "k", "l", "00"}, "f": {"a", "b", "c"}})
}

func numbersAreUniqueAndSurviveJavaScript(f *journalFixture) {
	seen := map[outbox.Version]string{}
	for i := range 20 {
		at := f.on(fmt.Sprintf("%s-%d", f.channel, i%3))
		for j, a := range at.putAll(message(fmt.Sprint("a", i), ""), message(fmt.Sprint("b", i), "g"), message(fmt.Sprint("c", i), "h")) {
			where := fmt.Sprintf("round %d row %d", i, j)
			if other, ok := seen[a.Row.Version]; ok {
				f.Fatalf("number %d was given out twice: %s, %s", a.Row.Version, other, where)
			}
			if seen[a.Row.Version] = where; a.Row.Version <= 0 || a.Row.Version >= 1<<53 {
				f.Fatalf("number %d is not between 1 and 2^53 - 1", a.Row.Version)
			}
		}
	}
	v := f.put("k", "g")
	r := f.claimOne(long)
	f.settle("retry", retry(r, 0, "x"), outbox.ResultDone)
	f.equal("number after a retry", f.get("k").Version, v)
	f.amend("discard", outbox.ActionDiscard, byKey("k"), 1)
	f.increases("of a key put anew", v, f.put("k", "g"))
}

func messagesOfChannelsAreIndependent(f *journalFixture) {
	a, b := f.on(f.channel+"-a"), f.on(f.channel+"-b")
	for _, at := range []*journalFixture{a, b} {
		at.puts("g", "1", "2")
		at.put("k", "")
	}
	rows := a.claim()
	f.equal("messages claimed from a", len(rows), 3)
	before := b.get("1")
	b.settle("a's messages in b", done(rows[0]), outbox.ResultStale)
	b.extend("a's messages in b", rows[:1], long, outbox.ResultStale)
	f.same("b's message", b.get("1"), before)
	f.equal("messages claimed from b", len(b.claim()), 3)
	a.amend("discard in a", outbox.ActionDiscard, outbox.MessageFilter{}, 3)
	f.equal("messages left in b", len(b.list(outbox.MessageList{Limit: 10})), 3)
}

func delayedMessageWaits(f *journalFixture) {
	later := message("later", "")
	later.Delay = short
	never := message("never", "")
	never.Delay = 87_600 * time.Hour // ten years
	f.putAll(later, never)
	r := f.get("later")
	f.equal("due after it was put", r.Due.Sub(r.StagedAt), short)
	if f.clock != nil {
		f.claimNone("both are delayed")
	}
	f.equal("messages claimed", keys(f.claimAfter(short, long)), []string{"later"})
	f.claimNone("the other is due in ten years")
}

func delaysOfManyAreEachItsOwn(f *journalFixture) {
	for _, group := range []string{"", "g"} {
		f := f.on(newChannel())
		rows := []outbox.PutRow{message("c", group), message("a", group), message("b", group)}
		for i := range rows {
			rows[i].Delay = time.Duration(i) * long
		}
		for i, a := range f.putAll(rows...) {
			r := f.get(rows[i].Key)
			f.equal("due after it was put", r.Due.Sub(r.StagedAt), rows[i].Delay)
			f.equal("due as answered", a.Row.Due, r.Due)
		}
	}
}

// manyTests come last, since they leave thousands of messages.
var manyTests = []journalTest{
	{"AnyNumberOfMessagesIsPutAtOnce", anyNumberOfMessagesIsPutAtOnce},
	{"ThousandsOfGroupsDrainInOrder", thousandsOfGroupsDrainInOrder},
	{"LongGroupDrainsInOrder", longGroupDrainsInOrder},
	{"BlockedGroupsDoNotHideOthers", blockedGroupsDoNotHideOthers},
}

func anyNumberOfMessagesIsPutAtOnce(f *journalFixture) {
	sizes := []int{2, 1000, 10_000}
	if testing.Short() {
		sizes = sizes[:2]
	}
	for _, n := range sizes {
		for _, group := range []string{"", "g"} {
			f := f.on(newChannel())
			rows, odd := []outbox.PutRow{}, []outbox.PutRow{}
			for i := range n {
				rows = append(rows, message(fmt.Sprintf("%05d", i), group))
				if i%2 == 1 && n <= 1000 {
					odd = append(odd, rows[i])
				}
			}
			slices.Reverse(rows)
			f.putAll(odd...)
			numbers := map[string]outbox.Version{}
			for i, a := range f.putAll(rows...) {
				if a.Row.Key != rows[i].Key || a.Created != (n > 1000 || i%2 == 1) {
					f.Fatalf("answer %d of %d is for key %s (created %t), want key %s", i, n, a.Row.Key, a.Created, rows[i].Key)
				}
				numbers[a.Row.Key] = a.Row.Version
			}
			f.equal("messages of "+group, len(numbers), n)
			for _, r := range f.list(outbox.MessageList{Limit: n + 1}) {
				f.equal("number of "+r.Key, r.Version, numbers[r.Key])
				delete(numbers, r.Key)
			}
			f.equal("messages not listed", len(numbers), 0)
		}
	}
}
