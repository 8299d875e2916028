-- The journal: one row per message, kept until it was delivered and for as long as its channel's
-- retention says, or until somebody decides.
--
-- outcome is 0 while a message is open, 1 sent, 4 dead, 5 unknown. A lease_until of 0 means not
-- leased, one below 0 that the last lease ended with that outcome: -1 sent, -2 retry, -3 released,
-- -4 dead, -5 unknown. Whether an open message is pending, failed or sending follows from
-- lease_until and attempt, so that a claim changes nothing that an index mentions.

-- +goose Up

-- A message's number is drawn from the versions' counter. Within a group it is the order of the Puts.
-- +goose StatementBegin
CREATE TABLE {t:messages} (
    seq          INTEGER PRIMARY KEY,
    outcome      INTEGER NOT NULL DEFAULT 0,
    due          INTEGER NOT NULL,
    lease_until  INTEGER NOT NULL DEFAULT 0,
    token        INTEGER NOT NULL DEFAULT 0,
    attempt      INTEGER NOT NULL DEFAULT 0,
    lapses       INTEGER NOT NULL DEFAULT 0, -- leases that lapsed in a row; 1 also where an attempt ended and nobody knows how
    created_at   INTEGER NOT NULL,
    completed_at INTEGER NOT NULL DEFAULT 0,
    channel      TEXT    NOT NULL,
    key          TEXT    NOT NULL,
    grp          TEXT    NOT NULL DEFAULT '',
    ref          TEXT    NOT NULL DEFAULT '',
    code         TEXT    NOT NULL DEFAULT '',
    last_error   TEXT    NOT NULL DEFAULT '',
    headers      TEXT    NOT NULL DEFAULT '', -- a JSON object of strings, or empty
    payload      BLOB    NOT NULL,
    UNIQUE (channel, key)
) STRICT;
-- +goose StatementEnd

-- What waits and has no order: a message that ends leaves it.
-- +goose StatementBegin
CREATE INDEX {schema}.{i:messages_due_idx} ON {i:messages} (channel, due, seq) WHERE outcome = 0 AND grp = '';
-- +goose StatementEnd

-- A group's open messages, and its ended ones, each in their order.
-- +goose StatementBegin
CREATE INDEX {schema}.{i:messages_group_idx} ON {i:messages} (channel, grp, outcome, seq) WHERE grp <> '';
-- +goose StatementEnd

-- What retention and purge look through.
-- +goose StatementBegin
CREATE INDEX {schema}.{i:messages_ended_idx} ON {i:messages} (channel, outcome, completed_at) WHERE outcome <> 0;
-- +goose StatementEnd

-- What waits for a decision, dead or unknown.
-- +goose StatementBegin
CREATE INDEX {schema}.{i:messages_parked_idx} ON {i:messages} (channel, seq) WHERE outcome > 1;
-- +goose StatementEnd

-- One row per group that has open messages, leased with its run under the same token. A group
-- that is blocked has the greatest due there is.
-- +goose StatementBegin
CREATE TABLE {t:groups} (
    channel     TEXT    NOT NULL,
    grp         TEXT    NOT NULL,
    due         INTEGER NOT NULL,
    lease_until INTEGER NOT NULL DEFAULT 0,
    token       INTEGER NOT NULL DEFAULT 0,
    run_end     INTEGER NOT NULL DEFAULT 0, -- the number of the last message leased with it
    gone        INTEGER NOT NULL DEFAULT 0, -- set to 1 to delete the row
    PRIMARY KEY (channel, grp)
) STRICT, WITHOUT ROWID;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE INDEX {schema}.{i:groups_due_idx} ON {i:groups} (channel, due, grp);
-- +goose StatementEnd

-- Whoever writes a message moves the counter on, and gives a group that had no open message its
-- row, due when its first one is, so that putting one message is one statement. One that is begun
-- is the first, and its group is leased with it.
-- +goose StatementBegin
CREATE TRIGGER {schema}.{i:messages_insert} AFTER INSERT ON {i:messages}
WHEN new.seq > (SELECT version FROM {i:seq})
BEGIN
    UPDATE {i:seq} SET version = new.seq;
END;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER {schema}.{i:messages_group} AFTER INSERT ON {i:messages} WHEN new.grp <> ''
BEGIN
    INSERT INTO {i:groups} (channel, grp, due, lease_until, token, run_end)
    VALUES (new.channel, new.grp, new.due, new.lease_until, new.token, new.seq)
    ON CONFLICT (channel, grp) DO NOTHING;
END;
-- +goose StatementEnd

-- A DELETE of a list of rows reads the whole table where ANALYZE has found it small, also when a
-- backlog has come since. These delete each row by its key, whatever was analysed: a message by
-- inserting into a view, a group by setting gone.
-- +goose StatementBegin
CREATE VIEW {schema}.{i:messages_gone} AS SELECT seq, key, grp FROM {i:messages} WHERE false;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER {schema}.{i:messages_delete} INSTEAD OF INSERT ON {i:messages_gone}
BEGIN
    DELETE FROM {i:messages} WHERE seq = new.seq;
END;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER {schema}.{i:groups_gone} AFTER UPDATE OF gone ON {i:groups} WHEN new.gone = 1
BEGIN
    DELETE FROM {i:groups} WHERE channel = old.channel AND grp = old.grp;
END;
-- +goose StatementEnd

-- +goose StatementBegin
UPDATE {t:meta} SET version = 2;
-- +goose StatementEnd

-- +goose Down

-- +goose StatementBegin
DROP VIEW {t:messages_gone};
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
