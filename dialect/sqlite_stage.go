package dialect

import (
	"strconv"
	"strings"
)

// upsert replaces a pending value. What reads the old row is unqualified.
const upsert = `
	ON CONFLICT (channel, key) DO UPDATE SET
		version = excluded.version, payload = excluded.payload, headers = excluded.headers,
		tombstone = excluded.tombstone, staged_at = excluded.staged_at,
		due = CASE WHEN attempt = 0 THEN min(due, excluded.due) ELSE excluded.due END,
		attempt = 0, last_error = ''`

// stageOne: triggers move the counter on.
const stageOne = `
	INSERT INTO {t:entries} (id, version, channel, key, payload, headers, tombstone, due, staged_at)
	VALUES ((SELECT max(version + 1, ?1) FROM {t:seq}), (SELECT max(version + 1, ?1) FROM {t:seq}), ?2, ?3, ?4, ?5, ?6, ?7, ?1)
	` + upsert + ` RETURNING CAST(version AS TEXT)`

func (sqlite) prepared() []string { return []string{stageOne, putOne} }

// stage writes one row in one statement. For more it draws a run of versions
// first, under the write lock that this takes.
func (sqlite) stage(s Stage, at now) Statement {
	due := at.(int64)
	if s.Delay > 0 {
		due = (due + s.Delay - 1) / s.Delay * s.Delay
	}
	n := len(s.Keys)
	if n == 1 {
		return Statement{stageOne, []any{at, s.Channel, s.Keys[0], s.Payloads[0], s.Headers[0], s.Tombstones[0], due}}
	}
	args := make([]any, 0, 4+4*n)
	args = append(args, s.Channel, n, at, due)
	var values strings.Builder
	for i := range n {
		// Numbered parameters would be looked up by name, one after another: a square of n.
		values.WriteString("(" + strconv.Itoa(i+1) + ",?,?,?,?),")
		args = append(args, s.Keys[i], s.Payloads[i], s.Headers[i], s.Tombstones[i])
	}
	return Statement{`
		UPDATE {t:seq} SET version = max(version + ?2, ?3);
		WITH p (channel, n, now, due) AS (SELECT ?1, ?2, ?3, ?4),
		i (ord, key, payload, headers, tombstone) AS (VALUES ` + strings.TrimSuffix(values.String(), ",") + `)
		INSERT INTO {t:entries} (id, version, channel, key, payload, headers, tombstone, due, staged_at)
		SELECT q.version - p.n + i.ord, q.version - p.n + i.ord,
			p.channel, i.key, i.payload, i.headers, i.tombstone, p.due, p.now
		FROM i CROSS JOIN p CROSS JOIN {t:seq} AS q WHERE true
		` + upsert + `;
		SELECT CAST(version AS TEXT) FROM {t:seq}`,
		args,
	}
}

// versions: the keys have a run of them, in order; the answer is the last.
func (sqlite) versions(answer string, n int) ([]int64, error) {
	last, err := strconv.ParseInt(answer, 10, 64)
	versions := make([]int64, n)
	for i := range versions {
		versions[i] = last - int64(n-1-i)
	}
	return versions, err
}
