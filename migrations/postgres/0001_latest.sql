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
-- CACHE 1 (the default) is needed: values must be given out in the order in which they are asked for.
-- +goose StatementBegin
CREATE SEQUENCE {t:seq} AS bigint;
-- +goose StatementEnd
-- +goose StatementBegin
SELECT setval({s:seq}::regclass, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
-- +goose StatementEnd

-- Fencing tokens, one per claim. Staging compares with the last one given out, so here too CACHE 1.
-- +goose StatementBegin
CREATE SEQUENCE {t:token_seq} AS bigint;
-- +goose StatementEnd
-- +goose StatementBegin
SELECT setval({s:token_seq}::regclass, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
-- +goose StatementEnd

-- Half of each page stays free, and no index mentions what a claim changes (lease_until, token,
-- attempt): claims are then heap-only updates. "C" collation: a libc upgrade must not corrupt the
-- unique index. There is no surrogate id, whose index each Stage would pay for: a version is unique
-- in the database, and where a row was last seen (its ctid) is the quick way back to it.
-- +goose StatementBegin
CREATE TABLE {t:entries} (
    version     bigint  NOT NULL,
    due         bigint  NOT NULL,
    lease_until bigint  NOT NULL DEFAULT 0,
    token       bigint  NOT NULL, -- of the last lease; of a row never leased, the last one given out before it was staged
    staged_at   bigint  NOT NULL,
    attempt     integer NOT NULL DEFAULT 0,
    tombstone   boolean NOT NULL,
    channel     text COLLATE "C" NOT NULL,
    key         text COLLATE "C" NOT NULL,
    headers     text    NOT NULL DEFAULT '', -- a JSON object of strings, or empty
    last_error  text    NOT NULL DEFAULT '',
    payload     bytea   NOT NULL,
    CONSTRAINT {i:entries_pkey} PRIMARY KEY (channel, key)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- +goose StatementEnd

-- +goose StatementBegin
CREATE INDEX {i:entries_due_idx} ON {t:entries} (channel, due);
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
-- for a row, inside its own statement, where a claim may have come in between; see dialect.
-- +goose StatementBegin
CREATE FUNCTION {t:redraw_1}(p_place tid) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $outbox$
DECLARE
    v_version bigint;
BEGIN
    UPDATE {t:entries} AS e SET version = nextval({s:seq}::regclass) WHERE e.ctid = p_place
    RETURNING e.version INTO STRICT v_version;
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
RETURNS TABLE (key text, payload bytea, numbers text, words text)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now   bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_limit integer := p_limit;
    v_probe boolean := false;
    v_wait  bigint;
    v_rows  tid[];
    v_token bigint;
    v_same  text;
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
        ORDER BY e.due LIMIT v_limit
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
    v_same := concat_ws(' ', v_token, v_now + p_lease, coalesce(v_probe, false)::integer);
    RETURN QUERY
        UPDATE {t:entries} AS e SET lease_until = v_now + p_lease, token = v_token,
            attempt = least(e.attempt, 2147483646) + 1
        WHERE e.ctid = ANY (v_rows) -- locked, so they stay where they are
        RETURNING e.key, e.payload,
            concat_ws(' ', e.ctid, e.version, e.attempt, e.tombstone::integer, e.staged_at, e.due, v_same),
            CASE WHEN e.headers <> '' OR e.last_error <> '' THEN json_build_array(e.headers, e.last_error)::text END;
END
$outbox$;
-- +goose StatementEnd

-- settle ends leases and returns what is not simply done: 2 superseded, 3 stale, 4 busy. Outcomes
-- (null: all 1) are 1 published, 2 retry, 3 release; a row counts where key, version and token are
-- the caller's and its lease was not ended yet. What was published is looked for where the claim
-- left it, and then, like the others, by its key: staging and extending move rows. Locked rows are
-- skipped, not waited for: the first step passes over what has been locked or changed (xmax), rather
-- than pay for a lock of its own; who locks a row after that has it, and all, settled the second way.
-- The lateral sub-selects with their locking clause make every plan look rows up one by one.
-- +goose StatementBegin
CREATE FUNCTION {t:settle_1}(
    p_channel text, p_places tid[], p_keys text[], p_versions bigint[], p_tokens bigint[], p_outcomes smallint[],
    p_delays bigint[], p_errors text[], p_again boolean[], p_now bigint
) RETURNS TABLE (ord bigint, result smallint)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_generic_plan
SET lock_timeout = 1
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now   bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_done  bigint[]; -- versions: they are unique
    v_freed bigint[];
BEGIN
    BEGIN
        WITH gone AS (
            DELETE FROM {t:entries} AS e
            USING unnest(p_places, p_versions, p_tokens, p_outcomes) AS s (place, version, token, outcome)
            WHERE e.ctid = s.place AND e.version = s.version AND e.token = s.token AND e.lease_until > 0
                AND coalesce(s.outcome, 1) = 1 AND (e.xmax = e.xmin OR e.xmax = 0) -- the lock was the claim's, or is nobody's
            RETURNING e.version
        )
        SELECT array_agg(g.version) INTO v_done FROM gone AS g;
    EXCEPTION WHEN lock_not_available THEN
        v_done := NULL;
    END;
    IF cardinality(v_done) = cardinality(p_keys) THEN
        RETURN;
    END IF;
    v_done := coalesce(v_done, '{}');
    -- From here on no row is waited for. A moment may be, for room in a table that many write to.
    PERFORM set_config('lock_timeout', '5000', true);

    WITH held AS (
        SELECT l.ctid AS tid, coalesce(s.outcome, 1) AS outcome, s.delay, s.error
        FROM unnest(p_keys, p_versions, p_tokens, p_outcomes, p_delays, p_errors)
            AS s (key, version, token, outcome, delay, error)
        CROSS JOIN LATERAL (
            SELECT e.ctid FROM {t:entries} AS e
            WHERE e.channel = p_channel AND e.key = s.key AND e.version = s.version AND e.token = s.token AND e.lease_until > 0
            FOR UPDATE SKIP LOCKED
        ) AS l
        WHERE s.version <> ALL (v_done)
    ), gone AS (
        DELETE FROM {t:entries} AS e WHERE e.ctid = ANY (ARRAY(SELECT h.tid FROM held AS h WHERE h.outcome = 1))
        RETURNING e.version
    ), kept AS (
        UPDATE {t:entries} AS e SET
            lease_until = -h.outcome,
            due         = v_now + h.delay,
            attempt     = e.attempt - (h.outcome = 3)::integer,
            last_error  = CASE WHEN h.error = '' THEN e.last_error ELSE h.error END
        FROM held AS h
        WHERE e.ctid = h.tid AND h.outcome > 1
        RETURNING e.version
    )
    SELECT v_done || coalesce(array_agg(x.version), '{}') INTO v_done
    FROM (SELECT g.version FROM gone AS g UNION ALL SELECT k.version FROM kept AS k) AS x;
    IF cardinality(v_done) = cardinality(p_keys) THEN
        RETURN;
    END IF;

    -- Staged again while they were out: the new value stays due, the lease ends.
    WITH freed AS (
        UPDATE {t:entries} AS e SET lease_until = -h.outcome
        FROM (
            SELECT l.ctid AS tid, coalesce(s.outcome, 1) AS outcome, s.version
            FROM unnest(p_keys, p_versions, p_tokens, p_outcomes) AS s (key, version, token, outcome)
            CROSS JOIN LATERAL (
                SELECT e.ctid FROM {t:entries} AS e
                WHERE e.channel = p_channel AND e.key = s.key AND e.version <> s.version AND e.token = s.token AND e.lease_until > 0
                FOR UPDATE SKIP LOCKED
            ) AS l
            WHERE s.version <> ALL (v_done)
        ) AS h
        WHERE e.ctid = h.tid
        RETURNING h.version
    )
    SELECT coalesce(array_agg(f.version), '{}') INTO v_freed FROM freed AS f;

    -- The rest changed nothing. What is still under our token and lease was locked: busy.
    RETURN QUERY
        SELECT s.ord, (CASE
            WHEN s.version = ANY (v_freed) THEN 2
            WHEN e.version IS NULL OR e.lease_until = 0 -- gone, or gone and staged anew
                THEN CASE WHEN p_again[s.ord] THEN 1 ELSE 3 END
            WHEN e.token <> s.token THEN 3
            WHEN e.lease_until > 0 THEN 4
            WHEN e.lease_until = -coalesce(s.outcome, 1) THEN 1 -- the same again
            ELSE 3
        END)::smallint
        FROM unnest(p_keys, p_versions, p_tokens, p_outcomes) WITH ORDINALITY AS s (key, version, token, outcome, ord)
        LEFT JOIN LATERAL (
            SELECT e.version, e.token, e.lease_until FROM {t:entries} AS e
            WHERE e.channel = p_channel AND e.key = s.key OFFSET 0
        ) AS e ON true
        WHERE s.version <> ALL (v_done);
END
$outbox$;
-- +goose StatementEnd

-- extend lets leases end p_lease from now and returns the rows that it could not extend: 3 stale, 4 busy.
-- +goose StatementBegin
CREATE FUNCTION {t:extend_1}(p_channel text, p_keys text[], p_tokens bigint[], p_lease bigint, p_now bigint)
RETURNS TABLE (ord bigint, result smallint)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET jit = off SET plan_cache_mode = force_generic_plan
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now  bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_done text[];
BEGIN
    WITH extended AS (
        UPDATE {t:entries} AS e SET lease_until = v_now + p_lease WHERE e.ctid = ANY (ARRAY(
            SELECT l.ctid
            FROM unnest(p_keys, p_tokens) AS s (key, token)
            CROSS JOIN LATERAL (
                SELECT e.ctid FROM {t:entries} AS e
                WHERE e.channel = p_channel AND e.key = s.key AND e.token = s.token AND e.lease_until > 0
                FOR UPDATE SKIP LOCKED
            ) AS l
        )) RETURNING e.key
    )
    SELECT coalesce(array_agg(x.key), '{}') INTO v_done FROM extended AS x;
    IF cardinality(v_done) = cardinality(p_keys) THEN
        RETURN;
    END IF;
    RETURN QUERY
        SELECT s.ord, (CASE WHEN e.token = s.token AND e.lease_until > 0 THEN 4 ELSE 3 END)::smallint
        FROM unnest(p_keys, p_tokens) WITH ORDINALITY AS s (key, token, ord)
        LEFT JOIN LATERAL (
            SELECT e.token, e.lease_until FROM {t:entries} AS e WHERE e.channel = p_channel AND e.key = s.key OFFSET 0
        ) AS e ON true
        WHERE s.key <> ALL (v_done);
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
SET jit = off SET plan_cache_mode = force_generic_plan
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
        ORDER BY e.due LIMIT 1;
        IF NOT FOUND THEN -- what is scheduled, and what of the oldest leased could lapse
            SELECT min(n.at) INTO v_due FROM (
                (SELECT e.due AS at FROM {t:entries} AS e
                 WHERE e.channel = p_names[i] AND e.due > v_now ORDER BY e.due LIMIT 1)
                UNION ALL
                (SELECT min(l.lease_until) FROM (
                    SELECT e.lease_until FROM {t:entries} AS e
                    WHERE e.channel = p_names[i] AND e.due >= p_froms[i] AND e.due <= v_now AND e.lease_until > v_now
                    ORDER BY e.due LIMIT 100) AS l)
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
