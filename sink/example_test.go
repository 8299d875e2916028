package sink_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

// exampleDB opens a database in a folder that close removes.
func exampleDB() (db *sql.DB, close func()) {
	dir, err := os.MkdirTemp("", "sink")
	if err != nil {
		log.Fatal(err)
	}
	db, err = sql.Open("sqlite", dialect.SQLiteDSN(filepath.Join(dir, "app.db")))
	if err != nil {
		log.Fatal(err)
	}
	return db, func() { db.Close(); os.RemoveAll(dir) }
}

func ExampleSink_Apply() {
	ctx := context.Background()
	db, done := exampleDB()
	defer done()
	s, err := sink.New(db, dialect.SQLite(), sink.Options{Table: "projections"})
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Create(ctx); err != nil {
		log.Fatal(err)
	}

	// Versions arrive in any order, some of them twice.
	for _, row := range []sink.Row{
		{Key: "ada", Version: 12, Payload: []byte("in London")},
		{Key: "ada", Version: 14, Deleted: true},
		{Key: "ada", Version: 13, Payload: []byte("in Paris")},
		{Key: "ada", Version: 14, Deleted: true},
	} {
		result, err := s.Apply(ctx, []sink.Row{row})
		if err != nil {
			log.Fatal(err)
		}
		fmt.Printf("%d: %+v\n", row.Version, result)
	}
	row, err := s.Get(ctx, "ada")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("kept:", row.Version, "deleted:", row.Deleted)
	// Output:
	// 12: {Applied:1 Stale:0}
	// 14: {Applied:1 Stale:0}
	// 13: {Applied:0 Stale:1}
	// 14: {Applied:0 Stale:1}
	// kept: 14 deleted: true
}

func ExampleSink_ApplyIn() {
	ctx := context.Background()
	db, done := exampleDB()
	defer done()
	s, err := sink.New(db, dialect.SQLite(), sink.Options{Table: "projections"})
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Create(ctx); err != nil {
		log.Fatal(err)
	}

	// A consumer that keeps its offset beside the state reads nothing twice.
	consume := func(rows []sink.Row, offset int) error {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			return err
		}
		defer tx.Rollback()
		if _, err := s.ApplyIn(ctx, tx, rows); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `CREATE TABLE IF NOT EXISTS progress (id INTEGER PRIMARY KEY, offset_read INTEGER)`); err != nil {
			return err
		}
		if _, err := tx.ExecContext(ctx, `INSERT OR REPLACE INTO progress VALUES (1, ?)`, offset); err != nil {
			return err
		}
		return tx.Commit()
	}
	fmt.Println(consume([]sink.Row{{Key: "ada", Version: 3, Payload: []byte("x")}}, 17))
	// Output: <nil>
}

// A table of one's own with typed columns takes the members of the payload.
func ExampleOptions_columns() {
	ctx := context.Background()
	db, done := exampleDB()
	defer done()
	_, err := db.ExecContext(ctx, `CREATE TABLE accounts (
		id TEXT PRIMARY KEY, owner TEXT, cents INTEGER,
		seen INTEGER NOT NULL, closed_at INTEGER,
		CHECK (owner IS NOT NULL OR closed_at IS NOT NULL))`)
	if err != nil {
		log.Fatal(err)
	}
	s, err := sink.New(db, dialect.SQLite(), sink.Options{
		Table: "accounts", Key: sink.Column{Name: "id"},
		Version: "seen", DeletedAt: "closed_at", UpdatedAt: sink.NoColumn,
		Columns: []sink.Column{{Name: "owner", Field: "Owner"}, {Name: "cents", Field: "Cents"}},
	})
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Check(ctx); err != nil {
		log.Fatal(err)
	}

	type account struct {
		Owner *string
		Cents int64
	}
	owner := "Ada"
	good, err := sink.JSON("acc-1", 5, false, account{&owner, 1250})
	if err != nil {
		log.Fatal(err)
	}
	bad, err := sink.JSON("acc-2", 6, false, account{nil, 7})
	if err != nil {
		log.Fatal(err)
	}
	result, err := s.Apply(ctx, []sink.Row{bad, good})
	fmt.Printf("%+v\n", result)

	var refused *sink.RowsError
	if errors.As(err, &refused) {
		for _, r := range refused.Rows {
			fmt.Println("refused:", r.Index, r.Key)
		}
	}
	var name string
	var cents int64
	if err := db.QueryRowContext(ctx, `SELECT owner, cents FROM accounts WHERE closed_at IS NULL`).Scan(&name, &cents); err != nil {
		log.Fatal(err)
	}
	fmt.Println(name, cents)
	// Output:
	// {Applied:1 Stale:0}
	// refused: 0 acc-2
	// Ada 1250
}

func ExampleSink_Purge() {
	ctx := context.Background()
	db, done := exampleDB()
	defer done()
	s, err := sink.New(db, dialect.SQLite(), sink.Options{Table: "projections"})
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Create(ctx); err != nil {
		log.Fatal(err)
	}
	if _, err := s.Apply(ctx, []sink.Row{{Key: "ada", Version: 1, Deleted: true}}); err != nil {
		log.Fatal(err)
	}
	// Once a day, say: what was deleted more than a day ago.
	n, err := s.Purge(ctx, 24*time.Hour)
	fmt.Println(n, err)
	// Output: 0 <nil>
}
