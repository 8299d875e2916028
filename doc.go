// Package sqloutbox is the root of a library that makes "commit to the
// database and tell someone else" one atomic act, in the Postgres or SQLite
// that an application already has. It holds no code; read on in
//
//   - [github.com/seed-2b36b211/sqloutbox/outbox]: what is promised, staging and the relay
//   - [github.com/seed-2b36b211/sqloutbox/sqlstore]: the rows, over database/sql
//   - [github.com/seed-2b36b211/sqloutbox/dialect]: Postgres or SQLite, and the names of the tables
//   - [github.com/seed-2b36b211/sqloutbox/migrations]: installing and upgrading the tables
//   - [github.com/seed-2b36b211/sqloutbox/sink]: writes at the other end that keep the newest version
//   - [github.com/seed-2b36b211/sqloutbox/outbox/outboxtest]: tests for applications and for stores
package sqloutbox
