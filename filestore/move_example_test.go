package filestore_test

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"

	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/filestore"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// A program that has outgrown its file moves to SQLite at its first start with
// the new release, and may call this at every start.
func ExampleStore_MoveTo() {
	dir, err := os.MkdirTemp("", "move")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	ctx := context.Background()

	file, err := filestore.Open(filepath.Join(dir, "state", "outbox.json"), filestore.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer file.Close()
	old, err := outbox.NewJournal(file, outbox.JournalOptions{Channel: "mails"})
	if err != nil {
		log.Fatal(err)
	}
	if _, err := old.Add(ctx, outbox.Message{Key: "welcome-ana", Payload: []byte("Welcome!")}); err != nil {
		log.Fatal(err)
	}

	db, err := sql.Open("sqlite", dialect.SQLiteDSN(filepath.Join(dir, "app.db")))
	if err != nil {
		log.Fatal(err)
	}
	defer db.Close()
	if err := migrations.Up(ctx, db, dialect.SQLite()); err != nil {
		log.Fatal(err)
	}
	store, err := sqlstore.New(db, dialect.SQLite(), sqlstore.Options{})
	if err != nil {
		log.Fatal(err)
	}
	moved, err := file.MoveTo(ctx, store, filestore.MoveOptions{NoRelay: true})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("moved:", moved.Messages())

	mails, err := outbox.NewJournal(store, outbox.JournalOptions{Channel: "mails"})
	if err != nil {
		log.Fatal(err)
	}
	r, err := mails.Get(ctx, "welcome-ana")
	fmt.Println(r.Key, r.State, err)
	// Output:
	// moved: 1
	// welcome-ana pending <nil>
}
