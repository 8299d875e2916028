package outboxtest

import (
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// extendTests hold who may keep a row for longer.
var extendTests = []latestTest{
	{"ExtendHoldsTheLease", extendHoldsTheLease},
	{"LapsedLeaseNobodyTookIsExtended", lapsedLeaseNobodyTookIsExtended},
	{"RestagedRowIsExtended", restagedRowIsExtended},
	{"SettledLeaseIsNotExtended", settledLeaseIsNotExtended},
	{"EachExtensionHasItsResult", eachExtensionHasItsResult},
}

func extendHoldsTheLease(f *fixture) {
	f.put("k", "v")
	r := f.claimOne(short)
	f.extend("a lease in force", []outbox.Row{r}, long, outbox.ResultDone)
	extended := f.row("k")
	if by := extended.LeaseUntil.Sub(r.LeaseUntil); by < long/2 {
		f.Fatalf("the lease of %v ends only %v later after being extended by %v", short, by, long)
	}
	r.LeaseUntil = extended.LeaseUntil
	r.ID = extended.ID // a row may move
	f.equal("the extended row", extended, r)
	f.pass(2 * short)
	f.claimNone("its only row's lease was extended")
	f.settle("the extended row", done(r), outbox.ResultDone)
	f.gone("k", "acknowledged")
}

func lapsedLeaseNobodyTookIsExtended(f *fixture) {
	f.put("k", "v")
	r := f.claimOne(short)
	f.pass(2 * short)
	f.extend("a lapsed lease", []outbox.Row{r}, long, outbox.ResultDone)
	f.claimNone("its only row's lease was extended")
	f.settle("the extended row", done(r), outbox.ResultDone)
}

// The holder of a row that was staged again goes on publishing the old value,
// and nobody may publish the new one beside it.
func restagedRowIsExtended(f *fixture) {
	f.put("k", "v")
	r := f.claimOne(short)
	v := f.put("k", "newer")
	f.extend("a row staged again", []outbox.Row{r}, long, outbox.ResultDone)
	f.pass(2 * short)
	f.claimNone("its only row's lease was extended")
	f.settle("the extended row", done(r), outbox.ResultSuperseded)
	f.equal("version claimed then", f.claimOne(long).Version, v)
}

func settledLeaseIsNotExtended(f *fixture) {
	f.put("k", "v")
	r := f.claimOne(long)
	f.settle("retry", retry(r, 0, ""), outbox.ResultDone)
	before := f.row("k")
	f.extend("a settled lease", []outbox.Row{r}, long, outbox.ResultStale)
	f.equal("the row", f.row("k"), before)
	f.claimOne(long)
}

func eachExtensionHasItsResult(f *fixture) {
	rows := map[string]outbox.Row{}
	for _, key := range []string{"a", "b", "c", "d"} {
		f.put(key, "v")
	}
	for _, r := range f.claim() {
		rows[r.Key] = r
	}
	f.equal("number of claimed rows", len(rows), 4)
	f.settle("b, which is then gone", done(rows["b"]), outbox.ResultDone)
	foreign := rows["d"]
	foreign.Token++ // a token that d never had
	f.extend("four at once", []outbox.Row{foreign, rows["c"], rows["b"], rows["a"]}, 2*long,
		outbox.ResultStale, outbox.ResultDone, outbox.ResultStale, outbox.ResultDone)
	f.equal("d, whose token was not its own", f.row("d"), rows["d"])
	for _, key := range []string{"a", "c"} {
		want := rows[key]
		want.LeaseUntil = leased
		f.sameRow("the extended row", f.row(key), want)
	}
}
