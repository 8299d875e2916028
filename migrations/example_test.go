package migrations_test

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"log"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
)

// At an application's start, in each of its replicas.
func ExampleUp() {
	dir, err := os.MkdirTemp("", "example-")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	db, err := sql.Open("sqlite", dialect.SQLiteDSN(filepath.Join(dir, "app.db")))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()

	ctx := context.Background()
	if err := migrations.Up(ctx, db, dialect.SQLite()); err != nil {
		log.Fatal(err)
	}
	steps, err := migrations.Status(ctx, db, dialect.SQLite())
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(steps[0].Name, steps[0].Applied)
	// Output: 0001_latest.sql true
}

// For an application that applies migrations with a tool of its own.
func ExampleFiles() {
	files, err := migrations.Files(dialect.Postgres().In("messaging", "outbox_"))
	if err != nil {
		log.Fatal(err)
	}
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(names[0])
	// os.CopyFS("db/migrations/outbox", files)

	// Output: 0001_latest.sql
}
