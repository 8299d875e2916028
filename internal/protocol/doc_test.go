// Package protocol is the protocol of claims, settlements, restages and lapsed
// leases written down small enough to try every interleaving of it. It is
// tests alone.
//
// Latest: two stagers and two relays on one key. A stager reads the last token,
// draws a version, writes (waiting for the key's lock), looks at the token
// again, and commits or rolls back: the statement of dialect/postgres.go, in its
// parts. Claim and settle are claim_1 and settle_1 of
// migrations/postgres/0001_latest.sql.
//
// Journal: two Puts into one group and two relays. A Put is pgPutInGroup of
// dialect/postgres_put.go; claim, settle and regroup are claim_messages_1,
// settle_messages_1 and regroup_1 of migrations/postgres/0002_journal.sql.
//
// Left out: several keys or channels, batches, pauses, backoff, due times, extending, Begin,
// retries and releases of messages, Skip, a key that exists already, a lost answer to a settle, what a
// person does by hand, a probe, isolation above READ COMMITTED, and SQLite, whose one
// writer makes each transaction a single step. A claim is one step, and under
// Park it makes an ambiguous message unknown at once. Numbers of claims are bounded.
package protocol
