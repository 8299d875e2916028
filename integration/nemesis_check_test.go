//go:build unix

package integration

import (
	"database/sql"
	"strings"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// check compares, once everything has gone out: what writers were answered,
// what the database says of them, and what the destination has.
func (od *ordeal) check() {
	owners := od.checkAnswers()
	od.checkOrigins(owners)
	od.checkStates()
	od.checkMessages()
	require.Zero(od.t, od.s.count(`SELECT count(*) FROM {t:messages} WHERE lease_until > 0`), "messages on lease")
	require.Zero(od.t, od.s.count(`SELECT count(*) FROM {t:groups}`), "groups without messages")
	commits, rest := od.book.totals()
	require.Greater(od.t, commits, 10, "the writers did next to nothing")
	require.Positive(od.t, rest)
	require.Greater(od.t, len(od.steps), 8, "the nemesis did next to nothing")
}

// A source is who has given out a number, and to what.
type source struct {
	deal *deal
	op   op
}

// checkAnswers requires that answers to commits were true, and that numbers were
// given out once. It returns who gave out what.
func (od *ordeal) checkAnswers() map[int64][]source {
	written := map[string]bool{}
	var id string
	od.each(od.s.db, `SELECT id FROM app`, []any{&id}, func() { written[id] = true })
	owners := map[int64][]source{}
	for _, d := range od.book.all() {
		d.written = written[d.id]
		if d.outcome != unheard && d.written != (d.outcome == committed) {
			od.fail(item{}, "%s: the writer was told %.40q, the database says written=%t", d.id, d.outcome, d.written)
		}
		if !d.written {
			continue
		}
		for _, o := range d.ops {
			if before := owners[o.number]; len(before) > 0 {
				od.fail(o.item, "number %d was given out twice, to %s and to %s", o.number, before[0].deal.id, d.id)
			}
			owners[o.number] = append(owners[o.number], source{d, o})
		}
	}
	return owners
}

// checkOrigins requires that nothing was sent but what was committed: by its
// key, its number and its value, and the last of a key where a transaction
// staged it twice.
func (od *ordeal) checkOrigins(owners map[int64][]source) {
	for _, v := range od.end.all() {
		from := owners[v.Number]
		if len(from) == 0 {
			od.fail(v.item(), "number %d (%.40q) was sent, but no transaction that committed has it", v.Number, v.Value)
			continue
		}
		o := from[0].op
		if o.item != v.item() || o.value != v.Value || o.group != v.Group || v.Deleted != (o.verb == "delete") {
			od.fail(v.item(), "number %d is of %v, group %.40q, value %.40q; sent was group %.40q, value %.40q", v.Number, o.item, o.group, o.value, v.Group, v.Value)
		}
		for _, other := range from[0].deal.ops {
			if other.item == o.item && other.number > o.number {
				od.fail(v.item(), "number %d was sent, which its transaction replaced by %d", o.number, other.number)
			}
		}
	}
}

// checkStates requires that each key's versions grew in the order of the
// commits, and that the guarded table shows what was committed last.
func (od *ordeal) checkStates() {
	have := map[item]op{}
	var it item
	var got, want op
	var backwards, n int
	od.each(od.end.db, `SELECT key, version, coalesce(CAST(value AS text), '') FROM mirror`, []any{&it.key, &got.number, &got.value}, func() {
		it.channel, it.key, _ = strings.Cut(it.key, " ")
		have[it] = got
	})
	od.each(od.s.db, `SELECT channel, key, version, value, backwards FROM truth`,
		[]any{&it.channel, &it.key, &want.number, &want.value, &backwards}, func() {
			n++
			if backwards > 0 {
				od.fail(it, "%d times a commit had a lower version than the one before", backwards)
			}
			if got := have[it]; got.number != want.number || got.value != want.value {
				od.fail(it, "committed last was %d (%.40q), the sink shows %d (%.40q)", want.number, want.value, got.number, got.value)
			}
		})
	require.Len(od.t, have, n, "keys at the sink")
}

// each calls f with each row of a query in dest.
func (od *ordeal) each(db *sql.DB, query string, dest []any, f func()) {
	rows, err := db.Query(query)
	require.NoError(od.t, err)
	defer rows.Close()
	for rows.Next() {
		require.NoError(od.t, rows.Scan(dest...))
		f()
	}
	require.NoError(od.t, rows.Err())
}

// checkMessages requires that each message arrived, at most once where it is
// parked, and that those of a group arrived in the order of their commits.
func (od *ordeal) checkMessages() {
	arrived := map[item]int{}
	for _, v := range od.end.all() {
		if v.answer.took() {
			arrived[v.item()]++
		}
	}
	rank := map[item]int64{}
	var it item
	var place int64
	var puts int
	od.each(od.s.db, `SELECT channel, key, rank, puts FROM posted`, []any{&it.channel, &it.key, &place, &puts}, func() {
		rank[it] = place
		if arrived[it] == 0 {
			od.fail(it, "was committed and never arrived")
		}
		if it.channel == parkChannel && arrived[it] > puts {
			od.fail(it, "was put %d times and arrived %d times, though it may at most once", puts, arrived[it])
		}
	})
	od.checkGroups(rank)
}

// checkGroups: the first arrivals of a group's messages are in the order of
// their ranks. All have arrived, so there are no gaps. What was refused for good
// is passed over where the channel skips.
func (od *ordeal) checkGroups(rank map[item]int64) {
	seen := map[item]bool{}
	last := map[item]visit{} // by channel and group
	for _, v := range od.end.all() {
		it, group := v.item(), item{v.Channel, v.Group}
		if v.Group == "" || !v.answer.took() || seen[it] || v.Channel == resendChannel && od.end.refused[it] > 0 {
			continue
		}
		seen[it] = true
		if before, ok := last[group]; ok && rank[it] < rank[before.item()] {
			od.fail(it, "number %d of group %.40q (rank %d) arrived after %s (rank %d)", v.Number, v.Group, rank[it], before.Key, rank[before.item()])
			od.fail(before.item(), "arrived before it")
		}
		last[group] = v
	}
}

// checkAttempts requires that each send was counted, so that no row has fewer
// attempts than were made, save those that were given back: by a destination
// that was not called, and where a message's lease has lapsed.
func (od *ordeal) checkAttempts() {
	lapses := map[int64]int{}
	var number int64
	od.each(od.s.db, `SELECT seq FROM lapses`, []any{&number}, func() { lapses[number]++ })
	made, highest := map[int64]int{}, map[int64]int{}
	items := map[int64]item{}
	for _, v := range od.end.all() {
		if v.answer.refunds() || od.end.refused[v.item()] > 0 { // the latter were retried, their attempts anew
			continue
		}
		made[v.Number]++
		highest[v.Number] = max(highest[v.Number], v.Attempt)
		items[v.Number] = v.item()
	}
	for _, channel := range []string{resendChannel, parkChannel} {
		for _, r := range od.s.records(od.s.journal(channel)) {
			if r.Attempt < highest[r.Seq] {
				od.fail(item{channel, r.Key}, "its record counts %d attempts, attempt %d was made", r.Attempt, highest[r.Seq])
			}
		}
	}
	for number, it := range items {
		if made[number] > highest[number]+lapses[number] {
			od.fail(it, "number %d was sent %d times, the last at attempt %d, after %d lapses", number, made[number], highest[number], lapses[number])
		}
	}
}

// checkSettlers requires that who settled a message as sent was its holder, who
// had sent it: the lease that it ended under is that of a visit that was taken. What
// people have settled has none.
func (od *ordeal) checkSettlers() {
	type lease struct {
		number int64
		token  outbox.Token
	}
	sent := map[lease]bool{}
	for _, v := range od.end.all() {
		if v.answer == taken || v.answer == slow {
			sent[lease{v.Number, v.Token}] = true
		}
	}
	var it item
	var l lease
	held := od.s.dialect.Render(`SELECT channel, key, seq, token FROM {t:messages} WHERE outcome = 1 AND lease_until < 0 AND token > 0`)
	od.each(od.s.db, held, []any{&it.channel, &it.key, &l.number, &l.token}, func() {
		if !sent[l] {
			od.fail(it, "number %d was settled as sent under token %d, whose holder has not sent it", l.number, l.token)
		}
	})
}

// checkNothingHeld requires that relays which have ended left no connection and
// no lease. One that lapsed may stay on record while its group is blocked.
func (od *ordeal) checkNothingHeld() {
	if od.s.postgres() {
		eventually(od.t, "the relays' connections to go", func() bool {
			return od.s.count(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'relay%'`) == 0
		})
	}
	eventually(od.t, "leases to end", func() bool {
		now := time.Now().UnixMicro()
		return od.s.count(`SELECT count(*) FROM {t:messages} WHERE lease_until > $1`, now)+
			od.s.count(`SELECT count(*) FROM {t:groups} WHERE lease_until > $1`, now) == 0
	})
}
