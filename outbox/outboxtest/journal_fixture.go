package outboxtest

import (
	"context"
	"database/sql"
	"testing"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A journalFixture is one subtest of a [JournalSuite].
type journalFixture struct {
	base
	store   outbox.JournalStore
	corrupt func(t *testing.T, db *sql.DB, channel, key string)
}

// on returns the fixture with another channel.
func (f *journalFixture) on(channel string) *journalFixture {
	other := *f
	other.channel = channel
	return &other
}

// hurry returns the fixture with a context that ends soon: for calls that
// must return at once.
func (f *journalFixture) hurry() *journalFixture {
	ctx, cancel := context.WithTimeout(f.ctx, atOnce)
	f.Cleanup(cancel)
	quick := *f
	quick.ctx = ctx
	return &quick
}

// begin begins a transaction that the subtest's end rolls back: nil, for one
// of the store's own in each call, where the store has no others.
func (f *journalFixture) begin() *sql.Tx {
	f.Helper()
	if f.db == nil {
		return nil
	}
	return f.base.begin()
}

func (f *journalFixture) commit(tx *sql.Tx) {
	f.Helper()
	if tx != nil {
		f.base.commit(tx)
	}
}

// message is a message to put; group "" is no order.
func message(key, group string) outbox.PutRow {
	return outbox.PutRow{Key: key, Group: group, Payload: []byte("payload of " + key)}
}

// putIn puts messages in tx, or in a transaction of the store's own.
func (f *journalFixture) putIn(tx *sql.Tx, begin time.Duration, rows ...outbox.PutRow) []outbox.PutAnswer {
	f.Helper()
	as, err := f.store.PutRows(f.ctx, outbox.SQL(tx), f.channel, rows, begin)
	f.ok("PutRows", err)
	if len(as) != len(rows) {
		f.Fatalf("PutRows returned %d answers for %d messages", len(as), len(rows))
	}
	return as
}

// putAll puts messages in a transaction of their own and commits it.
func (f *journalFixture) putAll(rows ...outbox.PutRow) []outbox.PutAnswer {
	f.Helper()
	tx := f.begin()
	as := f.putIn(tx, 0, rows...)
	f.commit(tx)
	return as
}

// put creates a message, due at once. What is put next is due later.
func (f *journalFixture) put(key, group string) outbox.Version {
	f.Helper()
	a := f.putAll(message(key, group))[0]
	f.equal("PutRows of the new key "+key+": created", a.Created, true)
	if f.clock != nil {
		f.clock.Advance(time.Microsecond)
	}
	return a.Row.Version
}

// puts puts messages of a group one after another.
func (f *journalFixture) puts(group string, keys ...string) {
	f.Helper()
	for _, key := range keys {
		f.put(key, group)
	}
}

// ask claims up to limit messages for lease.
func (f *journalFixture) ask(limit int, lease time.Duration) outbox.Claimed {
	f.Helper()
	return f.askFor(outbox.Claim{Limit: limit, Lease: lease, Full: true})
}

func (f *journalFixture) askFor(c outbox.Claim) outbox.Claimed {
	f.Helper()
	c.Channel = f.channel
	claimed, err := f.store.ClaimMessages(f.ctx, nil, c)
	f.ok("ClaimMessages", err)
	if len(claimed.Rows) > c.Limit {
		f.Fatalf("ClaimMessages returned %d messages, over the limit of %d", len(claimed.Rows), c.Limit)
	}
	return claimed
}

// claim claims all due messages for longer than the suite runs.
func (f *journalFixture) claim() []outbox.Row {
	f.Helper()
	return f.ask(1000, long).Rows
}

// claimThese claims all that is due, which must be these.
func (f *journalFixture) claimThese(why string, want ...string) []outbox.Row {
	f.Helper()
	rows := f.claim()
	f.equal("messages claimed: "+why, keys(rows), want)
	return rows
}

// claimOne claims the one message that is due.
func (f *journalFixture) claimOne(lease time.Duration) outbox.Row {
	f.Helper()
	rows := f.ask(1000, lease).Rows
	if len(rows) != 1 {
		f.Fatalf("ClaimMessages returned %s, want one message", keys(rows))
	}
	return rows[0]
}

// claimAfter claims when d has gone by, and waits for the first message to
// come where the store's clock moves by itself.
func (f *journalFixture) claimAfter(d, lease time.Duration) []outbox.Row {
	f.Helper()
	f.pass(d)
	for {
		if rows := f.ask(1000, lease).Rows; len(rows) > 0 || f.clock != nil {
			return rows
		}
		f.ok("wait for a message", f.ctx.Err())
		time.Sleep(short / 10)
	}
}

// claimNone claims and finds nothing.
func (f *journalFixture) claimNone(why string) {
	f.Helper()
	if c := f.ask(1000, long); len(c.Rows) > 0 || c.Probe {
		f.Fatalf("ClaimMessages returned %s (probe %t), want nothing: %s", keys(c.Rows), c.Probe, why)
	}
}

// start begins a message outside any transaction.
func (f *journalFixture) start(key string, lease time.Duration) outbox.Row {
	f.Helper()
	r, err := f.store.BeginMessage(f.ctx, nil, f.channel, key, lease)
	f.ok("BeginMessage", err)
	return r
}

// startFails begins a message, which must be refused.
func (f *journalFixture) startFails(why, key string, want error) {
	f.Helper()
	_, err := f.store.BeginMessage(f.ctx, nil, f.channel, key, long)
	f.fails("BeginMessage "+why, err, want)
}

// kept settles a message as sent and keeps it.
func kept(r outbox.Row, ref string) outbox.Settlement {
	return outbox.Settlement{Row: r, Outcome: outbox.OutcomeDone, Keep: true, Ref: ref}
}

func dead(r outbox.Row) outbox.Settlement {
	return outbox.Settlement{Row: r, Outcome: outbox.OutcomeDead, Error: "refused", Code: "410"}
}

func unknown(r outbox.Row) outbox.Settlement {
	return outbox.Settlement{Row: r, Outcome: outbox.OutcomeUnknown, Error: "timeout", Code: "408"}
}

// finish settles messages, each as done, one call for each.
func (f *journalFixture) finish(rows ...outbox.Row) {
	f.Helper()
	for _, r := range rows {
		f.settle("done "+r.Key, done(r), outbox.ResultDone)
	}
}

// list returns messages without payloads: nil or empty.
func (f *journalFixture) list(l outbox.MessageList) []outbox.Row {
	f.Helper()
	rows, err := f.store.ListMessages(f.ctx, nil, f.channel, l)
	f.ok("ListMessages", err)
	for i := range rows {
		if len(rows[i].Payload) == 0 {
			rows[i].Payload = nil
		}
	}
	return rows
}

// find returns the message of a key as tx sees it, or as committed.
func (f *journalFixture) find(tx *sql.Tx, key string) (outbox.Row, bool) {
	f.Helper()
	rows, err := f.store.ListMessages(f.ctx, outbox.SQL(tx), f.channel, outbox.MessageList{
		MessageFilter: outbox.MessageFilter{Key: key}, Limit: 2, Payloads: true,
	})
	f.ok("ListMessages", err)
	if len(rows) > 1 || len(rows) == 1 && rows[0].Key != key {
		f.Fatalf("ListMessages of the key %s returned %s", key, keys(rows))
	}
	return append(rows, outbox.Row{})[0], len(rows) == 1
}

// get returns the committed message of a key.
func (f *journalFixture) get(key string) outbox.Row {
	f.Helper()
	r, there := f.find(nil, key)
	if !there {
		f.Fatalf("there is no message of the key %s", key)
	}
	return r
}

// gone checks that a key has no committed message.
func (f *journalFixture) gone(key, why string) {
	f.Helper()
	if r, there := f.find(nil, key); there {
		f.Fatalf("there is a message of the key %s (%s): %s", key, why, clip(r))
	}
}

// plain returns a row without what a store need not tell: its place, and what
// only concerns the holder of a lease where there is none.
func plain(r outbox.Row) outbox.Row {
	r.ID, r.Ambiguous, r.Alone = 0, false, false
	if r.State != outbox.StateSending {
		r.Token = 0
	}
	return r
}

// same compares whole messages.
func (f *journalFixture) same(what string, got, want outbox.Row) {
	f.Helper()
	f.equal(what, plain(got), plain(want))
}

// like is same where times that want leaves out are taken from got, once their
// form has been checked. leased, as a wanted LeaseUntil or CompletedAt, stands
// for any time.
func (f *journalFixture) like(what string, got, want outbox.Row) {
	f.Helper()
	want.StagedAt = f.stamp(what+": StagedAt", got.StagedAt, want.StagedAt)
	want.Due = f.stamp(what+": Due", got.Due, want.Due)
	for _, at := range []struct {
		name      string
		got, want *time.Time
	}{{"LeaseUntil", &got.LeaseUntil, &want.LeaseUntil}, {"CompletedAt", &got.CompletedAt, &want.CompletedAt}} {
		if at.want.Equal(leased) {
			*at.want = f.stamp(what+": "+at.name, *at.got, time.Time{})
		}
	}
	f.same(what, got, want)
}

// pending returns the row that putting p makes under a number.
func pending(p outbox.PutRow, v outbox.Version) outbox.Row {
	r := outbox.Row{Key: p.Key, Group: p.Group, Version: v, Payload: p.Payload, Header: p.Header, State: outbox.StatePending}
	if r.Payload == nil {
		r.Payload = []byte{} // a payload is empty, never nil
	}
	if len(r.Header) == 0 {
		r.Header = nil
	}
	return r
}

// sending returns what a claim makes of an unclaimed message.
func sending(r outbox.Row, token outbox.Token) outbox.Row {
	r.State, r.Token, r.LeaseUntil = outbox.StateSending, token, leased
	r.Attempt++
	return r
}

// after returns what a settlement that keeps a message makes of it.
func after(r outbox.Row, s outbox.Settlement) outbox.Row {
	r.LeaseUntil, r.LastError, r.Code = time.Time{}, s.Error, s.Code
	switch s.Outcome {
	case outbox.OutcomeRelease:
		r.Attempt--
		fallthrough
	case outbox.OutcomeRetry:
		r.Due, r.State = time.Time{}, outbox.StateFailed
		if r.Attempt == 0 {
			r.State = outbox.StatePending
		}
	case outbox.OutcomeDone:
		r.State, r.CompletedAt, r.Ref = outbox.StateSent, leased, s.Ref
	case outbox.OutcomeDead:
		r.State, r.CompletedAt = outbox.StateDead, leased
	case outbox.OutcomeUnknown:
		r.State, r.CompletedAt = outbox.StateUnknown, leased
	}
	return r
}

// amend amends the messages of a filter, at most a thousand, in one call.
func (f *journalFixture) amend(what string, action outbox.Action, filter outbox.MessageFilter, want int) {
	f.Helper()
	a, err := f.store.AmendMessages(f.ctx, nil, f.channel, outbox.Amendment{Action: action, MessageFilter: filter, Limit: 1000, Ref: "by hand"})
	f.ok("AmendMessages", err)
	f.equal(what+": messages amended", a.Count, want)
}

// byKey selects one message.
func byKey(key string) outbox.MessageFilter { return outbox.MessageFilter{Key: key} }
