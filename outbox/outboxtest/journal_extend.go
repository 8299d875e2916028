package outboxtest

import (
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// messageExtendTests hold who may keep a message, and its group, for longer.
var messageExtendTests = []journalTest{
	{"ExtendHoldsAMessage", extendHoldsAMessage},
	{"ExtendHoldsTheGroup", extendHoldsTheGroup},
	{"LapsedLeaseOfAMessageNobodyTookIsExtended", lapsedLeaseOfAMessageNobodyTookIsExtended},
	{"RunThatAnotherHasTakenIsNotExtended", runThatAnotherHasTakenIsNotExtended},
	{"EachExtensionOfAMessageHasItsResult", eachExtensionOfAMessageHasItsResult},
}

func extendHoldsAMessage(f *journalFixture) {
	f.put("k", "")
	r := f.claimOne(short)
	f.extend("a lease in force", []outbox.Row{r}, long, outbox.ResultDone)
	extended := f.get("k")
	if by := extended.LeaseUntil.Sub(r.LeaseUntil); by < long/2 {
		f.Fatalf("the lease of %v ends only %v later after being extended by %v", short, by, long)
	}
	r.LeaseUntil = extended.LeaseUntil
	f.same("the extended message", extended, r)
	f.pass(2 * short)
	f.claimNone("its only message's lease was extended")
	f.finish(r)
}

func extendHoldsTheGroup(f *journalFixture) {
	f.puts("g", "1", "2", "3")
	rows := f.ask(2, short).Rows
	f.equal("messages claimed", keys(rows), []string{"1", "2"})
	f.extend("a run", rows, long, outbox.ResultDone, outbox.ResultDone)
	f.pass(2 * short)
	f.claimNone("the group is leased with its messages")
	f.finish(rows[0])
	f.claimNone("one of the run is out")
	f.finish(rows[1])
	f.claimThese("after the run", "3")
}

func lapsedLeaseOfAMessageNobodyTookIsExtended(f *journalFixture) {
	f.put("k", "")
	f.puts("g", "1", "2")
	rows := f.ask(1000, short).Rows
	f.equal("number of claimed messages", len(rows), 3)
	f.pass(2 * short)
	f.extend("lapsed leases", rows, long, outbox.ResultDone, outbox.ResultDone, outbox.ResultDone)
	f.claimNone("the leases were extended")
	f.finish(rows...)
}

func eachExtensionOfAMessageHasItsResult(f *journalFixture) {
	f.puts("", "a", "b", "c", "d", "e")
	rows := f.claim()
	f.equal("number of claimed messages", len(rows), 5)
	f.finish(rows[1])
	f.settle("sent", kept(rows[4], ""), outbox.ResultDone)
	foreign := rows[3]
	foreign.Token++ // a token that d never had
	f.extend("five at once", []outbox.Row{foreign, rows[2], rows[1], rows[4], rows[0]}, 2*long,
		outbox.ResultStale, outbox.ResultDone, outbox.ResultStale, outbox.ResultStale, outbox.ResultDone)
	f.same("d, whose token was not its own", f.get("d"), rows[3])
	for _, i := range []int{0, 2} {
		want := rows[i]
		want.LeaseUntil = leased
		f.like("the extended message", f.get(rows[i].Key), want)
	}
}

// What is left of a lapsed run, once another relay has its group: or two runs
// of the group would be out.
func runThatAnotherHasTakenIsNotExtended(f *journalFixture) {
	f.puts("g", "1", "2")
	rows := f.ask(10, short).Rows
	f.equal("messages claimed", keys(rows), []string{"1", "2"})
	f.pass(2 * short)
	taken := f.ask(1, long).Rows
	f.equal("messages claimed again", keys(taken), []string{"1"})
	f.extend("by the lapsed token", rows, long, outbox.ResultStale, outbox.ResultStale)
	f.claimNone("the group is out")
	f.finish(taken...)
	f.claimThese("then", "2")
}
