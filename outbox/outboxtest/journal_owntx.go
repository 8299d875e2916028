package outboxtest

import (
	"context"
	"errors"
	"slices"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// ownTxTests hold what a store without transactions of callers does with one.
var ownTxTests = []journalTest{
	{"TransactionOfACallerIsRefused", transactionOfACallerIsRefused},
}

// needsCallersTx reports whether a test shows what happens inside a caller's
// transaction, or when that is rolled back.
func needsCallersTx(t journalTest) bool {
	inVerbs := slices.ContainsFunc(verbTests, func(v journalTest) bool { return v.name == t.name })
	return inVerbs || slices.Contains([]string{
		"RolledBackPutLeavesNothing", "RolledBackSavepointTakesItsPutsBack", "OnlyThePutterSeesItsMessageBeforeCommit",
		"BegunPutRollsBackWithItsLease",
	}, t.name)
}

// strayTx is a transaction of some database that the store does not know.
type strayTx struct{ asked bool }

func (tx *strayTx) Query(context.Context, string, ...any) (outbox.Rows, error) {
	tx.asked = true
	return nil, errors.New("no such table")
}

func transactionOfACallerIsRefused(f *journalFixture) {
	s := f.scene()
	all := outbox.MessageList{Limit: 100, Payloads: true}
	before := f.list(all)
	tx := new(strayTx)
	for name, verb := range map[string]func() error{
		"PutRows": func() error {
			_, err := f.store.PutRows(f.ctx, tx, f.channel, []outbox.PutRow{message("new", "")}, 0)
			return err
		},
		"PutRows, begun": func() error {
			_, err := f.store.PutRows(f.ctx, tx, f.channel, []outbox.PutRow{message("new", "")}, long)
			return err
		},
		"ClaimMessages": func() error {
			_, err := f.store.ClaimMessages(f.ctx, tx, outbox.Claim{Channel: f.channel, Limit: 10, Lease: long, Full: true})
			return err
		},
		"BeginMessage": func() error {
			_, err := f.store.BeginMessage(f.ctx, tx, f.channel, "pending", long)
			return err
		},
		"SettleMessages": func() error {
			_, err := f.store.SettleMessages(f.ctx, tx, f.channel, []outbox.Settlement{done(s.single)})
			return err
		},
		"ExtendMessages": func() error {
			_, err := f.store.ExtendMessages(f.ctx, tx, f.channel, []outbox.Row{s.single}, 2*long)
			return err
		},
		"ListMessages": func() error {
			_, err := f.store.ListMessages(f.ctx, tx, f.channel, all)
			return err
		},
		"AmendMessages": func() error {
			_, err := f.store.AmendMessages(f.ctx, tx, f.channel, outbox.Amendment{Action: outbox.ActionDiscard, Limit: 10})
			return err
		},
	} {
		f.fails(name+" in a caller's transaction", verb(), outbox.ErrTx)
	}
	f.equal("the transaction was asked something", tx.asked, false)
	f.equal("messages", f.list(all), before)
}
