package dialect

import (
	"context"
	"encoding/json"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
)

// Messages. There is one writer, so what is read inside a transaction that
// writes stays true until it ends, and no row is ever found locked. A message
// is found by its key: its place, which is its number, says no more.

var _ journal = sqlite{}

// never is the due time of a group that is blocked.
const never = math.MaxInt64

// sqliteMessage are the columns of a message; see MessageColumnCount.
const sqliteMessage = `seq, key, seq, token, attempt, payload, headers, created_at, due, lease_until,
	last_error, grp, outcome, completed_at, ref, code, lapses`

// Rows of a list are changed by an upsert, never by an UPDATE or DELETE: those
// read the whole table where ANALYZE once found it small, also when a backlog
// has come since; an upsert finds its rows by their keys. All rows that are
// given exist, so nothing is inserted. They are deleted by way of a view, and
// groups by setting gone.

// updateMessages changes messages by their numbers, the seq of a query.
func updateMessages(seqs string) string {
	return `
		INSERT INTO {t:messages} (seq, channel, key, due, created_at, payload)
		SELECT seq, '', seq, 0, 0, x'' FROM (` + seqs + `) WHERE true
		ON CONFLICT (seq) DO UPDATE SET `
}

// deleteMessages deletes what a query of seq, key and grp finds.
func deleteMessages(query string) string {
	return `INSERT INTO {t:messages_gone} (seq, key, grp) ` + query
}

// held is the number of the message whose key follows, where it is leased
// under the token ?3; NULL otherwise.
func held(key string) string {
	return `(SELECT h.seq FROM {t:messages} AS h WHERE h.channel = ?1 AND h.key = ` + key + ` AND h.token = ?3 AND h.lease_until > 0)`
}

// updateHeld changes messages m that are leased under the token ?3, by their
// keys: ?2 is a JSON list of keys or, with further columns, of rows.
func updateHeld(columns string) string {
	key, values := `j.value`, ``
	if columns != `` {
		key = `j.value ->> 0`
		for i := range strings.Count(columns, `,`) {
			values += `, j.value ->> ` + strconv.Itoa(i+1)
		}
	} else {
		columns, values = `, due`, `, 0`
	}
	return `
		INSERT INTO {t:messages} AS m (channel, key, created_at, payload` + columns + `)
		SELECT ?1, ` + key + `, 0, x''` + values + ` FROM json_each(?2) AS j
		WHERE ` + held(key) + ` IS NOT NULL
		ON CONFLICT (channel, key) DO UPDATE SET `
}

// updateGroups changes groups g by their names: the parameter is a JSON list
// of groupRun, whose number is excluded.run_end. Those without a row are left.
func updateGroups(parameter int) string {
	return `
		INSERT INTO {t:groups} AS g (channel, grp, due, run_end)
		SELECT ?1, j.value ->> 0, 0, j.value ->> 1 FROM json_each(?` + strconv.Itoa(parameter) + `) AS j
		WHERE (SELECT h.due FROM {t:groups} AS h WHERE h.channel = ?1 AND h.grp = j.value ->> 0) IS NOT NULL
		ON CONFLICT (channel, grp) DO UPDATE SET `
}

// putOne puts one message; triggers move the counter on and see to its group.
const putOne = `
	INSERT INTO {t:messages} (seq, channel, key, grp, payload, headers, created_at, due)
	VALUES ((SELECT max(version + 1, ?1) FROM {t:seq}), ?2, ?3, ?4, ?5, ?6, ?1, ?1 + ?7)
	ON CONFLICT (channel, key) DO NOTHING
	RETURNING seq`

// put inserts what is new and tells by one count whether that was all. One
// message, nearly always new, is tried alone first.
func (s sqlite) put(ctx context.Context, run Runner, d Dialect, p PutMessages, at now, existing func(i int, row Scanner) error) ([]PutMessage, error) {
	if p.Begin > 0 {
		if err := sqliteBlocked(ctx, run, d, p, at); err != nil {
			return nil, err
		}
	}
	var last, token, created int64
	if len(p.Keys) == 1 && p.Begin == 0 {
		st := Statement{putOne, []any{at, p.Channel, p.Keys[0], p.Groups[0], p.Payloads[0], p.Headers[0], p.Delays[0]}}
		err := run(ctx, d.rendered(st), func(row Scanner) error { return row.Scan(&last) })
		if err != nil || last > 0 {
			return []PutMessage{{Created: true, At: last, Seq: last, CreatedAt: at.(int64), Due: at.(int64) + p.Delays[0]}}, err
		}
	}
	err := run(ctx, sqlitePut(d, p, at), func(row Scanner) error { return row.Scan(&last, &token, &created) })
	if err != nil {
		return nil, err
	}
	n := int64(len(p.Keys))
	answers := make([]PutMessage, n)
	for i := range answers {
		seq := last - n + int64(i) + 1
		answers[i] = PutMessage{
			Created: true, At: seq, Seq: seq, CreatedAt: at.(int64), Due: at.(int64) + p.Delays[i],
		}
		if p.Begin > 0 {
			answers[i].Token, answers[i].Due, answers[i].LeaseUntil = token, at.(int64), at.(int64)+p.Begin
		}
	}
	if created == n {
		return answers, nil
	}
	return answers, sqliteExisting(ctx, run, d, p, last, answers, existing)
}

// sqlitePut draws a run of numbers and inserts. The triggers do what they do
// for one; they find the counter moved on already.
func sqlitePut(d Dialect, p PutMessages, at now) Statement {
	n := len(p.Keys)
	args := make([]any, 0, 4+5*n)
	args = append(args, p.Channel, n, at, p.Begin)
	for i := range n {
		args = append(args, p.Keys[i], p.Groups[i], p.Payloads[i], p.Headers[i], p.Delays[i])
	}
	return Statement{d.Render(`
		UPDATE {t:seq} SET version = max(version + ?2, ?3), token = iif(?4 > 0, max(token + 1, ?3), token);
		INSERT INTO {t:messages} (seq, channel, key, grp, payload, headers, created_at, due, lease_until, token, attempt)
		SELECT q.version - p.n + i.column1, p.channel, i.column2, i.column3, i.column4, i.column5, p.now,
			p.now + iif(p.begin > 0, 0, i.column6), iif(p.begin > 0, p.now + p.begin, 0), iif(p.begin > 0, q.token, 0), p.begin > 0
		FROM (SELECT ?1 AS channel, ?2 AS n, ?3 AS now, ?4 AS begin) AS p CROSS JOIN {t:seq} AS q
		CROSS JOIN (VALUES `) + values(n, 5) + d.Render(`) AS i WHERE true
		ON CONFLICT (channel, key) DO NOTHING;
		SELECT q.version, q.token, (SELECT count(*) FROM {t:messages} AS m WHERE m.seq > q.version - ?2 AND m.seq <= q.version)
		FROM {t:seq} AS q`), args}
}

// values is a list of n rows: their ordinals from 1 and width parameters each.
// Numbered parameters would be looked up by name, one after another: a square
// of n. A statement with a WITH would make a select of each row.
func values(n, width int) string {
	var b strings.Builder
	tail := strings.Repeat(",?", width) + "),"
	for i := range n {
		b.WriteString("(")
		b.WriteString(strconv.Itoa(i + 1))
		b.WriteString(tail)
	}
	return strings.TrimSuffix(b.String(), ",")
}

// sqliteBlocked refuses to begin what is not the first open message of its
// group, or has a dead or unknown one before it, before anything is written.
func sqliteBlocked(ctx context.Context, run Runner, d Dialect, p PutMessages, at now) error {
	pairs := make([][2]string, 0, len(p.Keys))
	for i, group := range p.Groups {
		if group != "" {
			pairs = append(pairs, [2]string{p.Keys[i], group})
		}
	}
	if len(pairs) == 0 {
		return nil
	}
	st := d.rendered(Statement{`
		SELECT i.value ->> 1,
			EXISTS (SELECT 1 FROM {t:groups} AS g WHERE g.channel = ?1 AND g.grp = i.value ->> 1 AND g.lease_until > ?3)
			OR EXISTS (SELECT 1 FROM {t:messages} AS m INDEXED BY {i:messages_group_idx}
				WHERE m.channel = ?1 AND m.grp = i.value ->> 1 AND m.grp <> '' AND m.outcome IN (0, 4, 5))
		FROM json_each(?2) AS i
		WHERE NOT EXISTS (SELECT 1 FROM {t:messages} AS m WHERE m.channel = ?1 AND m.key = i.value ->> 0)`,
		[]any{p.Channel, toJSON(pairs), at},
	})
	began := make(map[string]bool)
	refused := false
	err := run(ctx, st, func(row Scanner) error {
		var group string
		var blocked bool
		err := row.Scan(&group, &blocked)
		refused = refused || blocked || began[group]
		began[group] = true
		return err
	})
	if err == nil && refused {
		err = ErrBlocked
	}
	return err
}

// sqliteExisting tells which messages existed: those that are not numbered in
// the run that was drawn, up to last.
func sqliteExisting(ctx context.Context, run Runner, d Dialect, p PutMessages, last int64, answers []PutMessage, existing func(i int, row Scanner) error) error {
	n := len(p.Keys)
	args := append(make([]any, 0, 3+3*n), p.Channel, n, last)
	for i := range n {
		args = append(args, p.Keys[i], p.Groups[i], p.Payloads[i])
	}
	text := d.Render(`
		SELECT i.column1, (
			SELECT json_array(m.seq, m.payload <> i.column4 OR m.grp <> i.column3)
			FROM {t:messages} AS m WHERE m.channel = p.channel AND m.key = i.column2 AND NOT (m.seq > p.last - p.n AND m.seq <= p.last)
		)
		FROM (SELECT ?1 AS channel, ?2 AS n, ?3 AS last) AS p CROSS JOIN (VALUES `) + values(n, 3) + `) AS i`
	ordinals := make(map[int64]int)
	err := run(ctx, Statement{text, args}, func(row Scanner) error {
		var ord int
		var found *string
		if err := row.Scan(&ord, &found); err != nil || found == nil {
			return err
		}
		var m [2]int64
		err := json.Unmarshal([]byte(*found), &m)
		ordinals[m[0]] = ord - 1
		answers[ord-1] = PutMessage{Differs: m[1] > 0}
		return err
	})
	if err != nil {
		return err
	}
	seqs := slices.Sorted(maps.Keys(ordinals))
	next := 0
	return run(ctx, d.rendered(Statement{
		`SELECT ` + sqliteMessage + ` FROM {t:messages} WHERE seq IN (SELECT value FROM json_each(?1)) ORDER BY seq`, []any{toJSON(seqs)},
	}), func(row Scanner) error {
		next++
		return existing(ordinals[seqs[next-1]], row)
	})
}

func (sqlite) beginMessage(ctx context.Context, run Runner, d Dialect, channel, key string, lease int64, at now, scan func(Scanner) error) (int16, error) {
	var seq, until int64
	var outcome int16
	var group string
	st := d.rendered(Statement{
		`SELECT seq, grp, outcome, lease_until FROM {t:messages} WHERE channel = ?1 AND key = ?2`, []any{channel, key},
	})
	err := run(ctx, st, func(row Scanner) error { return row.Scan(&seq, &group, &outcome, &until) })
	switch {
	case err != nil:
		return 0, err
	case seq == 0:
		return ResultNotFound, nil
	case outcome != 0 || until > 0:
		return ResultState, nil
	}
	args := []any{channel, seq, at, lease, group}
	text := `UPDATE {t:seq} SET token = max(token + 1, ?3);`
	if group != "" {
		blocked := false
		st := d.rendered(Statement{`
			SELECT EXISTS (SELECT 1 FROM {t:groups} AS g WHERE g.channel = ?1 AND g.grp = ?5 AND g.lease_until > ?3)
				OR EXISTS (SELECT 1 FROM {t:messages} AS m INDEXED BY {i:messages_group_idx}
					WHERE m.channel = ?1 AND m.grp = ?5 AND m.grp <> '' AND m.outcome IN (0, 4, 5) AND m.seq < ?2)`, args,
		})
		if err := run(ctx, st, func(row Scanner) error { return row.Scan(&blocked) }); err != nil {
			return 0, err
		}
		if blocked {
			return ResultBlocked, nil
		}
		text += `
			INSERT INTO {t:groups} (channel, grp, due, lease_until, token, run_end)
			SELECT ?1, ?5, ?3, ?3 + ?4, q.token, ?2 FROM {t:seq} AS q WHERE true
			ON CONFLICT (channel, grp) DO UPDATE SET
				due = min(due, excluded.due), lease_until = excluded.lease_until, token = excluded.token, run_end = excluded.run_end;`
	}
	return ResultDone, run(ctx, d.rendered(Statement{text + `
		UPDATE {t:messages} SET token = (SELECT token FROM {t:seq}), lease_until = ?3 + ?4, due = min(due, ?3),
			attempt = min(attempt, 2147483646) + 1
		WHERE seq = ?2 RETURNING ` + sqliteMessage, args,
	}), scan)
}
