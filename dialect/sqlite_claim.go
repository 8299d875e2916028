package dialect

import (
	"context"
	"encoding/json"
	"math"
)

// sqliteClaim is one claim of messages.
type sqliteClaim struct {
	ClaimMessages
	run Runner
	d   Dialect
	now int64

	// What the survey found.
	until    int64 // when the channel's pause is over
	probe    bool  // its destination was down
	head     int64 // the ungrouped message that came due first; 0: none is due
	headDue  int64
	headSick bool  // see sick
	groupDue int64 // when the first group did; never: none is due
}

// sick is a message whose lease has lapsed at least twice in a row: perhaps it
// kills its holders, so it is claimed alone. Those who lapsed with it are then
// known to be sound, and a lapse of its own counts.
const sick = `lease_until > 0 AND lapses > 0`

// sqliteDue are the ungrouped messages that could be claimed, in due order.
const sqliteDue = `FROM {t:messages} INDEXED BY {i:messages_due_idx}
	WHERE channel = ?1 AND outcome = 0 AND grp = '' AND due <= ?2 AND lease_until <= ?2`

func (sqlite) claimMessages(ctx context.Context, run Runner, d Dialect, c ClaimMessages, at now, scan func(Scanner) error) error {
	x := &sqliteClaim{ClaimMessages: c, run: run, d: d, now: at.(int64)}
	// Most looks find nothing: look before taking the write lock, and again under it.
	if found, err := x.survey(ahead(ctx)); err != nil || !found {
		return err
	}
	if c.Full && c.SkipEnded {
		if err := x.unblock(ctx); err != nil {
			return err
		}
	}
	if found, err := x.survey(ctx); err != nil || !found {
		return err
	}
	if x.probe {
		x.Limit = 1
	}
	first := x.head > 0 && x.headDue <= x.groupDue // the message is before all groups
	if first && x.headSick {
		return x.lease(ctx, []int64{x.head}, nil, 0, scan)
	}
	seqs, groups, alone, err := x.runs(ctx, x.share(first))
	switch {
	case err != nil:
		return err
	case alone:
		return x.lease(ctx, seqs, groups, 0, scan)
	case len(seqs) == 0 && x.headSick:
		return x.lease(ctx, []int64{x.head}, nil, 0, scan)
	}
	return x.lease(ctx, seqs, groups, x.Limit-len(seqs), scan)
}

// share is how many messages of groups a claim takes: half, where there are
// ungrouped ones too, so that neither starve; of a single one, the older.
func (x *sqliteClaim) share(headFirst bool) int {
	switch {
	case x.groupDue == never || headFirst && x.Limit == 1:
		return 0
	case x.head > 0 && x.Limit > 1:
		return x.Limit / 2
	}
	return x.Limit
}

// survey tells whether the channel is open and something may be due in it.
func (x *sqliteClaim) survey(ctx context.Context) (bool, error) {
	blocked := false
	err := x.run(ctx, x.d.rendered(Statement{`
		SELECT coalesce(max(c.paused_until, c.outage_until, iif(c.outage_level > 0, c.probe_until, 0)), 0),
			coalesce(c.outage_level > 0, false), coalesce(h.seq, 0), coalesce(h.due, 0), coalesce(h.sick, false),
			coalesce((SELECT due FROM {t:groups} INDEXED BY {i:groups_due_idx}
				WHERE channel = ?1 AND due <= ?2 AND lease_until <= ?2 ORDER BY due, grp LIMIT 1), ?3),
			?4 AND EXISTS (SELECT 1 FROM {t:groups} INDEXED BY {i:groups_due_idx} WHERE channel = ?1 AND due = ?3)
		FROM (SELECT 1)
		LEFT JOIN {t:channels} AS c ON c.system = 2 AND c.name = ?1
		LEFT JOIN (SELECT seq, due, ` + sick + ` AS sick ` + sqliteDue + ` ORDER BY due, seq LIMIT 1) AS h ON true`,
		[]any{x.Channel, x.now, int64(never), x.Full && x.SkipEnded},
	}), func(row Scanner) error {
		return row.Scan(&x.until, &x.probe, &x.head, &x.headDue, &x.headSick, &x.groupDue, &blocked)
	})
	return x.until <= x.now && (x.head > 0 || x.groupDue != never || blocked), err
}

// unblock makes groups due again that a relay which does not skip has put
// aside: for now its option is another. A thousand per pass bound the cost.
func (x *sqliteClaim) unblock(ctx context.Context) error {
	return x.run(ctx, x.d.rendered(Statement{`
		INSERT INTO {t:groups} (channel, grp, due)
		SELECT channel, grp, ?2 FROM {t:groups} INDEXED BY {i:groups_due_idx} WHERE channel = ?1 AND due = ?3 ORDER BY grp LIMIT 1000
		ON CONFLICT (channel, grp) DO UPDATE SET due = excluded.due`,
		[]any{x.Channel, x.now, int64(never)},
	}), unread)
}

// unread is the scan of a statement whose answer does not matter.
func unread(Scanner) error { return nil }

// lease takes messages by their numbers, with their groups, and up to more
// ungrouped ones as they came due.
func (x *sqliteClaim) lease(ctx context.Context, seqs []int64, groups []groupRun, more int, scan func(Scanner) error) error {
	if len(seqs) == 0 && (more == 0 || x.head == 0) {
		return nil
	}
	text := `UPDATE {t:seq} SET token = max(token + 1, ?2);`
	if x.probe { // the one row goes to one relay of the fleet, while this lease lasts
		text += `
		UPDATE {t:channels} SET probe_until = ?2 + ?3, probe_token = (SELECT token FROM {t:seq}) WHERE system = 2 AND name = ?1;`
	}
	if len(groups) > 0 {
		text += updateGroups(6) + `lease_until = ?2 + ?3, token = (SELECT token FROM {t:seq}), run_end = excluded.run_end;`
	}
	// A lapse in company gives its attempt back: another of the batch may be to blame.
	text += updateMessages(`
			SELECT value AS seq FROM json_each(?5)
			UNION ALL
			SELECT seq FROM (SELECT seq `+sqliteDue+` AND NOT (`+sick+`) ORDER BY due, seq LIMIT ?4)`) + `
			lease_until = ?2 + ?3, token = (SELECT token FROM {t:seq}),
			attempt = iif(lease_until > 0 AND lapses < 2, attempt, min(attempt, 2147483646) + 1),
			lapses = min(lapses, 32766) + (lease_until > 0)
		RETURNING ` + sqliteMessage + `, ?7`
	return x.run(ctx, x.d.rendered(Statement{text, []any{
		x.Channel, x.now, x.Lease, more, toJSON(numbers(seqs)), toJSON(groups), x.probe,
	}}), scan)
}

// numbers is a list that is [] in JSON where it is nil.
func numbers(list []int64) []int64 {
	if list == nil {
		return []int64{}
	}
	return list
}

// groupRun is a group and the number of the last message leased with it, or
// its new due time: ["group", 7] in JSON.
type groupRun [2]any

const (
	groupsAtLeast = 32 // candidates to look at together
	groupRounds   = 20 // looks of one claim
)

// runs chooses the runs of groups to lease, of up to share messages together.
// Groups that are due but have nothing to send are put aside until they have.
// A sick head is chosen, alone, where it came due before everything else.
func (x *sqliteClaim) runs(ctx context.Context, share int) (seqs []int64, groups []groupRun, alone bool, err error) {
	after := group{due: math.MinInt64}
	for round := 0; len(seqs) < share && round < groupRounds; round++ {
		size := max(share-len(seqs), groupsAtLeast)
		list, err := x.groups(ctx, after, size, share-len(seqs))
		if err != nil {
			return nil, nil, false, err
		}
		var aside, empty []groupRun
		for _, g := range list {
			run, due := g.run(x.now, x.SkipEnded)
			switch {
			case len(g.messages) == 0:
				empty = append(empty, groupRun{g.name, 0})
			case due > x.now:
				aside = append(aside, groupRun{g.name, due})
			case len(run) > 0 && g.messages[0][3] > 0:
				if len(seqs) == 0 && (x.head == 0 || g.due < x.headDue) {
					seqs, groups, alone = run, []groupRun{{g.name, run[0]}}, true
				}
			case len(seqs) < share:
				run = run[:min(len(run), share-len(seqs))]
				seqs = append(seqs, run...)
				groups = append(groups, groupRun{g.name, run[len(run)-1]})
			}
			if alone {
				break
			}
		}
		if err := x.putAside(ctx, aside, empty); err != nil || alone || len(list) < size {
			return seqs, groups, alone, err
		}
		after = list[len(list)-1]
	}
	return seqs, groups, false, nil
}

// putAside lets groups wait until they are due, and deletes those that have no
// open message.
func (x *sqliteClaim) putAside(ctx context.Context, aside, empty []groupRun) error {
	for set, groups := range map[string][]groupRun{`due = excluded.run_end, lease_until = 0`: aside, `gone = 1`: empty} {
		if len(groups) == 0 {
			continue
		}
		err := x.run(ctx, x.d.rendered(Statement{updateGroups(2) + set, []any{x.Channel, toJSON(groups)}}), unread)
		if err != nil {
			return err
		}
	}
	return nil
}

// group is a group that is due, with its first open messages.
type group struct {
	name     string
	due      int64
	ended    int64 // the number of its first dead or unknown message; never: none
	messages []member
}

// member is a message: its number, when it is due and until when it is leased,
// and whether it is sick (1).
type member [4]int64

// run returns the numbers of the messages that could be leased now, or when
// the first could be: never, where it is blocked.
func (g group) run(now int64, skip bool) (seqs []int64, due int64) {
	for i, m := range g.messages {
		switch {
		case m[0] > g.ended && !skip:
			due = never
		case m[1] > now:
			due = m[1]
		case m[2] > now:
			due = m[2]
		case m[3] > 0 && i > 0:
			return seqs, 0
		default:
			seqs = append(seqs, m[0])
			if m[3] > 0 {
				return seqs, 0
			}
			continue
		}
		break
	}
	if len(seqs) > 0 {
		due = 0
	}
	return seqs, due
}

// anyEnded: most channels have no dead or unknown message, so it is asked once
// before each group is.
const anyEnded = `EXISTS (SELECT 1 FROM {t:messages} INDEXED BY {i:messages_parked_idx} WHERE channel = ?1 AND outcome > 1)`

// grouped are the messages of group g whose outcome is, or is in, what follows.
const grouped = `{t:messages} AS m INDEXED BY {i:messages_group_idx}
	WHERE m.channel = ?1 AND m.grp = g.grp AND m.grp <> '' AND m.outcome`

// groups reads up to limit due groups after one, each with its part of share
// messages, at least one. Ended messages are found by the index, so that
// neither they nor a long group make this longer. A group's messages come as
// one JSON text: a join could be turned round, to read all messages.
func (x *sqliteClaim) groups(ctx context.Context, after group, limit, share int) ([]group, error) {
	var list []group
	err := x.run(ctx, x.d.rendered(Statement{`
		WITH g AS MATERIALIZED (
			SELECT grp, due FROM {t:groups} INDEXED BY {i:groups_due_idx}
			WHERE channel = ?1 AND due <= ?2 AND lease_until <= ?2 AND (due, grp) > (?3, ?4) ORDER BY due, grp LIMIT ?5
		)
		SELECT g.grp, g.due, iif(` + anyEnded + `, min(
				coalesce((SELECT min(m.seq) FROM ` + grouped + ` = 4), ?7), coalesce((SELECT min(m.seq) FROM ` + grouped + ` = 5), ?7)
			), ?7),
			(SELECT json_group_array(json_array(seq, due, lease_until, ` + sick + `)) FROM (
				SELECT m.seq, m.due, m.lease_until, m.lapses FROM ` + grouped + ` = 0 ORDER BY m.seq LIMIT max(1, ?6 / (SELECT count(*) FROM g))
			))
		FROM g`,
		[]any{x.Channel, x.now, after.due, after.name, limit, share, int64(never)},
	}), func(row Scanner) error {
		var g group
		var messages string
		if err := row.Scan(&g.name, &g.due, &g.ended, &messages); err != nil {
			return err
		}
		list = append(list, g)
		return json.Unmarshal([]byte(messages), &list[len(list)-1].messages)
	})
	return list, err
}
