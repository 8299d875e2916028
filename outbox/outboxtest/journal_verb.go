package outboxtest

import (
	"database/sql"
	"fmt"
	"maps"
	"slices"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// verbTests hold that each verb of a caller's transaction is a part of it.
var verbTests = []journalTest{
	{"RolledBackVerbsLeaveNothing", func(f *journalFixture) { f.inTransactions(false) }},
	{"CommittedVerbsTakeEffect", func(f *journalFixture) { f.inTransactions(true) }},
	{"VerbsSeeTheirTransaction", verbsSeeTheirTransaction},
	{"VerbsOfAFinishedTransactionAreRefused", verbsOfAFinishedTransactionAreRefused},
	{"RefusedVerbsLeaveTheTransactionUsable", refusedVerbsLeaveTheTransactionUsable},
}

// scene is one message, or group, in each state: g1 is leased in front of g2.
type scene struct{ held, single outbox.Row }

func (f *journalFixture) scene() scene {
	f.Helper()
	f.puts("", "single", "failed", "dead", "unknown")
	rows := f.claim()
	f.equal("number of claimed messages", len(rows), 4)
	f.settleAll("scene", []outbox.Settlement{retry(rows[1], 0, "x"), dead(rows[2]), unknown(rows[3])},
		outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
	f.puts("g", "g1", "g2")
	held := f.start("g1", long)
	f.put("pending", "")
	return scene{held: held, single: rows[0]}
}

// txVerb is one verb as a caller runs it; changes says which key it changes.
type txVerb struct {
	changes string
	run     func(tx *sql.Tx) error
}

// txVerbs returns every verb that takes a transaction.
func (f *journalFixture) txVerbs(s scene) map[string]txVerb {
	verbs := map[string]txVerb{
		"put": {"new", func(tx *sql.Tx) error {
			_, err := f.store.PutRows(f.ctx, outbox.SQL(tx), f.channel, []outbox.PutRow{message("new", ""), message("g3", "g")}, 0)
			return err
		}},
		"put begun": {"begun", func(tx *sql.Tx) error {
			_, err := f.store.PutRows(f.ctx, outbox.SQL(tx), f.channel, []outbox.PutRow{message("begun", "h")}, long)
			return err
		}},
		"claim": {"pending", func(tx *sql.Tx) error {
			c, err := f.store.ClaimMessages(f.ctx, outbox.SQL(tx), outbox.Claim{Channel: f.channel, Limit: 10, Lease: long, Full: true})
			if err == nil && len(c.Rows) != 2 {
				err = fmt.Errorf("claimed %s, want failed and pending", keys(c.Rows))
			}
			return err
		}},
		"begin": {"pending", func(tx *sql.Tx) error {
			_, err := f.store.BeginMessage(f.ctx, outbox.SQL(tx), f.channel, "pending", long)
			return err
		}},
		"extend": {"g1", func(tx *sql.Tx) error {
			got, err := f.store.ExtendMessages(f.ctx, outbox.SQL(tx), f.channel, []outbox.Row{s.single, s.held}, 2*long)
			return wantResults(err, got, outbox.ResultDone, outbox.ResultDone)
		}},
	}
	for i := range everySettlement(outbox.Row{}) {
		verbs[fmt.Sprint("settle ", i)] = txVerb{"g1", func(tx *sql.Tx) error {
			ss := []outbox.Settlement{everySettlement(s.single)[i], everySettlement(s.held)[i]}
			got, err := f.store.SettleMessages(f.ctx, outbox.SQL(tx), f.channel, ss)
			return wantResults(err, got, outbox.ResultDone, outbox.ResultDone)
		}}
	}
	for action, key := range map[outbox.Action]string{
		outbox.ActionRetry: "dead", outbox.ActionDiscard: "g1", outbox.ActionSent: "unknown", outbox.ActionDead: "unknown", outbox.ActionPending: "unknown",
	} {
		verbs[fmt.Sprint("amend ", action)] = txVerb{key, func(tx *sql.Tx) error {
			a, err := f.store.AmendMessages(f.ctx, outbox.SQL(tx), f.channel, outbox.Amendment{Action: action, MessageFilter: byKey(key), Limit: 10})
			if err == nil && a.Count != 1 {
				err = fmt.Errorf("amended %d messages, want 1", a.Count)
			}
			return err
		}}
	}
	return verbs
}

func wantResults(err error, got []outbox.Result, want ...outbox.Result) error {
	if err == nil && !slices.Equal(got, want) {
		err = fmt.Errorf("results are %s, want %s", named(got), named(want))
	}
	return err
}

// inTransactions runs each verb in a transaction of its own.
func (f *journalFixture) inTransactions(commit bool) {
	f.Helper()
	for _, name := range slices.Sorted(maps.Keys(f.txVerbs(scene{}))) {
		f := f.on(newChannel())
		verb := f.txVerbs(f.scene())[name]
		all := outbox.MessageList{Limit: 100, Payloads: true}
		before := f.list(all)
		old, _ := f.find(nil, verb.changes)
		tx := f.begin()
		f.ok(name+" in a transaction", verb.run(tx))
		if commit {
			f.commit(tx)
			if got, _ := f.find(nil, verb.changes); plain(got).LeaseUntil.Equal(old.LeaseUntil) && got.State == old.State {
				f.Fatalf("%s, committed, left the message %s as it was: %s", name, verb.changes, clip(got))
			}
			continue
		}
		f.rollback(tx)
		got := f.list(all)
		f.equal(name+", rolled back: messages", keys(got), keys(before))
		for i := range got {
			f.same(name+", rolled back: the message "+got[i].Key, got[i], before[i])
		}
		f.claimThese(name+", rolled back", "failed", "pending")
		f.finish(f.get("g1"))
		f.claimThese(name+", rolled back, and the group let go", "g2")
	}
}

func verbsSeeTheirTransaction(f *journalFixture) {
	tx := f.begin()
	f.putIn(tx, 0, message("1", "g"), message("2", "g"), message("single", ""))
	c, err := f.store.ClaimMessages(f.ctx, outbox.SQL(tx), outbox.Claim{Channel: f.channel, Limit: 10, Lease: long, Full: true})
	f.ok("ClaimMessages", err)
	f.equal("messages claimed in the transaction that put them", sorted(keys(c.Rows)), []string{"1", "2", "single"})
	ss := []outbox.Settlement{}
	for _, r := range c.Rows {
		ss = append(ss, kept(r, "ref"))
	}
	got, err := f.store.SettleMessages(f.ctx, outbox.SQL(tx), f.channel, ss)
	f.ok("SettleMessages", wantResults(err, got, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone))
	r, _ := f.find(tx, "1")
	f.equal("state in the transaction", r.State, outbox.StateSent)
	f.gone("1", "not committed")
	f.commit(tx)
	f.equal("state after the commit", f.get("1").State, outbox.StateSent)
	f.put("3", "g")
	f.claimThese("then", "3")
}

func verbsOfAFinishedTransactionAreRefused(f *journalFixture) {
	verbs := f.txVerbs(f.scene())
	before := f.list(outbox.MessageList{Limit: 100})
	for _, commit := range []bool{true, false} {
		tx := f.begin()
		if commit {
			f.commit(tx)
		} else {
			f.rollback(tx)
		}
		for _, name := range slices.Sorted(maps.Keys(verbs)) {
			f.fails(name+" in a finished transaction", verbs[name].run(tx), outbox.ErrTx)
		}
		_, err := f.store.ListMessages(f.ctx, outbox.SQL(tx), f.channel, outbox.MessageList{Limit: 1})
		f.fails("ListMessages in a finished transaction", err, outbox.ErrTx)
	}
	f.equal("messages", keys(f.list(outbox.MessageList{Limit: 100})), keys(before))
}

func refusedVerbsLeaveTheTransactionUsable(f *journalFixture) {
	s := f.scene()
	tx := f.begin()
	for key, want := range map[string]error{"none": outbox.ErrNotFound, "dead": outbox.ErrState, "single": outbox.ErrState, "g2": outbox.ErrBlocked} {
		_, err := f.store.BeginMessage(f.ctx, outbox.SQL(tx), f.channel, key, long)
		f.fails("BeginMessage of "+key, err, want)
	}
	foreign := s.single
	foreign.Token += 1 << 40
	got, err := f.store.SettleMessages(f.ctx, outbox.SQL(tx), f.channel, []outbox.Settlement{done(foreign)})
	f.ok("SettleMessages by a foreign token", wantResults(err, got, outbox.ResultStale))
	a, err := f.store.AmendMessages(f.ctx, outbox.SQL(tx), f.channel, outbox.Amendment{Action: outbox.ActionSent, MessageFilter: byKey("pending"), Limit: 1})
	f.ok("AmendMessages in another state", err)
	f.equal("messages amended", a.Count, 0)
	f.putIn(tx, 0, message("beside", ""))
	f.commit(tx)
	f.get("beside")
}
