package dialect

// What relays and people ask of all channels at once. Nothing here costs more
// where more waits.

func (sqlite) look(l Look, at now) Statement {
	type channel struct {
		System int16  `json:"s"`
		Name   string `json:"n"`
	}
	channels := make([]channel, len(l.Names))
	for i, name := range l.Names {
		channels[i] = channel{l.Systems[i], name}
	}
	return Statement{`
		WITH asked AS (
			SELECT a.key AS ord, a.value ->> 's' AS system, a.value ->> 'n' AS name, coalesce(c.outage_level > 0, false) AS outage,
				max(0, coalesce(max(c.paused_until, c.outage_until, iif(c.outage_level > 0, c.probe_until, 0)), 0) - ?2) AS paused
			FROM json_each(?1) AS a
			LEFT JOIN {t:channels} AS c ON c.system = a.value ->> 's' AND c.name = a.value ->> 'n'
		), next AS (
			SELECT a.*, CASE a.system WHEN 1 THEN ` + nextEntry + ` ELSE ` + nextMessage + ` END AS at
			FROM asked AS a
		)
		SELECT iif(at IS NULL, -1, max(0, at - ?2, paused)), paused, outage FROM next ORDER BY ord`,
		[]any{toJSON(channels), at},
	}
}

// When to claim next from channel a: 0 where something is due, else when
// something will be, or the first lease of the oldest rows lapses.
const (
	nextEntry = `coalesce(
		(SELECT 0 FROM {t:entries} AS e INDEXED BY {i:entries_due_idx} WHERE e.channel = a.name AND e.due <= ?2 AND e.lease_until <= ?2 LIMIT 1),
		(SELECT min(n.at) FROM (
			SELECT min(e.due) AS at FROM {t:entries} AS e INDEXED BY {i:entries_due_idx} WHERE e.channel = a.name AND e.due > ?2
			UNION ALL
			SELECT min(l.lease_until) FROM (
				SELECT e.lease_until FROM {t:entries} AS e INDEXED BY {i:entries_due_idx} WHERE e.channel = a.name AND e.due <= ?2 AND e.lease_until > ?2
				ORDER BY e.due, e.id LIMIT 100) AS l
		) AS n))`
	nextMessage = `coalesce(
		(SELECT 0 FROM {t:messages} AS m INDEXED BY {i:messages_due_idx} WHERE ` + waitsIn + ` AND m.due <= ?2 AND m.lease_until <= ?2 LIMIT 1),
		(SELECT 0 FROM {t:groups} AS g INDEXED BY {i:groups_due_idx} WHERE g.channel = a.name AND g.due <= ?2 AND g.lease_until <= ?2 LIMIT 1),
		(SELECT min(n.at) FROM (
			SELECT min(m.due) AS at FROM {t:messages} AS m INDEXED BY {i:messages_due_idx} WHERE ` + waitsIn + ` AND m.due > ?2
			UNION ALL
			SELECT min(g.due) FROM {t:groups} AS g INDEXED BY {i:groups_due_idx} WHERE g.channel = a.name AND g.due > ?2 AND g.due < ` + blocked + `
			UNION ALL
			SELECT min(l.lease_until) FROM (
				SELECT m.lease_until FROM {t:messages} AS m INDEXED BY {i:messages_due_idx} WHERE ` + waitsIn + ` AND m.due <= ?2 AND m.lease_until > ?2
				ORDER BY m.due, m.seq LIMIT 100) AS l
			UNION ALL
			SELECT min(l.lease_until) FROM (
				SELECT g.lease_until FROM {t:groups} AS g INDEXED BY {i:groups_due_idx} WHERE g.channel = a.name AND g.due <= ?2 AND g.lease_until > ?2
				ORDER BY g.due, g.grp LIMIT 100) AS l
		) AS n))`
	// waitsIn are the open messages of channel a that have no group.
	waitsIn = `m.channel = a.name AND m.outcome = 0 AND m.grp = ''`
	blocked = `9223372036854775807` // never
)

// stats hops from channel to channel along an index, and counts at most limit
// rows of each kind. Of the open messages in groups that are due it looks at
// the first limit.
func (sqlite) stats(limit int, at now) Statement {
	return Statement{`
		WITH RECURSIVE held (system, name) AS (
			SELECT 1, min(channel) FROM {t:entries}
			UNION ALL
			SELECT 1, (SELECT min(e.channel) FROM {t:entries} AS e WHERE e.channel > h.name) FROM held AS h WHERE h.name IS NOT NULL
		), kept (system, name) AS (
			SELECT 2, min(channel) FROM {t:messages}
			UNION ALL
			SELECT 2, (SELECT min(m.channel) FROM {t:messages} AS m WHERE m.channel > k.name) FROM kept AS k WHERE k.name IS NOT NULL
		), named AS (
			SELECT system, name FROM held WHERE name IS NOT NULL
			UNION SELECT system, name FROM kept WHERE name IS NOT NULL
			UNION SELECT system, name FROM {t:channels} WHERE paused_until > 0 OR outage_level > 0
		), counted AS (` + statsOfEntries + ` UNION ALL ` + statsOfMessages + `)
		SELECT a.system, a.name, min(a.due, ?1), min(a.scheduled, ?1), min(a.leased, ?1), a.blocked, a.dead, a.unknown,
			coalesce(?2 - max(0, a.oldest), 0), coalesce(a.attempt, 0), coalesce(a.last_error, ''),
			max(0, coalesce(max(c.paused_until, c.outage_until), 0) - ?2), coalesce(c.outage_level > 0 AND c.paused_until <= ?2, false),
			coalesce(CASE WHEN c.paused_until > ?2 THEN c.reason WHEN c.outage_level > 0 THEN c.outage_reason END, '')
		FROM counted AS a LEFT JOIN {t:channels} AS c ON c.system = a.system AND c.name = a.name
		ORDER BY a.system, a.name`,
		[]any{limit, at},
	}
}

// The counts of channel a: due, scheduled, leased, blocked, dead, unknown, the
// oldest due time, the highest attempt and its error.
const (
	statsOfEntries = `
		SELECT a.system, a.name,
			(SELECT count(*) FROM (SELECT 1 FROM {t:entries} AS e
				WHERE e.channel = a.name AND e.due <= ?2 AND e.lease_until <= ?2 ORDER BY e.due LIMIT ?1)) AS due,
			(SELECT count(*) FROM (SELECT 1 FROM {t:entries} AS e WHERE e.channel = a.name AND e.due > ?2 LIMIT ?1)) AS scheduled,
			(SELECT count(*) FROM (SELECT e.lease_until AS u FROM {t:entries} AS e
				WHERE e.channel = a.name AND e.due <= ?2 ORDER BY e.due LIMIT ?1) WHERE u > ?2) AS leased,
			0 AS blocked, 0 AS dead, 0 AS unknown,
			(SELECT e.due FROM {t:entries} AS e
				WHERE e.channel = a.name AND e.due <= ?2 AND e.lease_until <= ?2 ORDER BY e.due LIMIT 1) AS oldest,
			(SELECT max(x.attempt) FROM ` + sampleOfEntries + ` AS x) AS attempt,
			(SELECT x.last_error FROM ` + sampleOfEntries + ` AS x ORDER BY x.attempt DESC, x.last_error DESC LIMIT 1) AS last_error
		FROM named AS a WHERE a.system = 1`
	sampleOfEntries = `(SELECT e.attempt, e.last_error FROM {t:entries} AS e WHERE e.channel = a.name ORDER BY e.due DESC LIMIT 1000)`

	statsOfMessages = `
		SELECT a.system, a.name,
			(SELECT count(*) FROM (SELECT 1 FROM {t:messages} AS m INDEXED BY {i:messages_due_idx}
				WHERE ` + waitsIn + ` AND m.due <= ?2 AND m.lease_until <= ?2 ORDER BY m.due LIMIT ?1))
				+ (SELECT count(*) FROM ` + groupedIn + ` AS x WHERE x.due <= ?2 AND x.until <= ?2),
			(SELECT count(*) FROM (SELECT 1 FROM {t:messages} AS m INDEXED BY {i:messages_due_idx} WHERE ` + waitsIn + ` AND m.due > ?2 LIMIT ?1))
				+ (SELECT count(*) FROM ` + groupedIn + ` AS x WHERE x.due > ?2 AND x.until <= ?2)
				+ (SELECT count(*) FROM (SELECT 1 FROM {t:groups} AS g CROSS JOIN {t:messages} AS m ON ` + openIn + `
					WHERE g.channel = a.name AND g.due > ?2 AND g.due < ` + blocked + ` LIMIT ?1)),
			(SELECT count(*) FROM (SELECT m.lease_until AS u FROM {t:messages} AS m INDEXED BY {i:messages_due_idx}
				WHERE ` + waitsIn + ` AND m.due <= ?2 ORDER BY m.due LIMIT ?1) WHERE u > ?2)
				+ (SELECT count(*) FROM ` + groupedIn + ` AS x WHERE x.until > ?2),
			(SELECT count(*) FROM (SELECT 1 FROM {t:groups} AS g INDEXED BY {i:groups_due_idx} WHERE g.channel = a.name AND g.due = ` + blocked + ` LIMIT ?1)),
			(SELECT count(*) FROM (SELECT 1 FROM {t:messages} AS m WHERE m.channel = a.name AND m.outcome = 4 AND m.outcome <> 0 LIMIT ?1)),
			(SELECT count(*) FROM (SELECT 1 FROM {t:messages} AS m WHERE m.channel = a.name AND m.outcome = 5 AND m.outcome <> 0 LIMIT ?1)),
			(SELECT min(o.due) FROM (
				SELECT * FROM (SELECT m.due FROM {t:messages} AS m INDEXED BY {i:messages_due_idx}
					WHERE ` + waitsIn + ` AND m.due <= ?2 AND m.lease_until <= ?2 ORDER BY m.due LIMIT 1)
				UNION ALL
				SELECT * FROM (SELECT g.due FROM {t:groups} AS g
					WHERE g.channel = a.name AND g.due <= ?2 AND g.lease_until <= ?2 ORDER BY g.due LIMIT 1)
			) AS o),
			(SELECT max(x.attempt) FROM ` + sampleOfMessages + ` AS x),
			(SELECT x.last_error FROM ` + sampleOfMessages + ` AS x ORDER BY x.attempt DESC, x.last_error DESC LIMIT 1)
		FROM named AS a WHERE a.system = 2`
	openIn    = `m.channel = g.channel AND m.grp = g.grp AND m.grp <> '' AND m.outcome = 0`
	groupedIn = `(SELECT m.due, m.lease_until AS until FROM {t:groups} AS g CROSS JOIN {t:messages} AS m ON ` + openIn + `
		WHERE g.channel = a.name AND g.due <= ?2 ORDER BY g.due, g.grp LIMIT ?1)`
	// What waits longest for its next attempt, and what ended last without success.
	sampleOfMessages = `(
		SELECT * FROM (SELECT m.attempt, m.last_error FROM {t:messages} AS m INDEXED BY {i:messages_due_idx} WHERE ` + waitsIn + ` ORDER BY m.due DESC LIMIT 1000)
		UNION ALL
		SELECT * FROM (SELECT m.attempt, m.last_error FROM {t:groups} AS g CROSS JOIN {t:messages} AS m ON m.seq = (
				SELECT min(m.seq) FROM {t:messages} AS m WHERE ` + openIn + `)
			WHERE g.channel = a.name ORDER BY g.due DESC LIMIT 1000)
		UNION ALL
		SELECT * FROM (SELECT m.attempt, m.last_error FROM {t:messages} AS m
			WHERE m.channel = a.name AND m.outcome > 1 ORDER BY m.seq DESC LIMIT 1000)
	)`
)
