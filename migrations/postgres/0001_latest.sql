-- Latest state per key: one row per (channel, key) whose newest value has not been published yet.
--
-- Times are microseconds since the Unix epoch, so that no session's time zone can shift them:
-- read them with to_timestamp(due / 1e6). A lease_until of 0 means not leased yet, one below 0 that
-- the last lease ended with that outcome: -1 published, -2 retry, -3 released.

-- +goose Up

-- +goose StatementBegin
CREATE TABLE {t:meta} (
    version    integer NOT NULL, -- of this schema
    compatible integer NOT NULL  -- the oldest library schema version that works with it
);
-- +goose StatementEnd

-- +goose StatementBegin
COMMENT ON TABLE {t:meta} IS 'sqloutbox';
-- +goose StatementEnd

-- +goose StatementBegin
INSERT INTO {t:meta} (version, compatible) VALUES (1, 1);
-- +goose StatementEnd

-- Versions. Sinks outlive this sequence, so it starts at the clock: a reinstall never goes back.
-- CACHE 1 (the default) is needed: the stage function compares with the last value drawn by anybody.
-- +goose StatementBegin
CREATE SEQUENCE {t:seq} AS bigint;
-- +goose StatementEnd
-- +goose StatementBegin
SELECT setval({s:seq}::regclass, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
-- +goose StatementEnd

-- Fencing tokens, one per claim.
-- +goose StatementBegin
CREATE SEQUENCE {t:token_seq} AS bigint;
-- +goose StatementEnd
-- +goose StatementBegin
SELECT setval({s:token_seq}::regclass, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
-- +goose StatementEnd

-- Half of each page stays free, and no index mentions what a claim changes (lease_until, token,
-- attempt): claims are then heap-only updates. "C" collation: a libc upgrade must not corrupt the
-- unique index. An id is the version with which its row was born, so ids are never used twice.
-- +goose StatementBegin
CREATE TABLE {t:entries} (
    id          bigint  NOT NULL,
    version     bigint  NOT NULL,
    due         bigint  NOT NULL,
    lease_until bigint  NOT NULL DEFAULT 0,
    token       bigint  NOT NULL DEFAULT 0,
    staged_at   bigint  NOT NULL,
    attempt     integer NOT NULL DEFAULT 0,
    tombstone   boolean NOT NULL,
    channel     text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    headers     text    NOT NULL DEFAULT '', -- a JSON object of strings, or empty
    last_error  text    NOT NULL DEFAULT '',
    payload     bytea   NOT NULL,
    CONSTRAINT {i:entries_pkey} PRIMARY KEY (id),
    CONSTRAINT {i:entries_channel_key_key} UNIQUE (channel, key)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- +goose StatementEnd

-- +goose StatementBegin
CREATE INDEX {i:entries_due_idx} ON {t:entries} (channel, due, id);
-- +goose StatementEnd

-- Channels that an operator paused or whose destination is down; system 1 is latest, 2 is journal.
-- +goose StatementBegin
CREATE TABLE {t:channels} (
    system        smallint NOT NULL,
    name          text COLLATE "C" NOT NULL,
    paused_until  bigint  NOT NULL DEFAULT 0, -- by an operator
    reason        text    NOT NULL DEFAULT '',
    outage_until  bigint  NOT NULL DEFAULT 0, -- when the next probe may go out
    outage_level  integer NOT NULL DEFAULT 0, -- probes failed in a row; 0: the destination is up
    outage_reason text    NOT NULL DEFAULT '',
    probe_until   bigint  NOT NULL DEFAULT 0, -- the lease of the relay that probes
    CONSTRAINT {i:channels_pkey} PRIMARY KEY (system, name)
) WITH (fillfactor = 50);
-- +goose StatementEnd

-- redraw gives a row that this transaction has just inserted a greater version. Staging calls it
-- for a row, inside its own statement, where the sequence has moved on since it drew; see dialect.
-- It is an upsert since the way to the row by the unique index is the only one that has, whatever
-- the planner believes about the table.
-- +goose StatementBegin
CREATE FUNCTION {t:redraw_1}(p_channel text, p_key text) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $outbox$
DECLARE
    v_version bigint;
BEGIN
    INSERT INTO {t:entries} AS e (id, version, channel, key, payload, tombstone, due, staged_at)
    VALUES (0, 0, p_channel, p_key, '', false, 0, 0)
    ON CONFLICT (channel, key) DO UPDATE SET version = nextval({s:seq}::regclass)
    RETURNING e.version INTO v_version;
    RETURN v_version;
END
$outbox$;
-- +goose StatementEnd

-- claim leases up to p_limit due rows of a channel under a fresh token, from p_from on in the order
-- in which they came due. It returns nothing while the channel is paused, and after an outage one
-- row to one caller. The settings hold for this function only: without them a plan made when the
-- table was empty sorts the whole backlog at each claim.
-- +goose StatementBegin
CREATE FUNCTION {t:claim_1}(p_channel text, p_limit integer, p_lease bigint, p_from bigint, p_now bigint)
RETURNS TABLE (
    id bigint, key text, version bigint, token bigint, attempt integer, payload bytea, headers text,
    tombstone boolean, staged_at bigint, due bigint, lease_until bigint, last_error text, probe boolean
)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now   bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_limit integer := p_limit;
    v_probe boolean := false;
    v_wait  bigint;
    v_rows  tid[];
    v_token bigint;
BEGIN
    SELECT greatest(c.paused_until, c.outage_until, CASE WHEN c.outage_level > 0 THEN c.probe_until END),
        c.outage_level > 0
    INTO v_wait, v_probe
    FROM {t:channels} AS c WHERE c.system = 1 AND c.name = p_channel;
    IF v_wait > v_now THEN
        RETURN;
    END IF;
    IF v_probe THEN
        v_limit := 1;
    END IF;

    v_rows := ARRAY(
        SELECT e.ctid FROM {t:entries} AS e
        WHERE e.channel = p_channel AND e.due >= p_from AND e.due <= v_now AND e.lease_until <= v_now
        ORDER BY e.due, e.id LIMIT v_limit
        FOR UPDATE SKIP LOCKED
    );
    IF cardinality(v_rows) = 0 THEN
        RETURN;
    END IF;
    IF v_probe THEN -- one caller in the fleet
        PERFORM 1 FROM {t:channels} AS c
        WHERE c.system = 1 AND c.name = p_channel AND c.outage_level > 0
            AND greatest(c.paused_until, c.outage_until, c.probe_until) <= v_now
        FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        UPDATE {t:channels} AS c SET probe_until = v_now + p_lease WHERE c.system = 1 AND c.name = p_channel;
    END IF;

    v_token := nextval({s:token_seq}::regclass);
    RETURN QUERY
        UPDATE {t:entries} AS e SET lease_until = v_now + p_lease, token = v_token,
            attempt = least(e.attempt, 2147483646) + 1
        WHERE e.ctid = ANY (v_rows) -- locked, so they stay where they are
        RETURNING e.id, e.key, e.version, e.token, e.attempt, e.payload, e.headers,
            e.tombstone, e.staged_at, e.due, e.lease_until, e.last_error, coalesce(v_probe, false);
END
$outbox$;
-- +goose StatementEnd

-- settle ends leases and returns what is not simply done: 2 superseded, 3 stale, 4 busy. Outcomes
-- (null: all 1) are 1 published, 2 retry, 3 release; a row counts where id, version and token are
-- the caller's and its lease was not ended yet. Locked rows are skipped, never waited for. The
-- lateral sub-selects with their locking clause make every plan look rows up one by one.
-- +goose StatementBegin
CREATE FUNCTION {t:settle_1}(
    p_ids bigint[], p_versions bigint[], p_tokens bigint[], p_outcomes smallint[], p_delays bigint[],
    p_errors text[], p_again boolean[], p_now bigint
) RETURNS TABLE (ord bigint, result smallint)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now  bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_done bigint[];
    v_more bigint[];
BEGIN
    WITH gone AS (
        DELETE FROM {t:entries} AS e WHERE e.ctid = ANY (ARRAY(
            SELECT l.ctid
            FROM unnest(p_ids, p_versions, p_tokens, p_outcomes) AS s (id, version, token, outcome)
            CROSS JOIN LATERAL (
                SELECT e.ctid FROM {t:entries} AS e
                WHERE e.id = s.id AND e.version = s.version AND e.token = s.token AND e.lease_until > 0
                FOR UPDATE SKIP LOCKED
            ) AS l
            WHERE coalesce(s.outcome, 1) = 1
        )) RETURNING e.id
    )
    SELECT array_agg(g.id) INTO v_done FROM gone AS g;
    IF cardinality(v_done) = cardinality(p_ids) THEN
        RETURN;
    END IF;
    v_done := coalesce(v_done, '{}');

    IF p_outcomes IS NOT NULL THEN
        WITH kept AS (
            UPDATE {t:entries} AS e SET
                lease_until = -k.outcome,
                due         = v_now + k.delay,
                attempt     = e.attempt - (k.outcome = 3)::integer,
                last_error  = CASE WHEN k.error = '' THEN e.last_error ELSE k.error END
            FROM (
                SELECT l.ctid AS tid, s.delay, s.error, s.outcome
                FROM unnest(p_ids, p_versions, p_tokens, p_outcomes, p_delays, p_errors)
                    AS s (id, version, token, outcome, delay, error)
                CROSS JOIN LATERAL (
                    SELECT e.ctid FROM {t:entries} AS e
                    WHERE e.id = s.id AND e.version = s.version AND e.token = s.token AND e.lease_until > 0
                    FOR UPDATE SKIP LOCKED
                ) AS l
                WHERE s.outcome > 1
            ) AS k
            WHERE e.ctid = k.tid
            RETURNING e.id
        )
        SELECT v_done || coalesce(array_agg(k.id), '{}') INTO v_done FROM kept AS k;
        IF cardinality(v_done) = cardinality(p_ids) THEN
            RETURN;
        END IF;
    END IF;

    -- Staged again while they were out: the new value stays due, the lease ends.
    WITH freed AS (
        UPDATE {t:entries} AS e SET lease_until = -k.outcome
        FROM (
            SELECT l.ctid AS tid, coalesce(s.outcome, 1) AS outcome
            FROM unnest(p_ids, p_versions, p_tokens, p_outcomes) AS s (id, version, token, outcome)
            CROSS JOIN LATERAL (
                SELECT e.ctid FROM {t:entries} AS e
                WHERE e.id = s.id AND e.version <> s.version AND e.token = s.token AND e.lease_until > 0
                FOR UPDATE SKIP LOCKED
            ) AS l
            WHERE s.id <> ALL (v_done)
        ) AS k
        WHERE e.ctid = k.tid
        RETURNING e.id
    )
    SELECT coalesce(array_agg(f.id), '{}') INTO v_more FROM freed AS f;

    -- The rest changed nothing. What is still under our token and lease was locked: busy.
    RETURN QUERY
        SELECT s.ord, (CASE
            WHEN s.id = ANY (v_more) THEN 2
            WHEN e.id IS NULL THEN CASE WHEN p_again[s.ord] THEN 1 ELSE 3 END
            WHEN e.token <> s.token THEN 3
            WHEN e.lease_until > 0 THEN 4
            WHEN e.lease_until = -coalesce(s.outcome, 1) THEN 1 -- the same again
            ELSE 3
        END)::smallint
        FROM unnest(p_ids, p_versions, p_tokens, p_outcomes) WITH ORDINALITY AS s (id, version, token, outcome, ord)
        LEFT JOIN LATERAL (
            SELECT e.id, e.version, e.token, e.lease_until FROM {t:entries} AS e WHERE e.id = s.id OFFSET 0
        ) AS e ON true
        WHERE s.id <> ALL (v_done);
END
$outbox$;
-- +goose StatementEnd

-- extend lets leases end p_lease from now and returns the rows that it could not extend: 3 stale, 4 busy.
-- +goose StatementBegin
CREATE FUNCTION {t:extend_1}(p_ids bigint[], p_tokens bigint[], p_lease bigint, p_now bigint)
RETURNS TABLE (ord bigint, result smallint)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now  bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_done bigint[];
BEGIN
    WITH extended AS (
        UPDATE {t:entries} AS e SET lease_until = v_now + p_lease WHERE e.ctid = ANY (ARRAY(
            SELECT l.ctid
            FROM unnest(p_ids, p_tokens) AS s (id, token)
            CROSS JOIN LATERAL (
                SELECT e.ctid FROM {t:entries} AS e
                WHERE e.id = s.id AND e.token = s.token AND e.lease_until > 0
                FOR UPDATE SKIP LOCKED
            ) AS l
        )) RETURNING e.id
    )
    SELECT coalesce(array_agg(x.id), '{}') INTO v_done FROM extended AS x;
    IF cardinality(v_done) = cardinality(p_ids) THEN
        RETURN;
    END IF;
    RETURN QUERY
        SELECT s.ord, (CASE WHEN e.token = s.token AND e.lease_until > 0 THEN 4 ELSE 3 END)::smallint
        FROM unnest(p_ids, p_tokens) WITH ORDINALITY AS s (id, token, ord)
        LEFT JOIN LATERAL (
            SELECT e.token, e.lease_until FROM {t:entries} AS e WHERE e.id = s.id OFFSET 0
        ) AS e ON true
        WHERE s.id <> ALL (v_done);
END
$outbox$;
-- +goose StatementEnd

-- look tells for each channel when to claim next, in microseconds from now: 0 now, -1 nothing waits.
-- +goose StatementBegin
CREATE FUNCTION {t:look_1}(p_systems smallint[], p_names text[], p_froms bigint[], p_now bigint)
RETURNS TABLE (wait bigint, paused bigint, outage boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off
AS $outbox$
DECLARE
    v_now bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_due bigint;
BEGIN
    FOR i IN 1 .. cardinality(p_names) LOOP
        paused := 0;
        outage := false;
        SELECT greatest(0, greatest(c.paused_until, c.outage_until,
            CASE WHEN c.outage_level > 0 THEN c.probe_until END) - v_now), c.outage_level > 0
        INTO paused, outage
        FROM {t:channels} AS c WHERE c.system = p_systems[i] AND c.name = p_names[i];
        paused := coalesce(paused, 0);
        outage := coalesce(outage, false);

        SELECT e.due INTO v_due FROM {t:entries} AS e
        WHERE e.channel = p_names[i] AND e.due >= p_froms[i] AND e.due <= v_now AND e.lease_until <= v_now
        ORDER BY e.due, e.id LIMIT 1;
        IF NOT FOUND THEN -- what is scheduled, and what of the oldest leased could lapse
            SELECT min(n.at) INTO v_due FROM (
                (SELECT e.due AS at FROM {t:entries} AS e
                 WHERE e.channel = p_names[i] AND e.due > v_now ORDER BY e.due, e.id LIMIT 1)
                UNION ALL
                (SELECT min(l.lease_until) FROM (
                    SELECT e.lease_until FROM {t:entries} AS e
                    WHERE e.channel = p_names[i] AND e.due >= p_froms[i] AND e.due <= v_now AND e.lease_until > v_now
                    ORDER BY e.due, e.id LIMIT 100) AS l)
            ) AS n;
        END IF;
        wait := CASE WHEN v_due IS NULL THEN -1 ELSE greatest(0, greatest(v_due, 0) - v_now, paused) END;
        RETURN NEXT;
    END LOOP;
END
$outbox$;
-- +goose StatementEnd

-- fence raises both sequences to the clock, and by ten thousand at least: a restored or failed-over
-- database must not give out again what was lost, and values drawn while this runs stay below.
-- +goose StatementBegin
CREATE FUNCTION {t:fence_1}() RETURNS TABLE (version bigint, token bigint)
LANGUAGE plpgsql VOLATILE
AS $outbox$
DECLARE
    v_now bigint := (date_part('epoch', clock_timestamp()) * 1000000)::bigint;
BEGIN
    PERFORM pg_advisory_xact_lock(hashtextextended({s:fence_1}, 0));
    version := setval({s:seq}::regclass, greatest(v_now, nextval({s:seq}::regclass) + 10000));
    token := setval({s:token_seq}::regclass, greatest(v_now, nextval({s:token_seq}::regclass) + 10000));
    RETURN NEXT;
END
$outbox$;
-- +goose StatementEnd

-- +goose Down

-- +goose StatementBegin
DROP FUNCTION {t:fence_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:look_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:extend_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:settle_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:claim_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:redraw_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP TABLE {t:channels};
-- +goose StatementEnd
-- +goose StatementBegin
DROP TABLE {t:entries};
-- +goose StatementEnd
-- +goose StatementBegin
DROP SEQUENCE {t:token_seq};
-- +goose StatementEnd
-- +goose StatementBegin
DROP SEQUENCE {t:seq};
-- +goose StatementEnd
-- +goose StatementBegin
DROP TABLE {t:meta};
-- +goose StatementEnd
