package dialect

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Putting messages. What is not begun, and one of a group or any number without, is
// written by a plain insert, which costs half of what a function would. A group
// is locked first; counting what that returns makes the number be drawn later.
// Only where the insert leaves messages unwritten, because they exist or did a
// moment ago, put_1 looks at these under snapshots of its own: in the same
// statement, save for one message without a group, where merely preparing for
// that cost a tenth of the Put, and nothing has been written that a second
// statement could find half done.
const (
	pgPutOne = `
		INSERT INTO {t:messages} AS m (seq, channel, key, headers, payload, due, created_at)
		VALUES (nextval({s:seq}::regclass), $1::text, $2::text, $4::text, $3::bytea, `
	pgPutOneDone = `)
		ON CONFLICT (channel, key) DO NOTHING
		RETURNING m.created_at || ';0;' || m.seq`
	pgPutPlain = pgPutOne + pgStatementNow + ` + $5::bigint, ` + pgStatementNow + pgPutOneDone
	pgPutAt    = pgPutOne + `$6::bigint + $5::bigint, $6::bigint` + pgPutOneDone

	pgPutExisting = `
		SELECT x FROM {t:put_1}($1::text, ARRAY[$2::text], NULL, ARRAY[$3::bytea], ARRAY[$4::text], ARRAY[$5::bigint], 0, ARRAY[NULL::bigint], NULL, $6::bigint) AS x`

	pgPutNew = `
			INSERT INTO {t:messages} AS m (seq, channel, key, grp, due, created_at, headers, payload)
			SELECT nextval({s:seq}::regclass), $1::text, i.key, i.grp, n.now + i.delay, n.now, i.headers, i.payload
			FROM (SELECT coalesce($6::bigint, ` + pgNow + `) AS now OFFSET 0) AS n
			CROSS JOIN `
	pgPutDone = ` AS i (key, payload, headers, delay, grp)
			ON CONFLICT (channel, key) DO NOTHING
			RETURNING m.key, m.seq, m.created_at`
	pgPutInGroup = `
		WITH locked AS (
			INSERT INTO {t:groups} AS g (channel, grp, due)
			VALUES ($1::text, $7::text, coalesce($6::bigint, ` + pgNow + `) + $5::bigint)
			ON CONFLICT (channel, grp) DO UPDATE SET due = excluded.due WHERE g.due = 9223372036854775806
			RETURNING g.xmax = 0 AS fresh
		), put AS (` + pgPutNew + `(SELECT count(*) FROM locked) AS l
			CROSS JOIN (SELECT $2::text, $3::bytea, $4::text, $5::bigint, $7::text)` + pgPutDone + `
		)
		SELECT p.created_at || ';0;' || p.seq FROM put AS p
		UNION ALL
		SELECT x FROM {t:put_1}($1::text, ARRAY[$2::text], ARRAY[$7::text], ARRAY[$3::bytea], ARRAY[$4::text], ARRAY[$5::bigint],
			0, ARRAY[NULL::bigint], (SELECT l.fresh FROM locked AS l), $6::bigint) AS x
		WHERE NOT EXISTS (SELECT FROM put)`

	// The keys come sorted, and nothing promises that RETURNING keeps an order.
	// $4 and $5 are NULL where no message has headers or a delay, as most have:
	// each array that is unnested costs a few percent.
	pgPutMany = `
		WITH put AS (` + pgPutNew + `(SELECT i.*, '' FROM unnest($2::text[], $3::bytea[], $4::text[], $5::bigint[]) AS i)` + pgPutDone + pgPutManyDone
	pgPutManyPlain = `
		WITH put AS (` + pgPutNew + `(SELECT i.*, '', 0::bigint, '' FROM unnest($2::text[], $3::bytea[]) AS i)` + pgPutDone + pgPutManyDone
	pgPutManyDone = `
		), made AS (
			SELECT count(*) AS n, min(p.created_at) AS now, string_agg(p.seq::text, ',' ORDER BY p.key) AS seqs FROM put AS p
		)
		SELECT made.now || ';0;' || made.seqs FROM made WHERE made.n = cardinality($2::text[])
		UNION ALL
		SELECT x FROM made CROSS JOIN LATERAL {t:put_1}($1::text, $2::text[], NULL, $3::bytea[],
			coalesce($4::text[], array_fill(''::text, ARRAY[cardinality($2::text[])])),
			coalesce($5::bigint[], array_fill(0::bigint, ARRAY[cardinality($2::text[])])), 0,
			ARRAY(
				SELECT p.seq FROM unnest($2::text[]) WITH ORDINALITY AS i (key, ord) LEFT JOIN put AS p ON p.key = i.key ORDER BY i.ord
			), NULL, coalesce(made.now, $6::bigint)) AS x
		WHERE made.n < cardinality($2::text[])`

	pgPutOrdered = `
		SELECT x FROM {t:put_1}($1::text, $2::text[], $7::text[], $3::bytea[], $4::text[], $5::bigint[], $8::bigint, NULL, NULL, $6::bigint) AS x`
)

func (postgres) put(ctx context.Context, run Runner, d Dialect, p PutMessages, at now, existing func(i int, row Scanner) error) ([]PutMessage, error) {
	order, st := pgPut(p, at)
	answers := make([]PutMessage, len(p.Keys))
	var last string
	read := func(row Scanner) error {
		if err := row.Scan(&last); err != nil || !strings.HasPrefix(last, "[") {
			return err
		}
		var ord int
		var differs bool
		var columns json.RawMessage
		if err := (jsonRow(last)).Scan(&ord, &differs, &columns); err != nil {
			return err
		}
		i := order(ord - 1)
		answers[i].Differs = differs
		return existing(i, jsonRow(columns))
	}
	err := run(ctx, d.rendered(st), read)
	if err == nil && last == "" { // one, and its key exists
		err = run(ctx, d.rendered(Statement{pgPutExisting, []any{p.Channel, p.Keys[0], p.Payloads[0], p.Headers[0], p.Delays[0], at}}), read)
	}
	if err != nil {
		return nil, err
	}
	return answers, pgCreated(answers, p, order, last)
}

// jsonRow is a row as a JSON array.
type jsonRow []byte

func (r jsonRow) Scan(dest ...any) error { return json.Unmarshal(r, &dest) }

// pgPut chooses the statement; order tells the index of the message that is
// the nth in the statement.
func pgPut(p PutMessages, at now) (order func(n int) int, st Statement) {
	same := func(n int) int { return n }
	grouped := slices.ContainsFunc(p.Groups, func(g string) bool { return g != "" })
	switch {
	case len(p.Keys) == 1 && p.Begin == 0:
		args := []any{p.Channel, p.Keys[0], p.Payloads[0], p.Headers[0], p.Delays[0], at, p.Groups[0]}
		switch {
		case grouped:
			return same, Statement{pgPutInGroup, args}
		case at != nil:
			return same, Statement{pgPutAt, args[:6]}
		}
		return same, Statement{pgPutPlain, args[:5]}
	case grouped || p.Begin > 0:
		groups := p.Groups
		if !grouped {
			groups = nil
		}
		return same, Statement{pgPutOrdered, []any{p.Channel, p.Keys, p.Payloads, p.Headers, p.Delays, at, groups, p.Begin}}
	case slices.IsSorted(p.Keys):
		return same, pgPutSorted(p.Channel, p.Keys, p.Payloads, p.Headers, p.Delays, at)
	}
	places := make([]int, len(p.Keys))
	for i := range places {
		places[i] = i
	}
	slices.SortFunc(places, func(a, b int) int { return strings.Compare(p.Keys[a], p.Keys[b]) })
	return func(n int) int { return places[n] }, pgPutSorted(p.Channel,
		picked(p.Keys, places), picked(p.Payloads, places), picked(p.Headers, places), picked(p.Delays, places), at)
}

func pgPutSorted(channel string, keys []string, payloads [][]byte, headers []string, delays []int64, at now) Statement {
	if slices.ContainsFunc(headers, func(h string) bool { return h != "" }) || slices.ContainsFunc(delays, func(d int64) bool { return d != 0 }) {
		return Statement{pgPutMany, []any{channel, keys, payloads, headers, delays, at}}
	}
	return Statement{pgPutManyPlain, []any{channel, keys, payloads, nil, nil, at}}
}

func picked[T any](from []T, places []int) []T {
	to := make([]T, len(places))
	for i, place := range places {
		to[i] = from[place]
	}
	return to
}

// pgCreated reads 'created_at;token;numbers': a number for each message, none
// for one that existed.
func pgCreated(answers []PutMessage, p PutMessages, order func(int) int, answer string) error {
	if answer == "!" {
		return ErrBlocked
	}
	parts := strings.Split(answer, ";")
	if len(parts) != 3 {
		return fmt.Errorf("the database's answer to a put is not understood")
	}
	created, err := strconv.ParseInt(parts[0], 10, 64)
	token, err2 := strconv.ParseInt(parts[1], 10, 64)
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	n := 0
	for text := range strings.SplitSeq(parts[2], ",") {
		if n == len(answers) {
			return fmt.Errorf("the database answered with more than %d numbers for as many messages", n)
		}
		i := order(n)
		n++
		if text == "" {
			continue
		}
		a := PutMessage{Created: true, Token: token, CreatedAt: created, Due: created + p.Delays[i]}
		if a.Seq, err = strconv.ParseInt(text, 10, 64); err != nil {
			return err
		}
		if p.Begin > 0 {
			a.Due, a.LeaseUntil = created, created+p.Begin
		}
		answers[i] = a
	}
	if n != len(answers) {
		return fmt.Errorf("the database answered with %d numbers for %d messages", n, len(answers))
	}
	return nil
}
