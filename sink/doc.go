// Package sink keeps the newest version of each key in an SQL table, however
// late and however often older versions arrive.
//
// # What is promised
//
// A row is written only if its version is greater than the one the table has of
// its key: the comparison and the write are one statement, and hold between any
// number of writers in any number of processes. The same version again changes
// nothing, so a publication may be repeated freely. A deleted key leaves a
// tombstone with its version, which turns older versions away like a value does.
//
// # What is not
//
// Versions say nothing across two outbox databases, nor across two channels:
// one table serves one channel of one database, or has the channel in its keys.
// A tombstone that was purged protects no longer, see [Sink.Purge]. A row that
// some other program writes is not guarded.
//
// # In a publish function
//
//	rows[i], err = sink.JSON(e.Key, e.Version, e.Deleted, e.Value) // for each entry e
//	…
//	_, err = s.Apply(ctx, rows)
//	return err
//
// That is correct; the example "Publish" adds that a row whose values the table
// refuses is failed alone ([RowsError]), and that a table which does not fit
// ([ErrTable]) pauses the channel.
//
// The Postgres statements are for pgx: database/sql with pgx/v5/stdlib, or
// stdlib.OpenDBFromPool of a pool you have, in any query mode.
//
// # A table of your own
//
// [Options] names its columns, and Options.Columns spreads a JSON payload over
// typed ones. It needs a unique index on the key, a version, and a time of
// deletion that readers look at:
//
//	ALTER TABLE accounts ADD COLUMN version bigint, ADD COLUMN deleted_at timestamptz;
//	CREATE INDEX ON accounts (deleted_at) WHERE deleted_at IS NOT NULL;
//	SELECT … FROM accounts WHERE deleted_at IS NULL;
//
// For what Options cannot say, guard your statement yourself. The same text
// serves both databases (SQLite: with VALUES in place of unnest):
//
//	INSERT INTO accounts AS have (tenant, id, name, version, deleted_at)
//	SELECT * FROM unnest($1::bigint[], $2::uuid[], $3::text[], $4::bigint[], $5::timestamptz[])
//	ON CONFLICT (tenant, id) DO UPDATE
//	SET name = excluded.name, version = excluded.version, deleted_at = excluded.deleted_at
//	WHERE coalesce(have.version, 0) < excluded.version
//
// Five rules make it right. Compare in the statement, never in Go between a
// SELECT and an UPDATE. Set the version with the values. Keep a deleted key as a
// row. Give a key once in a statement, with its highest version (Postgres raises
// 21000 otherwise), and keys in one order (relays deadlock otherwise). Take no
// row changed for success: a newer one is there.
//
// # Redis
//
// One hash per key, one script, which Redis runs without interruption. Versions
// stay below 2^53, so Lua's numbers compare them exactly.
//
//	-- KEYS[1]: key; ARGV: version, "1" if deleted, value, how long a tombstone is kept in ms
//	local have = tonumber(redis.call('HGET', KEYS[1], 'version') or '0')
//	if have >= tonumber(ARGV[1]) then
//	  return 0
//	end
//	redis.call('HSET', KEYS[1], 'version', ARGV[1])
//	if ARGV[2] == '1' then
//	  redis.call('HDEL', KEYS[1], 'value')
//	  redis.call('PEXPIRE', KEYS[1], ARGV[4])
//	else
//	  redis.call('HSET', KEYS[1], 'value', ARGV[3])
//	  redis.call('PERSIST', KEYS[1])
//	end
//	return 1
//
// Both answers are success. A reader takes HGET key value; nil is absent or
// deleted. A key must not expire, a tombstone too early, nor be evicted
// (maxmemory-policy noeviction): the version goes with it. A failover that loses
// acknowledged writes loses them here too; WAIT narrows that.
//
// # HTTP
//
// Send the version with every request, and let the receiver compare: it answers
// 2xx where it applied the state, and 409 or 412 where it has this version or a
// newer one, which the sender takes for success. A receiver of your own needs no
// more than [Sink.Apply]; the example "Http" has both ends. Send an
// Idempotency-Key made of key and version to a receiver that knows such keys: a
// repetition is then recognised, but a regression is not, so it replaces no
// comparison. Take 409 for success only where you know that it means this.
//
// A receiver that has only entity tags is written to like an object store.
//
// # Object stores
//
// Read the version an object has, stop if it is not older, and write on
// condition that the object is still the one that was read; if it is not, begin
// again. The example "ObjectStore" is that loop. The condition is
//
//	S3:    If-Match: <ETag>, or If-None-Match: * for a new one (412; 409 under contention: again)
//	GCS:   ifGenerationMatch=<generation>, 0 for a new one
//	Azure: If-Match: <ETag>, or If-None-Match: * for a new one
//
// On S3 an ETag may be a hash of the content: two versions with the same content
// have the same one, and metadata does not change it. Keep the version inside
// the body (metadata may hold a copy), or the condition lets an older version
// replace a newer one whose content equals that of the one before. Write a
// tombstone as an object that says so; DELETE would forget the version. Remove
// it later, on the same condition.
//
// # Kafka and other brokers
//
// Produce with the key as the message's key and the version in a header, and let
// the consumer drop what is not newer than what it has: a consumer that keeps
// its state in SQL calls [Sink.Apply] and commits its offsets after that.
//
// A compacted topic keeps the last message of a key by offset, not by version:
// a late old one survives and the newest does not. So do not let one be late:
// acks=all, an idempotent producer, and delivery.timeout.ms below the lease, so
// that a producer has given up before another relay can take the key. Where that
// does not suffice, keep versions in a guarded table and feed the topic from it.
// A null message is a tombstone to compaction, which deletes it and the version
// in its header after delete.retention.ms: consumers keep their own, as long as
// [Sink.Purge] says.
package sink
