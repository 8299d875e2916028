// Package filestore keeps an outbox.Journal in one JSON file, for programs
// that have no database: agents, command line tools, devices. What they have
// to send must survive a crash, a full disk and a destination that is down.
//
// [Open] the file, put with outbox.Journal.Add, send with an outbox.Relay. Its
// Flush, at the start, sends what a process before has left.
//
// # What is promised
//
// A call returns when its change is on the disk: in a new file that was
// flushed, renamed over the old one, and whose directory was flushed. Kill the
// process, or cut the power, at any instruction: the file is the old one or
// the new one, whole, and nothing that a call has returned is missing. No call
// tells what is not on the disk yet.
//
// A call that fails has changed nothing, in memory neither, and works again
// once the cause is gone. One exception is outbox.ErrCommit: the file was
// replaced, but not flushed for certain. The change then shows, and the next
// call flushes before it answers.
//
// Calls run one after another. Those that come while the file is being written
// share the next write, so that many callers at once cost little more than one.
//
// The verbs, the states and the order of groups are those of the stores on
// Postgres and SQLite: one contract holds them all. Messages that a process
// was sending when it died are due at once when the file is opened again, and
// come Ambiguous; leases that were in force at a Close run on.
//
// # What is not
//
// There are no transactions of callers: Put, PutMany and PutBegun, and the
// verbs of Journal.In, are outbox.ErrTx. In place of PutBegun, Add and Begin.
// There are no channels of outbox.Latest.
//
// One process, and one Store of it, uses a file at a time; others get
// [ErrLocked]. The lock is flock's, on the file of that name with ".lock"
// added, which stays when the store is closed: do not remove it. ".tmp" is the
// next content. All three want a local disk: on a network file system neither
// the lock nor the flush may mean anything.
//
// # How much
//
// Each write writes the whole file, and all messages are kept in memory, so it
// is meant for up to some thousand messages at a time, and payloads of some
// kilobytes. On a machine with two cores and an SSD, with messages of 300
// bytes, an Add alone takes 2 ms in a small file, 5 ms in one of 1,000
// messages and 11 ms in one of 10,000: 1.1 to 1.6 times what writing and
// flushing as many bytes takes. 64 callers at once add some 20,000 a second to
// a small file. A relay that deletes what it has sent drains 1,000 messages in
// 0.1 s, and 10,000 in 1.5 s.
//
// [Options] set the limits, by default 10,000 messages and 64 MiB; beyond,
// adding is [ErrFull]. Send with outbox.DeleteOnSent, or what was sent counts
// for as long as it is kept. When that is not enough, [Store.MoveTo] moves
// everything to SQLite or Postgres.
package filestore
