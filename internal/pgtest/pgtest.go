// Package pgtest gives tests and demonstrations a Postgres to throw away.
//
// [DSN] and [Open] make a database of its own for each test, on one server
// that the test binary starts when it first needs it and that stops when the
// binary ends, however it ends. Where OUTBOX_TEST_POSTGRES is set, the
// databases are made on the server it names instead. [Start] gives a test its
// own server, to stop, kill and start again, and [Pooler] puts a pooler in
// transaction mode before one.
//
// Postgres is never optional: where it cannot be had, the test fails and says
// what to do. A test that should not run under go test -short asks
// testing.Short itself.
package pgtest

import (
	"context"
	"crypto/rand"
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib" // the driver "pgx"
)

// Env names the variable with the DSN of a server to use. Its role must be
// allowed to create databases.
const Env = "OUTBOX_TEST_POSTGRES"

const remedy = `
Tests need PostgreSQL 12 or later. One of these gives it to them:
  apt-get install postgresql           (Debian, Ubuntu; nothing needs to be started)
  brew install postgresql              (macOS; nothing needs to be started)
  export ` + Env + `=postgres://user:password@host:5432/postgres
  make test                            (does the first, or runs in a container)
or run what needs no Postgres: go test -short ./...`

// shared starts the server that all tests of this binary share. Nothing stops
// it but its watchdog, when this process has ended: there is no hook for that.
var shared = sync.OnceValues(func() (*Cluster, error) { return newCluster(Options{}) })

// DSN creates an empty database and returns how to reach it. The database is
// dropped, whoever is connected to it, when the test ends.
func DSN(t testing.TB) string {
	t.Helper()
	server := os.Getenv(Env)
	if server == "" {
		c, err := shared()
		if err != nil {
			t.Fatalf("start postgres for tests: %v\n%s", err, remedy)
		}
		server = c.DSN()
	}
	name := "outbox_test_" + strings.ToLower(rand.Text()[:12])
	if err := admin(server, `CREATE DATABASE `+name+` TEMPLATE template0`); err != nil {
		t.Fatalf("create a database for the test: %v\n%s", err, remedy)
	}
	t.Cleanup(func() {
		if err := admin(server, `DROP DATABASE IF EXISTS `+name+` WITH (FORCE)`); err != nil {
			t.Errorf("drop the test's database: %v", err)
		}
	})
	dsn, err := withDatabase(server, name)
	if err != nil {
		t.Fatal(err)
	}
	return dsn
}

// Open creates an empty database and opens it with pgx's database/sql driver.
func Open(t testing.TB) *sql.DB {
	t.Helper()
	return OpenDSN(t, DSN(t))
}

// OpenDSN opens a database and closes it when the test ends.
func OpenDSN(t testing.TB, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open("pgx", dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { db.Close() })
	return db
}

// admin runs one statement on the server of dsn.
func admin(dsn, statement string) error {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, statement)
	return errors.Join(err, conn.Close(ctx))
}

// withDatabase returns dsn, a URL or keywords and values, with another database.
func withDatabase(dsn, name string) (string, error) {
	if !strings.HasPrefix(dsn, "postgres://") && !strings.HasPrefix(dsn, "postgresql://") {
		return dsn + " dbname=" + name, nil // the last one of a keyword holds
	}
	u, err := url.Parse(dsn)
	if err != nil {
		return "", fmt.Errorf("parse %s: not a postgres:// URL", Env) // without the URL: it may hold a password
	}
	u.Path = "/" + name
	return u.String(), nil
}
