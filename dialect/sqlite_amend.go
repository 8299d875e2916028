package dialect

import (
	"context"
	"strconv"
	"strings"
)

// sqliteState is the outbox.State of a message.
const sqliteState = `CASE outcome WHEN 1 THEN 4 WHEN 4 THEN 5 WHEN 5 THEN 6
	ELSE CASE WHEN lease_until > 0 THEN 3 WHEN attempt > 0 THEN 2 ELSE 1 END END`

// sqliteScanned bounds how many messages one amendment looks at, since it has
// the write lock meanwhile.
const sqliteScanned = 10_000

// everywhere reports whether no index narrows down what a filter selects: it
// names neither key nor group, nor none but dead and unknown messages.
func (f MessageFilter) everywhere() bool {
	return f.Key == "" && f.Group == "" && !f.parked()
}

func (f MessageFilter) parked() bool {
	for _, s := range f.States {
		if s < 5 {
			return false
		}
	}
	return len(f.States) > 0
}

// matching is the rest of a query after its columns: messages that a filter
// selects, by the index that serves it, of those in from or of all.
func (f MessageFilter) matching(from string) Statement {
	where := from + ` WHERE channel = ?1`
	switch {
	case f.Key != "":
		where = `{t:messages} WHERE channel = ?1 AND key = ?2`
	case f.Group != "":
		where = `{t:messages} INDEXED BY {i:messages_group_idx} WHERE channel = ?1 AND grp = ?3 AND grp <> ''`
	case f.parked():
		where = `{t:messages} INDEXED BY {i:messages_parked_idx} WHERE channel = ?1 AND outcome > 1`
	}
	var states int64
	for _, s := range f.States {
		states |= 1 << s
	}
	return Statement{`
		FROM ` + where + `
			AND (?2 = '' OR key = ?2) AND (?3 = '' OR grp = ?3) AND (?4 = 0 OR ?4 >> (` + sqliteState + `) & 1)
			AND (?5 = '' OR code = ?5) AND seq > ?6
		ORDER BY seq LIMIT ?7`,
		[]any{f.Channel, f.Key, f.Group, states, f.Code, f.After, f.Limit, sqliteScanned},
	}
}

func (sqlite) listMessages(ctx context.Context, run Runner, d Dialect, f MessageFilter, payloads bool, _ now, scan func(Scanner) error) error {
	columns := sqliteMessage
	if !payloads {
		columns = `seq, key, seq, token, attempt, x'', headers, created_at, due, lease_until,
			last_error, grp, outcome, completed_at, ref, code, lapses`
	}
	st := f.matching(`{t:messages} NOT INDEXED`)
	st.Text = `SELECT ` + columns + st.Text
	return run(ahead(ctx), d.rendered(st), scan)
}

// sqliteActions are what outbox.Action makes of messages, and of which. No
// holder's settlement is the same afterwards.
var sqliteActions = map[int16]struct {
	states []int16
	set    string
}{
	1: {[]int16{2, 5, 6}, `outcome = 0, completed_at = 0, due = ?2, attempt = 0, lapses = iif(outcome = 0, lapses, 0), lease_until = 0, token = 0`},
	2: {[]int16{1, 2, 3, 4, 5, 6}, ``}, // they are deleted
	3: {[]int16{6}, `outcome = 1, completed_at = ?2, lease_until = 0, token = 0, ref = ?3`},
	4: {[]int16{6}, `outcome = 4, completed_at = ?2, lease_until = 0, token = 0`},
	5: {[]int16{6}, `outcome = 0, completed_at = 0, due = ?2, lapses = 0, lease_until = 0, token = 0`},
}

func (sqlite) amendMessages(ctx context.Context, run Runner, d Dialect, a Amend, at now) (count, last int64, err error) {
	action := sqliteActions[a.Action]
	f := a.MessageFilter
	f.States = both(f.States, action.states)
	if len(f.States) == 0 {
		return 0, 0, nil
	}
	if a.DryRun {
		ctx = ahead(ctx)
	}
	var seqs []int64
	groups := make(map[string]bool)
	st := f.matching(`(SELECT * FROM {t:messages} NOT INDEXED WHERE seq > ?6 ORDER BY seq LIMIT ?8)`)
	st.Text = `SELECT seq, grp` + st.Text
	err = run(ctx, d.rendered(st), func(row Scanner) error {
		var group string
		err := row.Scan(&last, &group)
		seqs = append(seqs, last)
		if group != "" {
			groups[group] = true
		}
		return err
	})
	if err != nil {
		return 0, 0, err
	}
	if len(seqs) < f.Limit { // was that all?
		if last, err = f.scanned(ctx, run, d); err != nil {
			return 0, 0, err
		}
	}
	count = int64(len(seqs))
	if a.DryRun || count == 0 {
		return count, last, nil
	}
	text := deleteMessages(`SELECT value, '', '' FROM json_each(?1)`)
	if action.set != "" {
		text = updateMessages(`SELECT value AS seq FROM json_each(?1)`) + action.set
	}
	err = run(ctx, d.rendered(Statement{text, []any{toJSON(seqs), at, a.Ref}}), unread)
	if err != nil {
		return 0, 0, err
	}
	return count, last, sqliteWake(ctx, run, d, f.Channel, groups, at)
}

// both is what two lists share; an empty first one is everything.
func both(some, all []int16) []int16 {
	if len(some) == 0 {
		return all
	}
	var shared []int16
	for _, s := range all {
		for _, t := range some {
			if s == t {
				shared = append(shared, s)
			}
		}
	}
	return shared
}

// scanned is the number of the last message that was looked at where no index
// narrowed that down; 0 where there was no more.
func (f MessageFilter) scanned(ctx context.Context, run Runner, d Dialect) (last int64, err error) {
	if !f.everywhere() {
		return 0, nil
	}
	err = run(ctx, d.rendered(Statement{
		`SELECT seq FROM {t:messages} WHERE seq > ?1 ORDER BY seq LIMIT 1 OFFSET ?2`, []any{f.After, sqliteScanned - 1},
	}), func(row Scanner) error { return row.Scan(&last) })
	return last, err
}

// purgeMessages deletes those that ended first. A dead or unknown one that
// goes no longer blocks its group.
func (sqlite) purgeMessages(ctx context.Context, run Runner, d Dialect, p PurgeMessages, at now) (count int64, err error) {
	if len(p.Outcomes) == 0 {
		return 0, nil
	}
	before := p.Before
	if before == 0 {
		before = at.(int64) - p.Age
	}
	var parts []string // each in the order of its index
	for _, outcome := range p.Outcomes {
		parts = append(parts, `
			SELECT * FROM (
				SELECT seq, key, grp, outcome, completed_at FROM {t:messages} INDEXED BY {i:messages_ended_idx}
				WHERE channel = ?1 AND outcome = `+strconv.Itoa(int(outcome))+` AND outcome <> 0 AND completed_at < ?2
				ORDER BY completed_at LIMIT ?3
			)`)
	}
	chosen := `SELECT seq, key, iif(outcome > 1, grp, '') FROM (` + strings.Join(parts, ` UNION ALL `) + `) ORDER BY completed_at, seq LIMIT ?3`
	args := []any{p.Channel, before, p.Limit}
	err = run(ahead(ctx), d.rendered(Statement{`SELECT count(*) FROM (` + chosen + `)`, args}), func(row Scanner) error {
		return row.Scan(&count)
	})
	if err != nil || count == 0 || p.DryRun {
		return count, err
	}
	count = 0
	groups := make(map[string]bool)
	err = run(ctx, d.rendered(Statement{
		deleteMessages(chosen) + ` RETURNING grp`, args,
	}), func(row Scanner) error {
		count++
		var group string
		err := row.Scan(&group)
		if group != "" {
			groups[group] = true
		}
		return err
	})
	if err != nil {
		return 0, err
	}
	return count, sqliteWake(ctx, run, d, p.Channel, groups, at)
}
