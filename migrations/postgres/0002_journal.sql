-- The journal: one row per message, kept until it was delivered and for as long as its channel's
-- retention says, or until somebody decides.
--
-- outcome is 0 while a message is open, 1 sent, 4 dead, 5 unknown. A lease_until of 0 means not
-- leased yet, one below 0 that the last lease ended with that outcome: -1 sent, -2 retry,
-- -3 released, -4 dead, -5 unknown. Whether an open message is pending, failed or sending follows
-- from lease_until and attempt, so that a claim changes nothing that an index mentions.

-- +goose Up

-- A message's number, seq, is drawn from the versions' sequence. It has no index of its own, which
-- each Put would pay for. Settings as for entries.
-- +goose StatementBegin
CREATE TABLE {t:messages} (
    seq          bigint   NOT NULL, -- unique; within a group in the order of the commits of the Puts
    due          bigint   NOT NULL,
    lease_until  bigint   NOT NULL DEFAULT 0,
    token        bigint   NOT NULL DEFAULT 0,
    created_at   bigint   NOT NULL,
    completed_at bigint   NOT NULL DEFAULT 0,
    attempt      integer  NOT NULL DEFAULT 0,
    outcome      smallint NOT NULL DEFAULT 0,
    lapses       smallint NOT NULL DEFAULT 0, -- leases that lapsed in a row; 1 also where an attempt ended and nobody knows how
    channel      text COLLATE "C" NOT NULL,
    key          text COLLATE "C" NOT NULL,
    grp          text COLLATE "C" NOT NULL DEFAULT '',
    ref          text     NOT NULL DEFAULT '',
    code         text     NOT NULL DEFAULT '',
    last_error   text     NOT NULL DEFAULT '',
    headers      text     NOT NULL DEFAULT '', -- a JSON object of strings, or empty
    payload      bytea    NOT NULL,
    CONSTRAINT {i:messages_pkey} PRIMARY KEY (channel, key)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- +goose StatementEnd

-- What waits and has no order.
-- +goose StatementBegin
CREATE INDEX {i:messages_due_idx} ON {t:messages} (channel, due, seq) WHERE outcome = 0 AND grp = '';
-- +goose StatementEnd

-- A group's open messages, its dead and its unknown ones, each in their order.
-- +goose StatementBegin
CREATE INDEX {i:messages_group_idx} ON {t:messages} (channel, grp, outcome, seq) WHERE outcome <> 1 AND grp <> '';
-- +goose StatementEnd

-- What retention and purge look through. The last condition, always true, keeps the index out of
-- plans that do not name it: while it is small the planner would like it, or the next one, better
-- than the groups' own to find out whether something has ended in a group.
-- +goose StatementBegin
CREATE INDEX {i:messages_ended_idx} ON {t:messages} (channel, outcome, completed_at) WHERE outcome <> 0 AND completed_at > 0;
-- +goose StatementEnd

-- What waits for a person.
-- +goose StatementBegin
CREATE INDEX {i:messages_parked_idx} ON {t:messages} (channel, seq) WHERE outcome > 1 AND seq > 0;
-- +goose StatementEnd

-- One row for each group with a message that is not sent. Put locks it until its transaction ends,
-- so that the order of the locks is the order of the numbers and of the commits. It is leased with
-- a run of the group's messages, under their token. due is when to look at the group next: one less
-- than the greatest bigint where it has ended messages only, the greatest while it is blocked.
-- +goose StatementBegin
CREATE TABLE {t:groups} (
    due         bigint NOT NULL,
    lease_until bigint NOT NULL DEFAULT 0,
    token       bigint NOT NULL DEFAULT 0,
    run_end     bigint NOT NULL DEFAULT 0, -- the number of the last message that is leased with it
    channel     text COLLATE "C" NOT NULL,
    grp         text COLLATE "C" NOT NULL,
    CONSTRAINT {i:groups_pkey} PRIMARY KEY (channel, grp)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
-- +goose StatementEnd

-- +goose StatementBegin
CREATE INDEX {i:groups_due_idx} ON {t:groups} (channel, due, grp);
-- +goose StatementEnd

-- put writes the messages whose keys are new: all that come in several with groups, or begun, and
-- what the plain insert of the same statement found to exist. Then p_seqs tells the others' numbers,
-- and p_fresh whether the insert before it made its one group a row, or changed it. It returns a JSON
-- array [ordinal, whether it differs, its columns] for each that existed, then a last row
-- 'created_at;token;numbers', with nothing for the numbers of those, or '!' where a group forbids to
-- begin. One column, since each costs the plain insert, which has the same. A row that vanished
-- between the insert and the look at it is tried again.
-- +goose StatementBegin
CREATE FUNCTION {t:put_1}(
    p_channel text, p_keys text[], p_groups text[], p_payloads bytea[], p_headers text[], p_delays bigint[],
    p_begin bigint, p_seqs bigint[], p_fresh boolean, p_now bigint
) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $outbox$
DECLARE
    v_now   bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_token bigint := 0;
    v_seqs  bigint[] := coalesce(p_seqs, array_fill(NULL::bigint, ARRAY[cardinality(p_keys)]));
    v_drawn bigint[];
    v_put   bigint[];
    v_fresh text[] := CASE WHEN p_fresh THEN p_groups END;     -- groups that had no row
    v_woken text[] := CASE WHEN NOT p_fresh THEN p_groups END; -- groups that had one and no open message
    v_left  integer;
    v_found integer;
BEGIN
    IF p_groups IS NOT NULL AND p_seqs IS NULL THEN
        -- The lock, also of a row that is left as it is, waits for every Put into the group to end.
        WITH locked AS (
            INSERT INTO {t:groups} AS g (channel, grp, due)
            SELECT p_channel, f.grp, v_now + f.delay
            FROM (
                SELECT DISTINCT ON (s.grp COLLATE "C") s.grp, s.delay
                FROM unnest(p_groups, p_delays) WITH ORDINALITY AS s (grp, delay, ord)
                WHERE s.grp <> '' ORDER BY s.grp COLLATE "C", s.ord
            ) AS f
            ORDER BY f.grp COLLATE "C"
            ON CONFLICT (channel, grp) DO UPDATE SET due = excluded.due WHERE g.due = 9223372036854775806
            RETURNING g.grp, g.xmax = 0 AS fresh
        )
        SELECT array_agg(l.grp) FILTER (WHERE l.fresh), array_agg(l.grp) FILTER (WHERE NOT l.fresh) INTO v_fresh, v_woken FROM locked AS l;
        v_now := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    END IF;

    IF p_begin > 0 THEN
        -- Above READ COMMITTED what others put into a group that has a row may be invisible.
        IF EXISTS (
            SELECT FROM (
                SELECT s.grp, row_number() OVER (PARTITION BY s.grp ORDER BY s.ord) AS n
                FROM unnest(p_keys, p_groups) WITH ORDINALITY AS s (key, grp, ord)
                WHERE s.grp <> '' AND NOT EXISTS (SELECT FROM {t:messages} AS m WHERE m.channel = p_channel AND m.key = s.key OFFSET 0)
            ) AS s
            WHERE s.n > 1
                OR EXISTS (SELECT FROM {t:groups} AS g WHERE g.channel = p_channel AND g.grp = s.grp AND g.lease_until > v_now OFFSET 0)
                OR EXISTS (SELECT FROM {t:messages} AS m
                    WHERE m.channel = p_channel AND m.grp = s.grp AND m.outcome <> 1 AND m.grp <> '' OFFSET 0)
                OR s.grp <> ALL (coalesce(v_fresh, '{}')) AND current_setting('transaction_isolation') <> 'read committed'
        ) THEN
            RETURN NEXT '!';
            RETURN;
        END IF;
        v_token := nextval({s:token_seq}::regclass);
    END IF;

    FOR v_round IN 0 .. 2147483646 LOOP
        IF v_round > 0 OR p_seqs IS NULL THEN
            v_drawn := ARRAY(SELECT CASE WHEN s.seq IS NULL THEN nextval({s:seq}::regclass) END FROM unnest(v_seqs) AS s (seq));
            WITH put AS (
                INSERT INTO {t:messages} AS m
                    (seq, channel, key, grp, due, lease_until, token, attempt, created_at, headers, payload)
                SELECT s.seq, p_channel, s.key, coalesce(s.grp, ''), v_now + CASE WHEN p_begin > 0 THEN 0 ELSE s.delay END,
                    CASE WHEN p_begin > 0 THEN v_now + p_begin ELSE 0 END, v_token, (p_begin > 0)::integer, v_now, s.headers, s.payload
                FROM unnest(v_drawn, p_keys, p_groups, p_payloads, p_headers, p_delays) AS s (seq, key, grp, payload, headers, delay)
                WHERE s.seq IS NOT NULL ORDER BY s.key COLLATE "C"
                ON CONFLICT (channel, key) DO NOTHING
                RETURNING m.seq
            )
            SELECT array_agg(p.seq ORDER BY p.seq) INTO v_put FROM put AS p;
            IF cardinality(v_put) = cardinality(p_keys) THEN
                v_seqs := v_put;
            ELSE
                v_seqs := ARRAY(
                    SELECT coalesce(s.seq, (SELECT s.drawn WHERE s.drawn = ANY (v_put)))
                    FROM unnest(v_seqs, v_drawn) WITH ORDINALITY AS s (seq, drawn, ord) ORDER BY s.ord
                );
            END IF;
        END IF;

        v_left := cardinality(array_positions(v_seqs, NULL));
        EXIT WHEN v_left = 0;
        RETURN QUERY
            SELECT json_build_array(s.ord, m.payload <> s.payload OR m.grp <> coalesce(s.grp, ''), json_build_array(
                0, m.key, m.seq, m.token, m.attempt, encode(m.payload, 'base64'), m.headers, m.created_at, m.due, m.lease_until,
                m.last_error, m.grp, m.outcome, m.completed_at, m.ref, m.code, m.lapses))::text
            FROM unnest(v_seqs, p_keys, p_groups, p_payloads) WITH ORDINALITY AS s (seq, key, grp, payload, ord)
            CROSS JOIN LATERAL (
                SELECT m.* FROM {t:messages} AS m WHERE m.channel = p_channel AND m.key = s.key OFFSET 0
            ) AS m
            WHERE s.seq IS NULL;
        GET DIAGNOSTICS v_found = ROW_COUNT;
        EXIT WHEN v_found = v_left;
    END LOOP;

    -- What existed, perhaps elsewhere, has no say in when a group is due.
    IF v_left > 0 AND (v_fresh IS NOT NULL OR v_woken IS NOT NULL) THEN
        UPDATE {t:groups} AS g SET due = coalesce((
            SELECT v_now + s.delay FROM unnest(v_seqs, p_groups, p_delays) WITH ORDINALITY AS s (seq, grp, delay, ord)
            WHERE s.grp = g.grp AND s.seq IS NOT NULL ORDER BY s.ord LIMIT 1
        ), 9223372036854775806)
        WHERE g.channel = p_channel AND g.grp = ANY (v_fresh || v_woken);
        DELETE FROM {t:groups} AS g WHERE g.channel = p_channel AND g.grp = ANY (v_fresh) AND g.due = 9223372036854775806;
    END IF;
    IF p_begin > 0 AND p_groups IS NOT NULL THEN
        UPDATE {t:groups} AS g SET due = v_now, lease_until = v_now + p_begin, token = v_token, run_end = s.seq
        FROM unnest(v_seqs, p_groups) AS s (seq, grp)
        WHERE g.channel = p_channel AND g.grp = s.grp AND s.grp <> '' AND s.seq IS NOT NULL;
    END IF;
    RETURN NEXT v_now || ';' || v_token || ';' || array_to_string(v_seqs, ',', '');
END
$outbox$;
-- +goose StatementEnd

-- regroup decides when to look next at groups whose rows the caller has locked: after a settlement
-- or a change by hand (p_block null), or after a claim that found nothing to lease in them, with
-- p_block where an ended message blocks. A group whose holder still has a message keeps its lease.
-- A group let go is due from now on, not from when its messages were due: groups take turns. Like
-- let_go and runs it is called by functions of this file only, and runs under their settings.
-- +goose StatementBegin
CREATE FUNCTION {t:regroup_1}(p_groups tid[], p_block boolean, p_now bigint) RETURNS void
LANGUAGE plpgsql VOLATILE
AS $outbox$
BEGIN
    WITH found AS (
        SELECT g.ctid AS tid,
            CASE WHEN g.lease_until > 0 AND h.seq <= g.run_end THEN
                CASE WHEN h.token = g.token AND h.lease_until > p_now THEN h.lease_until ELSE (
                    SELECT m.lease_until FROM {t:messages} AS m
                    WHERE m.channel = g.channel AND m.grp = g.grp AND m.outcome = 0 AND m.grp <> ''
                        AND m.seq > h.seq AND m.seq <= g.run_end AND m.token = g.token AND m.lease_until > p_now
                    ORDER BY m.seq LIMIT 1
                ) END
            END AS lease_until,
            CASE
                WHEN h.seq IS NULL THEN
                    CASE WHEN EXISTS (
                        SELECT FROM {t:messages} AS m
                        WHERE m.channel = g.channel AND m.grp = g.grp AND m.outcome > 1 AND m.outcome <> 1 AND m.grp <> '' OFFSET 0
                    ) THEN 9223372036854775806 END
                WHEN p_block AND {t:ended_1}(g.channel, g.grp) < h.seq THEN 9223372036854775807
                WHEN p_block IS NULL THEN greatest(h.due, h.lease_until, p_now)
                ELSE greatest(h.due, h.lease_until, least(g.due, p_now))
            END AS due
        FROM {t:groups} AS g
        LEFT JOIN LATERAL (
            SELECT m.seq, m.due, m.token, m.lease_until FROM {t:messages} AS m
            WHERE m.channel = g.channel AND m.grp = g.grp AND m.outcome = 0 AND m.grp <> '' ORDER BY m.seq LIMIT 1
        ) AS h ON true
        WHERE g.ctid = ANY (p_groups)
    ), gone AS (
        DELETE FROM {t:groups} AS g
        WHERE g.ctid = ANY (ARRAY(SELECT f.tid FROM found AS f WHERE f.due IS NULL AND f.lease_until IS NULL))
    )
    UPDATE {t:groups} AS g SET
        due         = CASE WHEN f.lease_until IS NULL THEN f.due ELSE g.due END,
        lease_until = coalesce(f.lease_until, 0)
    FROM found AS f WHERE g.ctid = f.tid AND (f.due IS NOT NULL OR f.lease_until IS NOT NULL);
END
$outbox$;
-- +goose StatementEnd

-- ended is the number of the first dead or unknown message of a group, or null.
-- +goose StatementBegin
CREATE FUNCTION {t:ended_1}(p_channel text, p_group text) RETURNS bigint
LANGUAGE plpgsql VOLATILE
AS $outbox$
DECLARE
    v_dead    bigint;
    v_unknown bigint;
BEGIN
    SELECT m.seq INTO v_dead FROM {t:messages} AS m
    WHERE m.channel = p_channel AND m.grp = p_group AND m.outcome = 4 AND m.grp <> '' ORDER BY m.seq LIMIT 1;
    SELECT m.seq INTO v_unknown FROM {t:messages} AS m
    WHERE m.channel = p_channel AND m.grp = p_group AND m.outcome = 5 AND m.grp <> '' ORDER BY m.seq LIMIT 1;
    RETURN least(v_dead, v_unknown);
END
$outbox$;
-- +goose StatementEnd

-- let_go ends the leases of groups under tokens, unless a message of theirs is still leased, and
-- returns the groups that it could not look at, because a Put has them locked.
-- +goose StatementBegin
CREATE FUNCTION {t:let_go_1}(p_channel text, p_groups text[], p_tokens bigint[], p_now bigint) RETURNS SETOF text
LANGUAGE plpgsql VOLATILE
AS $outbox$
DECLARE
    v_held  tid[];
    v_names text[];
BEGIN
    SELECT coalesce(array_agg(l.tid), '{}'), coalesce(array_agg(s.grp), '{}') INTO v_held, v_names
    FROM unnest(p_groups, p_tokens) AS s (grp, token)
    CROSS JOIN LATERAL (
        SELECT g.ctid AS tid FROM {t:groups} AS g
        WHERE g.channel = p_channel AND g.grp = s.grp AND g.token = s.token AND g.lease_until > 0
        FOR UPDATE SKIP LOCKED
    ) AS l;
    -- A new statement: it sees what every Put that had the lock before us has committed.
    IF cardinality(v_held) > 0 THEN
        PERFORM {t:regroup_1}(v_held, NULL, p_now);
    END IF;
    IF cardinality(v_held) < cardinality(p_groups) THEN
        RETURN QUERY
            SELECT s.grp FROM unnest(p_groups, p_tokens) AS s (grp, token)
            WHERE s.grp <> ALL (v_names) AND EXISTS (
                SELECT FROM {t:groups} AS g
                WHERE g.channel = p_channel AND g.grp = s.grp AND g.token = s.token AND g.lease_until > 0 OFFSET 0
            );
    END IF;
END
$outbox$;
-- +goose StatementEnd

-- runs locks the first messages of groups that the caller has locked, up to p_limit in all, as far as
-- they can go out now: not past one that is not due, leased, locked, or after one that ended in
-- its group, unless p_skip. It looks again later at groups that have none. alone: the run is the
-- first message of the first group, which is to be claimed alone; with p_alone, it may be.
-- +goose StatementBegin
CREATE FUNCTION {t:runs_1}(p_groups tid[], p_limit integer, p_alone boolean, p_skip boolean, p_now bigint)
RETURNS TABLE (leased tid[], ends bigint[], run tid[], alone boolean)
LANGUAGE plpgsql VOLATILE
AS $outbox$
DECLARE
    v_each integer := greatest(1, p_limit / cardinality(p_groups));
BEGIN
    WITH head AS MATERIALIZED (
        SELECT n.tid AS grp, n.ord, m.ctid AS tid, m.seq, m.lease_until > 0 AND m.lapses > 0 AS alone,
            m.due <= p_now AND m.lease_until <= p_now AND coalesce(m.seq < e.seq, true) AS fit
        FROM unnest(p_groups) WITH ORDINALITY AS n (tid, ord)
        CROSS JOIN LATERAL (
            SELECT g.channel, g.grp FROM {t:groups} AS g WHERE g.ctid = n.tid
        ) AS g
        CROSS JOIN LATERAL (
            SELECT CASE WHEN NOT p_skip AND EXISTS (
                SELECT FROM {t:messages} AS m
                WHERE m.channel = g.channel AND m.grp = g.grp AND m.outcome > 1 AND m.outcome <> 1 AND m.grp <> '' OFFSET 0
            ) THEN {t:ended_1}(g.channel, g.grp) END AS seq
        ) AS e
        CROSS JOIN LATERAL (
            SELECT m.ctid, m.seq, m.due, m.lease_until, m.lapses FROM {t:messages} AS m
            WHERE m.channel = g.channel AND m.grp = g.grp AND m.outcome = 0 AND m.grp <> '' ORDER BY m.seq LIMIT v_each
        ) AS m
    ), held AS MATERIALIZED (
        SELECT h.grp, h.ord, h.seq, h.alone, l.tid
        FROM head AS h
        LEFT JOIN LATERAL (
            SELECT m.ctid AS tid FROM {t:messages} AS m
            WHERE h.fit AND m.ctid = h.tid AND m.outcome = 0 AND m.due <= p_now AND m.lease_until <= p_now
            FOR UPDATE SKIP LOCKED
        ) AS l ON true
    ), lone AS (
        SELECT x.grp, x.seq, x.tid
        FROM (SELECT h.* FROM held AS h WHERE h.ord = 1 ORDER BY h.seq LIMIT 1) AS x
        WHERE p_alone AND x.alone AND x.tid IS NOT NULL
    ), picked AS MATERIALIZED (
        SELECT p.grp, p.seq, p.tid
        FROM (
            SELECT h.*, bool_and(h.tid IS NOT NULL AND NOT h.alone) OVER (PARTITION BY h.ord ORDER BY h.seq) AS runs FROM held AS h
        ) AS p
        WHERE p.runs AND NOT EXISTS (SELECT FROM lone)
        UNION ALL
        SELECT l.grp, l.seq, l.tid FROM lone AS l
    ), ended AS (
        SELECT array_agg(x.grp) AS grp, array_agg(x.run_end) AS run_end
        FROM (SELECT p.grp, max(p.seq) AS run_end FROM picked AS p GROUP BY p.grp) AS x
    )
    SELECT e.grp, e.run_end, (SELECT array_agg(p.tid) FROM picked AS p), EXISTS (SELECT FROM lone)
    INTO leased, ends, run, alone FROM ended AS e;

    IF NOT alone AND cardinality(p_groups) > coalesce(cardinality(leased), 0) THEN
        PERFORM {t:regroup_1}(ARRAY(SELECT unnest(p_groups) EXCEPT SELECT unnest(leased)), NOT p_skip, p_now);
    END IF;
    RETURN NEXT;
END
$outbox$;
-- +goose StatementEnd

-- claim_messages leases up to p_limit due messages under a fresh token: of those without a group, in
-- the order in which they came due, and runs of groups, which get half where there are both. A
-- group's row is locked first, then a new statement reads its messages, so that none is overlooked.
-- reached is the due time of the last group that was leased. A message whose leases lapsed twice
-- in a row is claimed alone: it may be what kills its holders. See claim_1 for the rest.
-- numbers are place, seq, attempt, created_at, due, lapses, token, lease_until, probe, reached; words
-- headers, last_error, ref, code.
-- +goose StatementBegin
CREATE FUNCTION {t:claim_messages_1}(
    p_channel text, p_limit integer, p_lease bigint, p_from bigint, p_from_group bigint, p_full boolean, p_skip boolean, p_now bigint
) RETURNS TABLE (key text, grp text, payload bytea, numbers text, words text)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now     bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_limit   integer := p_limit;
    v_probe   boolean := false;
    v_wait    bigint;
    v_token   bigint;
    v_rows    tid[];
    v_alone   tid[];    -- those of v_rows to be claimed alone
    v_until   bigint;   -- the bound of the groups' due times
    v_share   integer;  -- the most that groups get
    v_due     bigint := p_from_group; -- of the last group that was looked at
    v_grp     text := '';
    v_ask     integer;
    v_found   tid[];
    v_got     integer;
    v_groups  tid[] := '{}';    -- those with a run
    v_ends    bigint[] := '{}'; -- the numbers of the runs' last messages
    v_run     tid[] := '{}';
    v_only    boolean;          -- the run is the head of the first group, to be claimed alone
    v_reached bigint := 0;
    v_same    text;
BEGIN
    SELECT greatest(c.paused_until, c.outage_until, CASE WHEN c.outage_level > 0 THEN c.probe_until END),
        c.outage_level > 0
    INTO v_wait, v_probe
    FROM {t:channels} AS c WHERE c.system = 2 AND c.name = p_channel;
    IF v_wait > v_now THEN
        RETURN;
    END IF;
    IF v_probe THEN
        v_limit := 1;
    END IF;

    SELECT array_agg(x.tid), array_agg(x.tid) FILTER (WHERE x.alone), CASE WHEN v_limit = 1 THEN least(min(x.due), v_now) ELSE v_now END
    INTO v_rows, v_alone, v_until
    FROM (
        SELECT m.ctid AS tid, m.due, m.lease_until > 0 AND m.lapses > 0 AS alone FROM {t:messages} AS m
        WHERE m.channel = p_channel AND m.due >= p_from AND m.due <= v_now AND m.lease_until <= v_now
            AND m.outcome = 0 AND m.grp = ''
        ORDER BY m.due, m.seq LIMIT v_limit
        FOR UPDATE SKIP LOCKED
    ) AS x;
    v_rows := coalesce(v_rows, '{}');
    IF v_alone IS NULL OR v_rows[1] <> v_alone[1] THEN
        IF v_alone IS NOT NULL THEN -- another time
            v_rows := ARRAY(SELECT r.tid FROM unnest(v_rows) AS r (tid) WHERE r.tid <> ALL (v_alone));
        END IF;
        v_share := greatest(v_limit / 2, v_limit - cardinality(v_rows), (v_limit = 1)::integer);
        IF p_full AND p_skip THEN -- blocked before somebody chose to skip
            UPDATE {t:groups} AS g SET due = v_now WHERE g.ctid = ANY (ARRAY(
                SELECT g.ctid FROM {t:groups} AS g
                WHERE g.channel = p_channel AND g.due = 9223372036854775807 AND g.lease_until <= v_now
                ORDER BY g.due, g.grp LIMIT 1000
                FOR UPDATE SKIP LOCKED
            ));
        END IF;
        v_ask := greatest(1, v_share / 8); -- at first: longer runs cost less
        FOR v_round IN 1 .. 20 LOOP -- past short runs, and groups that are blocked
            SELECT array_agg(x.tid), (array_agg(x.due))[v_ask], (array_agg(x.grp))[v_ask] INTO v_found, v_due, v_grp
            FROM (
                SELECT g.ctid AS tid, g.due, g.grp FROM {t:groups} AS g
                WHERE g.channel = p_channel AND (g.due, g.grp) > (v_due, v_grp) AND g.due <= v_until AND g.lease_until <= v_now
                ORDER BY g.due, g.grp LIMIT v_ask
                FOR UPDATE SKIP LOCKED
            ) AS x;
            EXIT WHEN v_found IS NULL;
            SELECT v_groups || x.leased, v_ends || x.ends, v_run || x.run, coalesce(cardinality(x.run), 0), x.alone
            INTO v_groups, v_ends, v_run, v_got, v_only
            FROM {t:runs_1}(v_found, v_share, v_round = 1, p_skip, v_now) AS x;
            v_share := v_share - v_got;
            EXIT WHEN v_only OR v_share < 1 OR cardinality(v_found) < v_ask;
            v_ask := CASE WHEN v_got > 0 THEN least(v_share, (v_share * v_ask + v_got - 1) / v_got) ELSE v_share END;
        END LOOP;
        IF v_only THEN
            v_rows := v_run;
        ELSE
            v_rows := v_rows[1 : v_limit - cardinality(v_run)] || v_run;
        END IF;
    ELSE
        v_rows := v_alone[1:1];
    END IF;
    IF cardinality(v_rows) = 0 THEN
        RETURN;
    END IF;
    IF v_probe THEN -- one caller in the fleet
        PERFORM 1 FROM {t:channels} AS c
        WHERE c.system = 2 AND c.name = p_channel AND c.outage_level > 0
            AND greatest(c.paused_until, c.outage_until, c.probe_until) <= v_now
        FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN;
        END IF;
        UPDATE {t:channels} AS c SET probe_until = v_now + p_lease WHERE c.system = 2 AND c.name = p_channel;
    END IF;

    v_token := nextval({s:token_seq}::regclass);
    IF cardinality(v_run) > 0 THEN
        WITH leased AS (
            UPDATE {t:groups} AS g SET lease_until = v_now + p_lease, token = v_token, run_end = s.run_end
            FROM unnest(v_groups, v_ends) AS s (tid, run_end)
            WHERE g.ctid = s.tid
            RETURNING g.due
        )
        SELECT max(l.due) INTO v_reached FROM leased AS l;
    END IF;
    v_same := concat_ws(' ', v_token, v_now + p_lease, coalesce(v_probe, false)::integer, v_reached);
    RETURN QUERY
        UPDATE {t:messages} AS m SET lease_until = v_now + p_lease, token = v_token,
            -- A lapse in company gives its attempt back.
            attempt = least(m.attempt, 2147483646) + (m.lease_until <= 0 OR m.lapses > 1)::integer,
            lapses = least(m.lapses, 32766) + (m.lease_until > 0)::integer
        WHERE m.ctid = ANY (v_rows) -- locked, so they stay where they are
        RETURNING m.key, m.grp, m.payload,
            concat_ws(' ', m.ctid, m.seq, m.attempt, m.created_at, m.due, m.lapses, v_same),
            CASE WHEN m.headers <> '' OR m.last_error <> '' OR m.ref <> '' OR m.code <> ''
                THEN json_build_array(m.headers, m.last_error, m.ref, m.code)::text END;
END
$outbox$;
-- +goose StatementEnd

-- begin_message leases one message that is neither leased nor ended, due or not, and its group. It
-- returns a row with a result: 1 begun, 4 busy, 5 not found, 6 in another state, 7 blocked.
-- +goose StatementBegin
CREATE FUNCTION {t:begin_message_1}(p_channel text, p_key text, p_lease bigint, p_now bigint)
RETURNS TABLE (
    result smallint,
    place tid, key text, seq bigint, token bigint, attempt integer, payload bytea, headers text, created_at bigint,
    due bigint, lease_until bigint, last_error text, grp text, outcome smallint, completed_at bigint, ref text,
    code text, lapses smallint
)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now   bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_token bigint;
    v_row   record;
    v_group record;
    v_place tid;
BEGIN
    result := 4;
    SELECT m.seq, m.grp, m.outcome, m.lease_until INTO v_row
    FROM {t:messages} AS m WHERE m.channel = p_channel AND m.key = p_key;
    IF NOT FOUND THEN
        result := 5;
    ELSIF v_row.outcome <> 0 OR v_row.lease_until > 0 THEN
        result := 6;
    ELSIF v_row.grp <> '' THEN
        SELECT g.lease_until INTO v_group
        FROM {t:groups} AS g WHERE g.channel = p_channel AND g.grp = v_row.grp FOR UPDATE SKIP LOCKED;
        IF NOT FOUND THEN
            RETURN NEXT; -- a Put has it
            RETURN;
        END IF;
        IF v_group.lease_until > v_now OR EXISTS (
            SELECT FROM {t:messages} AS m
            WHERE m.channel = p_channel AND m.grp = v_row.grp AND m.grp <> '' AND m.outcome IN (0, 4, 5) AND m.seq < v_row.seq
        ) THEN
            result := 7;
        END IF;
    END IF;
    IF result = 4 THEN
        SELECT m.ctid INTO v_place FROM {t:messages} AS m
        WHERE m.channel = p_channel AND m.key = p_key AND m.seq = v_row.seq AND m.outcome = 0 AND m.lease_until <= 0
        FOR UPDATE SKIP LOCKED;
    END IF;
    IF v_place IS NULL THEN
        RETURN NEXT;
        RETURN;
    END IF;

    v_token := nextval({s:token_seq}::regclass);
    IF v_row.grp <> '' THEN
        UPDATE {t:groups} AS g SET due = least(g.due, v_now), lease_until = v_now + p_lease, token = v_token, run_end = v_row.seq
        WHERE g.channel = p_channel AND g.grp = v_row.grp;
    END IF;
    -- It is due by now: once its lease has lapsed nothing else may keep it.
    RETURN QUERY
        UPDATE {t:messages} AS m SET lease_until = v_now + p_lease, token = v_token, due = least(m.due, v_now),
            attempt = least(m.attempt, 2147483646) + 1
        WHERE m.ctid = v_place
        RETURNING 1::smallint, m.ctid, m.key, m.seq, m.token, m.attempt, m.payload, m.headers, m.created_at, m.due, m.lease_until,
            m.last_error, m.grp, m.outcome, m.completed_at, m.ref, m.code, m.lapses;
END
$outbox$;
-- +goose StatementEnd

-- settle_messages ends leases and returns what is not simply done: 3 stale, 4 busy. Outcomes (null:
-- all 1) are 1 sent (the message goes, or stays where p_keep), 2 retry, 3 release, 4 dead, 5 unknown;
-- p_doubts say of 2 and 3 whether nobody knows how an attempt ended: 0 as before, 1 nobody, 2 it is known;
-- the arrays beside them may be null. A message counts where key and token are the caller's and
-- its lease was not ended yet. One that is settled while its group is locked is busy: its group's
-- lease is to be ended by the same settlement again. See settle_1 for the rest.
-- +goose StatementBegin
CREATE FUNCTION {t:settle_messages_1}(
    p_channel text, p_places tid[], p_keys text[], p_groups text[], p_tokens bigint[], p_outcomes smallint[],
    p_delays bigint[], p_errors text[], p_refs text[], p_codes text[], p_doubts smallint[], p_again boolean[], p_keep boolean, p_now bigint
) RETURNS TABLE (ord bigint, result smallint)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan SET lock_timeout = 1
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now     bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_ords    bigint[]; -- of what is settled
    v_groups  text[];   -- theirs
    v_rest    bigint[];
    v_results smallint[];
    v_theirs  text[];
    v_busy    text[];
BEGIN
    -- Most are sent, lie where the claim left them, and were locked by nobody since; see settle_1.
    BEGIN
        IF p_keep THEN
            WITH done AS (
                UPDATE {t:messages} AS m SET outcome = 1, completed_at = v_now, lease_until = -1, lapses = 0, ref = coalesce(s.ref, '')
                FROM unnest(p_places, p_keys, p_tokens, p_outcomes, p_refs) WITH ORDINALITY AS s (place, key, token, outcome, ref, ord)
                WHERE m.ctid = s.place AND m.channel = p_channel AND m.key = s.key AND m.token = s.token
                    AND m.outcome = 0 AND m.lease_until > 0 AND coalesce(s.outcome, 1) = 1 AND (m.xmax = m.xmin OR m.xmax = 0)
                RETURNING s.ord, m.grp
            )
            SELECT array_agg(d.ord), array_agg(d.grp) INTO v_ords, v_groups FROM done AS d;
        ELSE
            WITH done AS (
                DELETE FROM {t:messages} AS m
                USING unnest(p_places, p_keys, p_tokens, p_outcomes) WITH ORDINALITY AS s (place, key, token, outcome, ord)
                WHERE m.ctid = s.place AND m.channel = p_channel AND m.key = s.key AND m.token = s.token
                    AND m.outcome = 0 AND m.lease_until > 0 AND coalesce(s.outcome, 1) = 1 AND (m.xmax = m.xmin OR m.xmax = 0)
                RETURNING s.ord, m.grp
            )
            SELECT array_agg(d.ord), array_agg(d.grp) INTO v_ords, v_groups FROM done AS d;
        END IF;
    EXCEPTION WHEN lock_not_available THEN
        v_ords := NULL;
    END;
    v_ords := coalesce(v_ords, '{}');
    -- From here on no row is waited for. A moment may be, for room in a table that many write to.
    PERFORM set_config('lock_timeout', '5000', true);

    IF cardinality(v_ords) < cardinality(p_keys) THEN
        WITH held AS (
            SELECT l.ctid AS tid, s.ord, coalesce(s.outcome, 1::smallint) AS outcome, coalesce(s.delay, 0) AS delay,
                coalesce(s.error, '') AS error, coalesce(s.ref, '') AS ref, coalesce(s.code, '') AS code, coalesce(s.doubt, 0) AS doubt
            FROM unnest(p_keys, p_tokens, p_outcomes, p_delays, p_errors, p_refs, p_codes, p_doubts) WITH ORDINALITY
                AS s (key, token, outcome, delay, error, ref, code, doubt, ord)
            CROSS JOIN LATERAL (
                SELECT m.ctid FROM {t:messages} AS m
                WHERE m.channel = p_channel AND m.key = s.key AND m.token = s.token AND m.outcome = 0 AND m.lease_until > 0
                FOR UPDATE SKIP LOCKED
            ) AS l
            WHERE s.ord <> ALL (v_ords)
        ), gone AS (
            DELETE FROM {t:messages} AS m USING held AS h
            WHERE m.ctid = h.tid AND h.outcome = 1 AND NOT p_keep
            RETURNING h.ord, m.grp
        ), kept AS (
            UPDATE {t:messages} AS m SET
                lease_until  = -h.outcome,
                lapses       = CASE WHEN h.outcome > 3 OR h.outcome = 1 OR h.doubt = 2 THEN 0 WHEN h.doubt = 1 THEN 1 ELSE least(m.lapses, 1) END,
                outcome      = CASE WHEN h.outcome IN (2, 3) THEN 0 ELSE h.outcome END,
                completed_at = CASE WHEN h.outcome IN (2, 3) THEN 0 ELSE v_now END,
                due          = CASE WHEN h.outcome IN (2, 3) THEN v_now + h.delay ELSE m.due END,
                attempt      = greatest(0, m.attempt - (h.outcome = 3)::integer),
                ref          = CASE WHEN h.outcome = 1 THEN h.ref ELSE m.ref END,
                code         = CASE WHEN h.error = '' AND h.code = '' THEN m.code ELSE h.code END,
                last_error   = CASE WHEN h.error = '' THEN m.last_error ELSE h.error END
            FROM held AS h
            WHERE m.ctid = h.tid AND (h.outcome > 1 OR p_keep)
            RETURNING h.ord, m.grp
        )
        SELECT v_ords || array_agg(x.ord), v_groups || array_agg(x.grp) INTO v_ords, v_groups
        FROM (SELECT g.* FROM gone AS g UNION ALL SELECT k.* FROM kept AS k) AS x;
    END IF;

    IF cardinality(v_ords) < cardinality(p_keys) THEN
        -- The rest changed nothing. What is still under our token and lease was locked: busy.
        SELECT array_agg(x.ord), array_agg(x.result), array_agg(x.grp) INTO v_rest, v_results, v_theirs
        FROM (
            SELECT s.ord, coalesce(nullif(m.grp, ''), s.grp, '') AS grp, (CASE
                WHEN m.seq IS NULL THEN CASE WHEN s.again THEN 1 ELSE 3 END
                WHEN m.token <> s.token THEN 3
                WHEN m.outcome = 0 AND m.lease_until > 0 THEN 4
                WHEN m.lease_until = -coalesce(s.outcome, 1) THEN 1 -- the same again
                ELSE 3
            END)::smallint AS result
            FROM unnest(p_keys, p_groups, p_tokens, p_outcomes, p_again) WITH ORDINALITY AS s (key, grp, token, outcome, again, ord)
            LEFT JOIN LATERAL (
                SELECT m.seq, m.grp, m.token, m.outcome, m.lease_until FROM {t:messages} AS m
                WHERE m.channel = p_channel AND m.key = s.key OFFSET 0
            ) AS m ON true
            WHERE s.ord <> ALL (v_ords)
        ) AS x;
        RETURN QUERY SELECT r.ord, r.result FROM unnest(v_rest, v_results) AS r (ord, result) WHERE r.result <> 1;
        SELECT v_ords || array_agg(r.ord), v_groups || array_agg(r.grp) INTO v_ords, v_groups
        FROM unnest(v_rest, v_results, v_theirs) AS r (ord, result, grp) WHERE r.result = 1;
    END IF;

    IF '' <> ANY (v_groups) THEN
        v_busy := ARRAY(
            SELECT b.grp FROM (
                SELECT array_agg(x.grp) AS groups, array_agg(x.token) AS tokens FROM (
                    SELECT DISTINCT d.grp, p_tokens[d.ord::integer] AS token FROM unnest(v_ords, v_groups) AS d (ord, grp) WHERE d.grp <> ''
                ) AS x
            ) AS a
            CROSS JOIN LATERAL {t:let_go_1}(p_channel, a.groups, a.tokens, v_now) AS b (grp)
        );
        RETURN QUERY SELECT d.ord, 4::smallint FROM unnest(v_ords, v_groups) AS d (ord, grp) WHERE d.grp = ANY (v_busy);
    END IF;
END
$outbox$;
-- +goose StatementEnd

-- extend_messages lets leases end p_lease from now, those of the groups too, and returns the
-- messages that it could not extend: 3 stale, 4 busy. A group that is locked needs no more than its
-- messages' leases: a claim goes by them. What is left of a run whose group another relay has taken
-- since is stale, or two runs of the group would be out.
-- +goose StatementBegin
CREATE FUNCTION {t:extend_messages_1}(p_channel text, p_keys text[], p_tokens bigint[], p_lease bigint, p_now bigint)
RETURNS TABLE (ord bigint, result smallint)
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now    bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_ords   bigint[];
    v_groups text[];
BEGIN
    WITH extended AS (
        UPDATE {t:messages} AS m SET lease_until = v_now + p_lease
        FROM (
            SELECT l.ctid AS tid, s.ord
            FROM unnest(p_keys, p_tokens) WITH ORDINALITY AS s (key, token, ord)
            CROSS JOIN LATERAL (
                SELECT m.ctid FROM {t:messages} AS m
                WHERE m.channel = p_channel AND m.key = s.key AND m.token = s.token AND m.outcome = 0 AND m.lease_until > 0
                    AND (m.grp = '' OR EXISTS (
                        SELECT FROM {t:groups} AS g WHERE g.channel = p_channel AND g.grp = m.grp AND g.token = s.token OFFSET 0
                    ))
                FOR UPDATE SKIP LOCKED
            ) AS l
        ) AS h
        WHERE m.ctid = h.tid
        RETURNING h.ord, m.grp
    )
    SELECT coalesce(array_agg(x.ord), '{}'), array_agg(x.grp) INTO v_ords, v_groups FROM extended AS x;
    IF '' <> ANY (v_groups) THEN
        UPDATE {t:groups} AS g SET lease_until = v_now + p_lease WHERE g.ctid = ANY (ARRAY(
            SELECT l.ctid
            FROM (
                SELECT DISTINCT d.grp, p_tokens[d.ord::integer] AS token FROM unnest(v_ords, v_groups) AS d (ord, grp) WHERE d.grp <> ''
            ) AS s
            CROSS JOIN LATERAL (
                SELECT g.ctid FROM {t:groups} AS g
                WHERE g.channel = p_channel AND g.grp = s.grp AND g.token = s.token
                FOR UPDATE SKIP LOCKED
            ) AS l
        ));
    END IF;
    IF cardinality(v_ords) < cardinality(p_keys) THEN
        RETURN QUERY
            SELECT s.ord, (CASE WHEN m.ours THEN 4 ELSE 3 END)::smallint
            FROM unnest(p_keys, p_tokens) WITH ORDINALITY AS s (key, token, ord)
            LEFT JOIN LATERAL (
                SELECT m.token = s.token AND m.outcome = 0 AND m.lease_until > 0 AND (m.grp = '' OR EXISTS (
                    SELECT FROM {t:groups} AS g WHERE g.channel = p_channel AND g.grp = m.grp AND g.token = s.token OFFSET 0
                )) AS ours
                FROM {t:messages} AS m WHERE m.channel = p_channel AND m.key = s.key OFFSET 0
            ) AS m ON true
            WHERE s.ord <> ALL (v_ords);
    END IF;
END
$outbox$;
-- +goose StatementEnd

-- amend does to messages what a person asked and returns to how many: 1 retry, 2 discard, 3 sent,
-- 4 dead, 5 pending. It skips those that are in another state by now or locked, and those of groups
-- that are locked, whose turn it could not see to.
-- +goose StatementBegin
CREATE FUNCTION {t:amend_1}(p_channel text, p_keys text[], p_groups text[], p_action smallint, p_ref text, p_now bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $outbox$
DECLARE
    v_now    bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_groups tid[];
    v_names  text[];
    v_held   tid[];
BEGIN
    SELECT array_agg(l.ctid), array_agg(n.grp) INTO v_groups, v_names
    FROM (SELECT DISTINCT s.grp FROM unnest(p_groups) AS s (grp) WHERE s.grp <> '') AS n
    CROSS JOIN LATERAL (
        SELECT g.ctid FROM {t:groups} AS g WHERE g.channel = p_channel AND g.grp = n.grp FOR UPDATE SKIP LOCKED
    ) AS l;
    v_held := ARRAY(
        SELECT l.ctid FROM unnest(p_keys) AS s (key)
        CROSS JOIN LATERAL (
            SELECT m.ctid FROM {t:messages} AS m
            WHERE m.channel = p_channel AND m.key = s.key
                AND (m.grp = '' OR m.outcome = 1 OR m.grp = ANY (v_names))
                AND CASE p_action
                    WHEN 1 THEN m.outcome > 1 OR m.outcome = 0 AND m.lease_until <= 0 AND m.attempt > 0
                    WHEN 2 THEN true
                    ELSE m.outcome = 5
                END
            FOR UPDATE SKIP LOCKED
        ) AS l
    );
    IF p_action = 2 THEN
        DELETE FROM {t:messages} AS m WHERE m.ctid = ANY (v_held);
    ELSE
        UPDATE {t:messages} AS m SET
            outcome      = CASE p_action WHEN 3 THEN 1 WHEN 4 THEN 4 ELSE 0 END,
            completed_at = CASE WHEN p_action IN (3, 4) THEN v_now ELSE 0 END,
            due          = CASE WHEN p_action IN (1, 5) THEN v_now ELSE m.due END,
            lease_until  = CASE p_action WHEN 3 THEN -1 WHEN 4 THEN -4 ELSE 0 END,
            token        = 0, -- no holder's settlement is the same
            attempt      = CASE p_action WHEN 1 THEN 0 ELSE m.attempt END,
            lapses       = CASE WHEN p_action = 1 AND m.outcome = 0 THEN m.lapses ELSE 0 END,
            ref          = CASE p_action WHEN 3 THEN p_ref ELSE m.ref END
        WHERE m.ctid = ANY (v_held);
    END IF;
    IF cardinality(v_groups) > 0 THEN
        PERFORM {t:regroup_1}(v_groups, NULL, v_now);
    END IF;
    RETURN coalesce(cardinality(v_held), 0);
END
$outbox$;
-- +goose StatementEnd

-- purge deletes up to p_limit messages with outcomes that ended before p_before or, where that is 0,
-- p_age ago, those that ended first, and returns how many. Locked ones are skipped, and those whose
-- group is locked.
-- +goose StatementBegin
CREATE FUNCTION {t:purge_1}(p_channel text, p_outcomes smallint[], p_before bigint, p_age bigint, p_limit integer, p_now bigint)
RETURNS bigint
LANGUAGE plpgsql VOLATILE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $outbox$
DECLARE
    v_now    bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_before bigint := coalesce(nullif(p_before, 0), v_now - p_age);
    v_held   tid[];
    v_theirs text[];
    v_groups tid[];
    v_names  text[];
    v_count  bigint;
BEGIN
    SELECT array_agg(x.tid), array_agg(CASE WHEN x.outcome > 1 THEN x.grp ELSE '' END) INTO v_held, v_theirs
    FROM (
        SELECT l.* FROM unnest(p_outcomes) AS o (outcome)
        CROSS JOIN LATERAL (
            SELECT m.ctid AS tid, m.grp, m.outcome, m.completed_at FROM {t:messages} AS m
            WHERE m.channel = p_channel AND m.outcome = o.outcome AND m.outcome <> 0 AND m.completed_at > 0 AND m.completed_at < v_before
            ORDER BY m.completed_at LIMIT p_limit
            FOR UPDATE SKIP LOCKED
        ) AS l
        ORDER BY l.completed_at LIMIT p_limit
    ) AS x;
    IF v_held IS NULL THEN
        RETURN 0;
    END IF;
    SELECT array_agg(l.ctid), array_agg(n.grp) INTO v_groups, v_names
    FROM (SELECT DISTINCT s.grp FROM unnest(v_theirs) AS s (grp) WHERE s.grp <> '') AS n
    CROSS JOIN LATERAL (
        SELECT g.ctid FROM {t:groups} AS g WHERE g.channel = p_channel AND g.grp = n.grp FOR UPDATE SKIP LOCKED
    ) AS l;
    DELETE FROM {t:messages} AS m WHERE m.ctid = ANY (ARRAY(
        SELECT h.tid FROM unnest(v_held, v_theirs) AS h (tid, grp) WHERE h.grp = '' OR h.grp = ANY (v_names)
    ));
    GET DIAGNOSTICS v_count = ROW_COUNT;
    IF cardinality(v_groups) > 0 THEN
        PERFORM {t:regroup_1}(v_groups, NULL, v_now);
    END IF;
    RETURN v_count;
END
$outbox$;
-- +goose StatementEnd

-- look tells for each channel when to claim next, in microseconds from now: 0 now, -1 nothing waits.
-- look_1, which knows no messages, stays for replicas that do not either.
-- +goose StatementBegin
CREATE FUNCTION {t:look_2}(p_systems smallint[], p_names text[], p_froms bigint[], p_from_groups bigint[], p_now bigint)
RETURNS TABLE (wait bigint, paused bigint, outage boolean)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $outbox$
DECLARE
    v_now bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_due bigint;
BEGIN
    FOR i IN 1 .. cardinality(p_names) LOOP
        IF p_systems[i] = 1 THEN
            SELECT l.wait, l.paused, l.outage INTO wait, paused, outage
            FROM {t:look_1}(p_systems[i:i], p_names[i:i], p_froms[i:i], p_now) AS l;
            RETURN NEXT;
            CONTINUE;
        END IF;
        paused := 0;
        outage := false;
        SELECT greatest(0, greatest(c.paused_until, c.outage_until,
            CASE WHEN c.outage_level > 0 THEN c.probe_until END) - v_now), c.outage_level > 0
        INTO paused, outage
        FROM {t:channels} AS c WHERE c.system = 2 AND c.name = p_names[i];
        paused := coalesce(paused, 0);
        outage := coalesce(outage, false);

        SELECT m.due INTO v_due FROM {t:messages} AS m
        WHERE m.channel = p_names[i] AND m.due >= p_froms[i] AND m.due <= v_now AND m.lease_until <= v_now
            AND m.outcome = 0 AND m.grp = ''
        ORDER BY m.due, m.seq LIMIT 1;
        IF NOT FOUND THEN
            SELECT g.due INTO v_due FROM {t:groups} AS g
            WHERE g.channel = p_names[i] AND g.due >= p_from_groups[i] AND g.due <= v_now AND g.lease_until <= v_now
            ORDER BY g.due, g.grp LIMIT 1;
        END IF;
        IF NOT FOUND THEN -- what is scheduled, and what of the oldest leased could lapse
            SELECT min(n.at) INTO v_due FROM (
                (SELECT m.due AS at FROM {t:messages} AS m
                 WHERE m.channel = p_names[i] AND m.due > v_now AND m.outcome = 0 AND m.grp = '' ORDER BY m.due, m.seq LIMIT 1)
                UNION ALL
                (SELECT min(l.lease_until) FROM (
                    SELECT m.lease_until FROM {t:messages} AS m
                    WHERE m.channel = p_names[i] AND m.due >= p_froms[i] AND m.due <= v_now AND m.lease_until > v_now
                        AND m.outcome = 0 AND m.grp = ''
                    ORDER BY m.due, m.seq LIMIT 100) AS l)
                UNION ALL
                (SELECT g.due FROM {t:groups} AS g
                 WHERE g.channel = p_names[i] AND g.due > v_now AND g.due < 9223372036854775806 ORDER BY g.due, g.grp LIMIT 1)
                UNION ALL
                (SELECT min(l.lease_until) FROM (
                    SELECT g.lease_until FROM {t:groups} AS g
                    WHERE g.channel = p_names[i] AND g.due >= p_from_groups[i] AND g.due <= v_now AND g.lease_until > v_now
                    ORDER BY g.due, g.grp LIMIT 100) AS l)
            ) AS n;
        END IF;
        wait := CASE WHEN v_due IS NULL THEN -1 ELSE greatest(0, greatest(v_due, 0) - v_now, paused) END;
        RETURN NEXT;
    END LOOP;
END
$outbox$;
-- +goose StatementEnd

-- stats counts what each channel holds, to at most p_limit of each kind, so that its cost does not
-- grow with the backlog; it hops from channel to channel along an index. Of messages in groups that
-- are due it looks at p_limit, and what it tells of attempts is from a sample. A function too: a
-- statement's plan could be compiled, which takes a hundred times as long as to run it.
-- +goose StatementBegin
CREATE FUNCTION {t:stats_1}(p_limit integer, p_now bigint)
RETURNS TABLE (
    system smallint, name text, due bigint, scheduled bigint, leased bigint, blocked bigint, dead bigint, unknown bigint,
    age bigint, attempt integer, last_error text, paused bigint, outage boolean, reason text
)
LANGUAGE plpgsql STABLE
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_sort = off
SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $outbox$
#variable_conflict use_column
DECLARE
    v_now      bigint := coalesce(p_now, (date_part('epoch', clock_timestamp()) * 1000000)::bigint);
    v_systems  boolean[]; -- which may be looked at
    v_latest   text[];
    v_journals text[];
    v_system   smallint;
    v_name     text;
    v_oldest   bigint;
    v_first    bigint;
    v_more     bigint[];
BEGIN
    -- A role that is there for one system only may not look at the other.
    v_systems := ARRAY[has_table_privilege({s:entries}, 'SELECT'), has_table_privilege({s:messages}, 'SELECT')];
    IF v_systems[1] THEN
        v_latest := ARRAY(
            WITH RECURSIVE held (name) AS (
                (SELECT e.channel FROM {t:entries} AS e ORDER BY e.channel LIMIT 1)
                UNION ALL
                SELECT (SELECT e.channel FROM {t:entries} AS e WHERE e.channel > h.name ORDER BY e.channel LIMIT 1)
                FROM held AS h WHERE h.name IS NOT NULL
            )
            SELECT h.name FROM held AS h WHERE h.name IS NOT NULL
        );
    END IF;
    IF v_systems[2] THEN
        v_journals := ARRAY(
            WITH RECURSIVE kept (name) AS (
                (SELECT m.channel FROM {t:messages} AS m ORDER BY m.channel LIMIT 1)
                UNION ALL
                SELECT (SELECT m.channel FROM {t:messages} AS m WHERE m.channel > k.name ORDER BY m.channel LIMIT 1)
                FROM kept AS k WHERE k.name IS NOT NULL
            )
            SELECT k.name FROM kept AS k WHERE k.name IS NOT NULL
        );
    END IF;
    FOR v_system, v_name IN
        SELECT 1::smallint, unnest(v_latest)
        UNION SELECT 2::smallint, unnest(v_journals)
        UNION SELECT c.system, c.name FROM {t:channels} AS c
        WHERE c.system > 0 AND v_systems[c.system] AND (c.paused_until > 0 OR c.outage_level > 0)
    LOOP
        system := v_system;
        name := v_name;
        blocked := 0;
        dead := 0;
        unknown := 0;
        attempt := 0;
        last_error := '';
        IF v_system = 1 THEN
            SELECT count(*), min(x.due) INTO due, v_oldest FROM (
                SELECT e.due FROM {t:entries} AS e
                WHERE e.channel = v_name AND e.due <= v_now AND e.lease_until <= v_now ORDER BY e.due LIMIT p_limit
            ) AS x;
            SELECT count(*) INTO scheduled FROM (
                SELECT FROM {t:entries} AS e WHERE e.channel = v_name AND e.due > v_now ORDER BY e.due LIMIT p_limit
            ) AS x;
            SELECT count(*) INTO leased FROM (
                SELECT e.lease_until FROM {t:entries} AS e WHERE e.channel = v_name AND e.due <= v_now ORDER BY e.due LIMIT p_limit
            ) AS x WHERE x.lease_until > v_now;
            SELECT x.attempt, x.last_error INTO attempt, last_error FROM (
                (SELECT e.attempt, e.last_error FROM {t:entries} AS e WHERE e.channel = v_name ORDER BY e.due LIMIT 1000)
                UNION ALL
                (SELECT e.attempt, e.last_error FROM {t:entries} AS e WHERE e.channel = v_name ORDER BY e.due DESC LIMIT 1000)
            ) AS x ORDER BY x.attempt DESC, x.last_error DESC LIMIT 1;
        ELSE
            -- Without a group, then in groups to look at by now, then in those to look at later.
            SELECT count(*), min(x.due) INTO due, v_oldest FROM (
                SELECT m.due FROM {t:messages} AS m
                WHERE m.channel = v_name AND m.due <= v_now AND m.lease_until <= v_now AND m.outcome = 0 AND m.grp = ''
                ORDER BY m.due, m.seq LIMIT p_limit
            ) AS x;
            SELECT count(*) INTO scheduled FROM (
                SELECT FROM {t:messages} AS m
                WHERE m.channel = v_name AND m.due > v_now AND m.outcome = 0 AND m.grp = '' ORDER BY m.due, m.seq LIMIT p_limit
            ) AS x;
            SELECT count(*) INTO leased FROM (
                SELECT m.lease_until FROM {t:messages} AS m
                WHERE m.channel = v_name AND m.due <= v_now AND m.outcome = 0 AND m.grp = '' ORDER BY m.due, m.seq LIMIT p_limit
            ) AS x WHERE x.lease_until > v_now;
            SELECT ARRAY[
                count(*) FILTER (WHERE x.lease_until <= v_now AND x.due <= v_now),
                count(*) FILTER (WHERE x.lease_until <= v_now AND x.due > v_now),
                count(*) FILTER (WHERE x.lease_until > v_now)
            ] INTO v_more FROM (
                SELECT o.due, o.lease_until FROM {t:groups} AS g
                CROSS JOIN LATERAL (
                    SELECT m.due, m.lease_until FROM {t:messages} AS m
                    WHERE m.channel = v_name AND m.grp = g.grp AND m.outcome = 0 AND m.grp <> '' ORDER BY m.seq LIMIT p_limit
                ) AS o
                WHERE g.channel = v_name AND g.due <= v_now ORDER BY g.due, g.grp LIMIT p_limit
            ) AS x;
            due := least(due + v_more[1], p_limit);
            leased := least(leased + v_more[3], p_limit);
            SELECT least(scheduled + v_more[2] + count(*), p_limit) INTO scheduled FROM (
                SELECT FROM {t:groups} AS g
                CROSS JOIN LATERAL (
                    SELECT FROM {t:messages} AS m
                    WHERE m.channel = v_name AND m.grp = g.grp AND m.outcome = 0 AND m.grp <> '' ORDER BY m.seq LIMIT p_limit
                ) AS o
                WHERE g.channel = v_name AND g.due > v_now AND g.due < 9223372036854775806 ORDER BY g.due, g.grp LIMIT p_limit
            ) AS x;
            SELECT g.due INTO v_first FROM {t:groups} AS g
            WHERE g.channel = v_name AND g.due <= v_now AND g.lease_until <= v_now ORDER BY g.due, g.grp LIMIT 1;
            v_oldest := least(v_oldest, v_first);
            SELECT count(*) INTO blocked FROM (
                SELECT FROM {t:groups} AS g WHERE g.channel = v_name AND g.due = 9223372036854775807 ORDER BY g.due, g.grp LIMIT p_limit
            ) AS x;
            SELECT count(*) INTO dead FROM (
                SELECT FROM {t:messages} AS m
                WHERE m.channel = v_name AND m.outcome = 4 AND m.outcome <> 0 AND m.completed_at > 0 ORDER BY m.completed_at LIMIT p_limit
            ) AS x;
            SELECT count(*) INTO unknown FROM (
                SELECT FROM {t:messages} AS m
                WHERE m.channel = v_name AND m.outcome = 5 AND m.outcome <> 0 AND m.completed_at > 0 ORDER BY m.completed_at LIMIT p_limit
            ) AS x;
            -- What waits longest for its next attempt, and what ended last without success.
            SELECT x.attempt, x.last_error INTO attempt, last_error FROM (
                (SELECT m.attempt, m.last_error FROM {t:messages} AS m
                 WHERE m.channel = v_name AND m.outcome = 0 AND m.grp = '' ORDER BY m.due DESC, m.seq DESC LIMIT 1000)
                UNION ALL
                (SELECT o.attempt, o.last_error FROM {t:groups} AS g
                 CROSS JOIN LATERAL (
                     SELECT m.attempt, m.last_error FROM {t:messages} AS m
                     WHERE m.channel = v_name AND m.grp = g.grp AND m.outcome = 0 AND m.grp <> '' ORDER BY m.seq LIMIT 1
                 ) AS o
                 WHERE g.channel = v_name ORDER BY g.due DESC, g.grp DESC LIMIT 1000)
                UNION ALL
                (SELECT m.attempt, m.last_error FROM {t:messages} AS m
                 WHERE m.channel = v_name AND m.outcome > 1 AND m.seq > 0 ORDER BY m.seq DESC LIMIT 1000)
            ) AS x ORDER BY x.attempt DESC, x.last_error DESC LIMIT 1;
        END IF;
        age := CASE WHEN v_oldest IS NULL THEN 0 ELSE v_now - greatest(v_oldest, 0) END;
        attempt := coalesce(attempt, 0);
        last_error := coalesce(last_error, '');
        SELECT greatest(0, c.paused_until - v_now, c.outage_until - v_now), c.outage_level > 0 AND c.paused_until <= v_now,
            CASE WHEN c.paused_until > v_now THEN c.reason WHEN c.outage_level > 0 THEN c.outage_reason END
        INTO paused, outage, reason
        FROM {t:channels} AS c WHERE c.system = v_system AND c.name = v_name;
        paused := coalesce(paused, 0);
        outage := coalesce(outage, false);
        reason := coalesce(reason, '');
        RETURN NEXT;
    END LOOP;
END
$outbox$;
-- +goose StatementEnd

-- +goose StatementBegin
UPDATE {t:meta} SET version = 2;
-- +goose StatementEnd

-- +goose Down

-- +goose StatementBegin
DROP FUNCTION {t:stats_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:look_2};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:purge_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:amend_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:extend_messages_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:settle_messages_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:begin_message_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:claim_messages_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:runs_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:let_go_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:regroup_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:ended_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP FUNCTION {t:put_1};
-- +goose StatementEnd
-- +goose StatementBegin
DROP TABLE {t:groups};
-- +goose StatementEnd
-- +goose StatementBegin
DROP TABLE {t:messages};
-- +goose StatementEnd
-- +goose StatementBegin
UPDATE {t:meta} SET version = 1;
-- +goose StatementEnd
