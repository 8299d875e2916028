package outboxtest

import (
	"fmt"
	"slices"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// watchTests hold what a store tells about its channels, asked and unasked.
var watchTests = []latestTest{
	{"LookTellsWhenToClaim", lookTellsWhenToClaim},
	{"LookTakesTheSoonest", lookTakesTheSoonest},
	{"LookAnswersInTheOrderOfChannels", lookAnswersInTheOrderOfChannels},
	{"StatsCountRowsByState", statsCountRowsByState},
	{"StatsShowEveryChannel", statsShowEveryChannel},
	{"ReadersWaitForNobody", readersWaitForNobody},
	{"HintsFollowStages", hintsFollowStages},
	{"StoppedHintsAreSilent", stoppedHintsAreSilent},
}

// look looks at channels in one call.
func (f *base) look(chs ...outbox.Channel) []outbox.Look {
	f.Helper()
	ls, err := f.relay.Look(f.ctx, chs)
	f.ok("Look", err)
	if len(ls) != len(chs) {
		f.Fatalf("Look returned %d answers for %d channels", len(ls), len(chs))
	}
	return ls
}

// waits checks when Look says to claim: over 0 and up to most; or at once
// (most 0); or that nothing waits (most negative).
func (f *base) waits(state string, most time.Duration) {
	f.Helper()
	l := f.look(f.ch())[0]
	f.equal("Look at a channel without an outage", l, outbox.Look{Wait: l.Wait})
	switch {
	case most < 0 && l.Wait >= 0:
		f.Fatalf("Look at a channel that %s says to claim in %v, want a negative wait: nothing waits", state, l.Wait)
	case most == 0 && l.Wait != 0:
		f.Fatalf("Look at a channel that %s says to claim in %v, want 0: at once", state, l.Wait)
	case most > 0 && (l.Wait <= 0 || l.Wait > most):
		f.Fatalf("Look at a channel that %s says to claim in %v, want over 0 and up to %v", state, l.Wait, most)
	}
}

func lookTellsWhenToClaim(f *fixture) {
	f.waits("was never used", -1)
	f.stage(century, value("k", "v"))
	f.waits("holds a scheduled row", century)
	f.put("k", "v")
	f.waits("holds a due row", 0)
	r := f.claimOne(long)
	f.waits("holds a leased row", long)
	f.settle("retry", retry(r, long/2, "x"), outbox.ResultDone)
	f.waits("holds a row in backoff", long/2)
	f.put("k", "v")
	f.waits("holds a row staged again in its backoff", 0)
	r = f.claimOne(long)
	f.put("k", "v")
	f.waits("holds a row staged again while leased", long)
	f.settle("superseded", done(r), outbox.ResultSuperseded)
	f.waits("holds a superseded row", 0)
	f.settle("done", done(f.claimOne(long)), outbox.ResultDone)
	f.waits("holds no row any more", -1)
	f.put("k", "v")
	f.claimOne(short)
	f.pass(2 * short)
	f.waits("holds a row whose lease has lapsed", 0)
}

func lookTakesTheSoonest(f *fixture) {
	f.put("a", "v")
	f.claimOne(long)
	f.stage(century, value("b", "v"))
	f.waits("holds a leased and a scheduled row", long)
	f.put("c", "v")
	f.waits("holds a leased, a scheduled and a due row", 0)
	f.settle("retry", retry(f.claimOne(long), long/2, ""), outbox.ResultDone)
	f.waits("holds a leased and a scheduled row, and one in backoff", long/2)
}

func lookAnswersInTheOrderOfChannels(f *fixture) {
	f.equal("Look at no channels", len(f.look()), 0)
	chs := []outbox.Channel{}
	for i := range 30 {
		at := f.on(fmt.Sprintf("%s-%02d", f.channel, 29-i))
		switch chs = append(chs, at.ch()); i % 3 {
		case 1:
			at.put("k", "v")
		case 2:
			at.stage(century, value("k", "v"))
		}
	}
	for i, l := range f.look(chs...) {
		got := []bool{l.Wait < 0, l.Wait == 0, l.Wait > 0}
		f.equal(fmt.Sprintf("answer %d: nothing waits, due, scheduled", i), got, []bool{i%3 == 0, i%3 == 1, i%3 == 2})
	}
}

// stats returns the channel's numbers, if Stats has them.
func (f *base) stats() (outbox.ChannelStats, bool) {
	f.Helper()
	all, err := f.relay.Stats(f.ctx)
	f.ok("Stats", err)
	found := []outbox.ChannelStats{}
	for _, s := range all {
		if s.Channel == f.ch() {
			found = append(found, s)
		}
	}
	if len(found) > 1 {
		f.Fatalf("Stats has a channel twice: %+v", found)
	}
	return append(found, outbox.ChannelStats{})[0], len(found) == 1
}

func statsCountRowsByState(f *fixture) {
	f.put("failing", "v")
	f.settle("retry", retry(f.claimOne(long), 0, "404"), outbox.ResultDone)
	f.settle("retry", retry(f.claimOne(long), long, "503"), outbox.ResultDone)
	for i := range 3 {
		f.put(fmt.Sprint("leased ", i), "v")
	}
	f.equal("number of claimed rows", len(f.claim()), 3)
	f.put("leased 0", "newer")
	f.stage(century, value("scheduled", "v"))
	f.put("due a", "v")
	f.put("due b", "v")
	f.pass(short)
	got, _ := f.stats()
	if got.OldestDue < short || got.OldestDue > patience {
		f.Fatalf("the oldest due row has been due for %v, want %v and a little", got.OldestDue, short)
	}
	f.equal("Stats", got, outbox.ChannelStats{
		Channel: f.ch(), Due: 2, Scheduled: 2, InFlight: 3, OldestDue: got.OldestDue, Attempt: 2, LastError: "503",
	})
}

func statsShowEveryChannel(f *fixture) {
	channels := []*fixture{f.on(f.channel + "-due"), f.on(f.channel + "-scheduled"), f.on(f.channel + "-leased")}
	channels[0].put("k", "v")
	channels[1].stage(century, value("k", "v"))
	channels[2].put("k", "v")
	channels[2].claimOne(long)
	for i, at := range channels {
		got, _ := at.stats()
		got.OldestDue, got.Attempt = 0, 0
		want := outbox.ChannelStats{Channel: at.ch()}
		*[]*int{&want.Due, &want.Scheduled, &want.InFlight}[i] = 1
		f.equal("Stats of a channel that only holds a row", got, want)
	}
	channels[0].settle("done", done(channels[0].claimOne(long)), outbox.ResultDone)
	got, known := channels[0].stats()
	got.Channel = outbox.Channel{}
	f.equal(fmt.Sprintf("Stats (there: %t) of a channel that holds no row any more", known), got, outbox.ChannelStats{})
}

func readersWaitForNobody(f *fixture) {
	v := f.put("k", "1")
	tx := f.begin()
	f.stageIn(tx, 0, value("k", "2"), value("new", "2"))
	quick := f.hurry()
	quick.waits("holds a due row that is locked", 0)
	got, _ := quick.stats()
	f.equal("Stats", got, outbox.ChannelStats{Channel: f.ch(), Due: 1, OldestDue: got.OldestDue})
	f.equal("ListRows", keys(quick.list("", 10)), []string{"k"})
	f.sameRow("PendingRow", quick.row("k"), unclaimed(value("k", "1"), v))
}

// hear asks for the channel's hints.
func (f *base) hear() (hints <-chan outbox.Hint, stop func()) {
	heard := make(chan outbox.Hint, 100)
	return heard, f.relay.Hints(func(h outbox.Hint) {
		if h.Channel == f.ch() {
			heard <- h
		}
	})
}

// hint waits for a hint.
func (f *base) hint(hints <-chan outbox.Hint) outbox.Hint {
	f.Helper()
	select {
	case h := <-hints:
		return h
	case <-time.After(atOnce):
		f.Fatalf("no hint came for a staged row within %v", atOnce)
		panic("unreachable")
	}
}

func hintsFollowStages(f *fixture) {
	hints, stop := f.hear()
	defer stop()
	tx := f.begin()
	v := f.stageIn(tx, 0, value("k", "v"))[0]
	f.equal("hint before the commit", f.hint(hints), outbox.Hint{Channel: f.ch(), Version: v})
	f.commit(tx)

	vs := f.stage(century, value("a", "v"), value("b", "v"), value("c", "v"))
	h := f.hint(hints)
	if !slices.Contains(vs, h.Version) {
		f.Fatalf("the hint's version is %d, want one of those staged: %v", h.Version, vs)
	}
	if h.Wait < 0 || h.Wait > century {
		f.Fatalf("the hint says to wait %v, want 0 to %v", h.Wait, century)
	}
}

func stoppedHintsAreSilent(f *fixture) {
	stopped, stop := f.hear()
	heard, stopOther := f.hear()
	defer stopOther()
	f.put("k", "v")
	f.hint(stopped)
	f.hint(heard)
	stop()
	for range 3 {
		f.put("k", "v")
		f.hint(heard)
	}
	f.equal("hints after stop", len(stopped), 0)
}
