package outboxtest

import (
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// stateTable says what each verb makes of a message in each state: the name of
// its next state, or "gone"; or, where nothing changes, the answer: "same" for
// a success that had been one before, "none" for a message that is not
// counted or claimed, "stale" for ErrLeaseLost, or an error. Settlements carry
// the token of the last lease, save for the foreign one. A lapsed message is
// a sending one whose lease has ended.
const stateTable = `
verb             pending   failed    sending   lapsed    sent      dead      unknown
put              same      same      same      same      same      same      same
put-begun        same      same      same      same      same      same      same
begin            sending   sending   ErrState  ErrState  ErrState  ErrState  ErrState
claim            sending   sending   none      sending   none      none      none
extend           stale     stale     sending   sending   stale     stale     stale
settle-done      stale     stale     gone      gone      same      stale     stale
settle-kept      stale     stale     sent      sent      same      stale     stale
settle-retry     stale     same      failed    failed    stale     stale     stale
settle-release   stale     stale     pending   pending   stale     stale     stale
settle-dead      stale     stale     dead      dead      stale     same      stale
settle-unknown   stale     stale     unknown   unknown   stale     stale     same
settle-foreign   stale     stale     stale     stale     stale     stale     stale
extend-foreign   stale     stale     stale     stale     stale     stale     stale
retry            none      pending   none      none      none      pending   pending
discard          gone      gone      gone      gone      gone      gone      gone
resolve-sent     none      none      none      none      none      none      sent
resolve-dead     none      none      none      none      none      none      dead
resolve-pending  none      none      none      none      none      none      failed
purge            none      none      none      none      gone      gone      gone
`

// ended are the states that a message does not leave by itself.
var ended = []outbox.State{outbox.StateSent, outbox.StateDead, outbox.StateUnknown}

var stateNames = map[outbox.State]string{
	outbox.StatePending: "pending", outbox.StateFailed: "failed", outbox.StateSending: "sending",
	outbox.StateSent: "sent", outbox.StateDead: "dead", outbox.StateUnknown: "unknown",
}

// stateTests hold the table, once for single messages and once in groups.
var stateTests = []journalTest{
	{"EveryVerbInEveryState", func(f *journalFixture) { f.walk("") }},
	{"EveryVerbInEveryStateOfAGroup", func(f *journalFixture) { f.walk("g") }},
}

func (f *journalFixture) walk(group string) {
	lines := strings.Split(strings.TrimSpace(stateTable), "\n")
	states := strings.Fields(lines[0])[1:]
	for _, line := range lines[1:] {
		verb, cells := strings.Fields(line)[0], strings.Fields(line)[1:]
		for i, state := range states {
			f.on(newChannel()).step(group, state, verb, cells[i])
		}
	}
}

// step brings a message into a state, applies a verb and compares.
func (f *journalFixture) step(group, state, verb, want string) {
	f.Helper()
	what := fmt.Sprintf("%s of a %s message", verb, state)
	r := f.bring(group, state)
	before := f.get("k")
	answer := f.verb(verb, r)
	got, there := f.find(nil, "k")
	switch now := stateNames[got.State]; {
	case want == "same" || want == "none" || want == "stale" || strings.HasPrefix(want, "Err"):
		f.equal(what+": the answer", answer, want)
		f.equal(what+": there", there, true)
		if verb == "settle-retry" || verb == "settle-release" {
			got.Due = before.Due // may be counted from the second call
		}
		f.same(what+": the message", got, before)
	case want == "gone":
		f.equal(what+": the answer", answer, "same")
		f.equal(what+": there", there, false)
	default:
		f.equal(what+": the answer", answer, "same")
		f.equal(what+": the new state", now, want)
		f.equal(what+": leased, and ended", []bool{!got.LeaseUntil.IsZero(), !got.CompletedAt.IsZero()},
			[]bool{want == "sending", want == "sent" || want == "dead" || want == "unknown"})
	}
}

// bring puts a message and brings it into a state; it returns the lease of
// which it came there.
func (f *journalFixture) bring(group, state string) outbox.Row {
	f.Helper()
	f.put("k", group)
	switch state {
	case "pending":
		r := f.get("k")
		r.Token = 1 // none that it ever had
		return r
	case "lapsed":
		r := f.claimOne(time.Millisecond)
		f.pass(2 * time.Millisecond)
		return r
	}
	r := f.claimOne(long)
	switch state {
	case "failed":
		f.settle("bring", retry(r, 0, "x"), outbox.ResultDone)
	case "sent":
		f.settle("bring", kept(r, "ref"), outbox.ResultDone)
	case "dead":
		f.settle("bring", dead(r), outbox.ResultDone)
	case "unknown":
		f.settle("bring", unknown(r), outbox.ResultDone)
	}
	return r
}

// verb applies a verb and returns its answer in the table's words.
func (f *journalFixture) verb(verb string, r outbox.Row) string {
	f.Helper()
	foreign := r
	foreign.Token += 1 << 40
	by, name, _ := strings.Cut(verb, "-")
	switch by {
	case "put":
		a := f.putIn(nil, map[string]time.Duration{"begun": long}[name], message("k", r.Group))[0]
		f.equal("created", a.Created, false)
		return "same"
	case "begin":
		_, err := f.store.BeginMessage(f.ctx, nil, f.channel, "k", long)
		return f.word("BeginMessage", err)
	case "claim":
		return counted(len(f.ask(10, long).Rows))
	case "extend":
		if name == "foreign" {
			r = foreign
		}
		got, err := f.store.Extend(f.ctx, f.ch(), []outbox.Row{r}, long)
		f.ok("Extend", err)
		return settledWord(got[0])
	case "settle":
		s := map[string]outbox.Settlement{
			"done": done(r), "kept": kept(r, "ref"), "retry": retry(r, 0, "x"), "release": release(r, 0), "dead": dead(r), "unknown": unknown(r),
			"foreign": done(foreign),
		}[name]
		got, err := f.store.Settle(f.ctx, f.ch(), []outbox.Settlement{s})
		f.ok("Settle", err)
		return settledWord(got[0])
	case "purge":
		n, err := f.store.PurgeMessages(f.ctx, f.channel, outbox.Purge{States: ended, Limit: 10, Before: time.Now().AddDate(100, 0, 0)})
		f.ok("PurgeMessages", err)
		return counted(n)
	}
	action := map[string]outbox.Action{
		"retry": outbox.ActionRetry, "discard": outbox.ActionDiscard, "resolve-sent": outbox.ActionSent,
		"resolve-dead": outbox.ActionDead, "resolve-pending": outbox.ActionPending,
	}[verb]
	a, err := f.store.AmendMessages(f.ctx, nil, f.channel, outbox.Amendment{Action: action, Limit: 10, Ref: "ref"})
	f.ok("AmendMessages", err)
	return counted(a.Count)
}

func counted(n int) string {
	if n == 1 {
		return "same"
	}
	return map[int]string{0: "none"}[n]
}

func settledWord(r outbox.Result) string {
	return map[outbox.Result]string{outbox.ResultDone: "same", outbox.ResultStale: "stale"}[r]
}

func (f *journalFixture) word(what string, err error) string {
	f.Helper()
	if errors.Is(err, outbox.ErrState) {
		return "ErrState"
	}
	f.ok(what, err)
	return "same"
}
