-- Latest state per key: one row per (channel, key) whose newest value has not been published yet.
--
-- Times are microseconds since the Unix epoch; read them with datetime(due / 1e6, 'unixepoch').
-- A lease_until of 0 means not leased yet, one below 0 that the last lease ended with that outcome:
-- -1 published, -2 retry, -3 released. STRICT: SQLite would keep a text in an integer column.

-- +goose Up

-- +goose StatementBegin
CREATE TABLE {t:meta} (
    version    INTEGER NOT NULL, -- of this schema
    compatible INTEGER NOT NULL  -- the oldest library schema version that works with it
) STRICT;
-- +goose StatementEnd

-- +goose StatementBegin
INSERT INTO {t:meta} (version, compatible) VALUES (1, 1);
-- +goose StatementEnd

-- The last version and the last fencing token given out. There is one writer, so a counter row
-- serves. Both start at the clock and keep up with it: sinks outlive this file.
-- +goose StatementBegin
CREATE TABLE {t:seq} (
    one     INTEGER PRIMARY KEY CHECK (one = 1),
    version INTEGER NOT NULL,
    token   INTEGER NOT NULL
) STRICT;
-- +goose StatementEnd

-- +goose StatementBegin
INSERT INTO {t:seq} (one, version, token)
SELECT 1, n.now, n.now FROM (SELECT CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER) AS now) AS n;
-- +goose StatementEnd

-- An id is the version with which its row was born, so ids are never used twice.
-- +goose StatementBegin
CREATE TABLE {t:entries} (
    id          INTEGER PRIMARY KEY,
    version     INTEGER NOT NULL,
    due         INTEGER NOT NULL,
    lease_until INTEGER NOT NULL DEFAULT 0,
    token       INTEGER NOT NULL DEFAULT 0,
    staged_at   INTEGER NOT NULL,
    attempt     INTEGER NOT NULL DEFAULT 0,
    tombstone   INTEGER NOT NULL,
    channel     TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    headers     TEXT    NOT NULL DEFAULT '', -- a JSON object of strings, or empty
    last_error  TEXT    NOT NULL DEFAULT '',
    payload     BLOB    NOT NULL,
    UNIQUE (channel, key)
) STRICT;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE INDEX {schema}.{i:entries_due_idx} ON {i:entries} (channel, due, id);
-- +goose StatementEnd

-- Whoever writes a version moves the counter on, so that staging one row is one statement.
-- +goose StatementBegin
CREATE TRIGGER {schema}.{i:entries_insert} AFTER INSERT ON {i:entries}
WHEN new.version > (SELECT version FROM {i:seq})
BEGIN
    UPDATE {i:seq} SET version = new.version;
END;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER {schema}.{i:entries_update} AFTER UPDATE OF version ON {i:entries}
WHEN new.version > (SELECT version FROM {i:seq})
BEGIN
    UPDATE {i:seq} SET version = new.version;
END;
-- +goose StatementEnd

-- What is inserted here deletes entries, one by one: a DELETE of a list would read the whole table
-- where it was small when ANALYZE saw it.
-- +goose StatementBegin
CREATE VIEW {schema}.{i:entries_gone} AS SELECT id FROM {i:entries} WHERE false;
-- +goose StatementEnd

-- +goose StatementBegin
CREATE TRIGGER {schema}.{i:entries_delete} INSTEAD OF INSERT ON {i:entries_gone}
BEGIN
    DELETE FROM {i:entries} WHERE id = new.id;
END;
-- +goose StatementEnd

-- Channels that an operator paused or whose destination is down; system 1 is latest, 2 is journal.
-- +goose StatementBegin
CREATE TABLE {t:channels} (
    system        INTEGER NOT NULL,
    name          TEXT    NOT NULL,
    paused_until  INTEGER NOT NULL DEFAULT 0, -- by an operator
    reason        TEXT    NOT NULL DEFAULT '',
    outage_until  INTEGER NOT NULL DEFAULT 0, -- when the next probe may go out
    outage_level  INTEGER NOT NULL DEFAULT 0, -- probes failed in a row; 0: the destination is up
    outage_reason TEXT    NOT NULL DEFAULT '',
    probe_until   INTEGER NOT NULL DEFAULT 0, -- the lease of the relay that probes
    probe_token   INTEGER NOT NULL DEFAULT 0, -- and its token
    PRIMARY KEY (system, name)
) STRICT, WITHOUT ROWID;
-- +goose StatementEnd

-- +goose Down

-- +goose StatementBegin
DROP TABLE {t:channels};
-- +goose StatementEnd
-- +goose StatementBegin
DROP VIEW {t:entries_gone};
-- +goose StatementEnd
-- +goose StatementBegin
DROP TABLE {t:entries};
-- +goose StatementEnd
-- +goose StatementBegin
DROP TABLE {t:seq};
-- +goose StatementEnd
-- +goose StatementBegin
DROP TABLE {t:meta};
-- +goose StatementEnd
