// Quickstart stages prices in a shop's transactions and publishes the newest
// of each: go run ./examples/quickstart
package main

import (
	"context"
	"database/sql"
	"fmt"
	"log"
	"os"
	"path/filepath"
	"time"

	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// Price is what the rest of the world must learn.
type Price struct {
	SKU   string
	Cents int
}

func main() {
	dir, err := os.MkdirTemp("", "quickstart")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := run(context.Background(), filepath.Join(dir, "shop.db")); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, path string) error {
	// Postgres: sql.Open("pgx", "postgres://…") and dialect.Postgres().
	db, err := sql.Open("sqlite", dialect.SQLiteDSN(path))
	if err != nil {
		return err
	}
	defer db.Close()
	if err := migrations.Up(ctx, db, dialect.SQLite()); err != nil {
		return err
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE prices (sku TEXT PRIMARY KEY, cents INTEGER NOT NULL)`); err != nil {
		return err
	}

	store, err := sqlstore.New(db, dialect.SQLite(), sqlstore.Options{})
	if err != nil {
		return err
	}
	prices, err := outbox.NewLatest(store, outbox.LatestOptions[Price]{Channel: "prices"})
	if err != nil {
		return err
	}

	// One transaction: the price and the news of it, or neither.
	setPrice := func(p Price) error {
		return store.Transact(ctx, nil, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `INSERT INTO prices VALUES ($1, $2)
				ON CONFLICT (sku) DO UPDATE SET cents = excluded.cents`, p.SKU, p.Cents); err != nil {
				return err
			}
			_, err := prices.Stage(ctx, tx, p.SKU, p)
			return err
		})
	}
	for _, p := range []Price{{"tea", 450}, {"milk", 120}, {"tea", 475}} {
		if err := setPrice(p); err != nil {
			return err
		}
	}

	// The relay calls this outside of any transaction, until it returns nil.
	publish := func(ctx context.Context, batch []*outbox.Entry[Price]) error {
		for _, e := range batch {
			if err := send(ctx, e); err != nil {
				e.Fail(err) // this one alone; the others are done
			}
		}
		return nil
	}
	relay, err := outbox.NewRelay(outbox.RelayOptions{}, prices.Publisher(publish, outbox.PublishOptions{}))
	if err != nil {
		return err
	}
	ctx, stop := context.WithTimeout(ctx, time.Second) // a service: signal.NotifyContext
	defer stop()
	return relay.Run(ctx) // until ctx ends
}

// send stands for a call to the sink, which is to compare e.Version.
func send(_ context.Context, e *outbox.Entry[Price]) error {
	_, err := fmt.Printf("%s now costs %d\n", e.Key, e.Value.Cents)
	return err
}
