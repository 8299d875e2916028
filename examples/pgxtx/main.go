// Pgxtx stages in a transaction of pgx's own pool, through the seam
// outbox.Tx: go run ./examples/pgxtx postgres://user@localhost/shop
package main

import (
	"context"
	"fmt"
	"log"
	"os"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// pgxTx joins a pgx.Tx to the outbox.
type pgxTx struct{ pgx.Tx }

func (t pgxTx) Query(ctx context.Context, query string, args ...any) (outbox.Rows, error) {
	rows, err := t.Tx.Query(ctx, query, args...)
	return pgxRows{rows}, err
}

type pgxRows struct{ pgx.Rows }

func (r pgxRows) Close() error { r.Rows.Close(); return r.Err() }

func main() {
	if len(os.Args) != 2 {
		log.Fatal("usage: pgxtx postgres://…")
	}
	if err := run(context.Background(), os.Args[1]); err != nil {
		log.Fatal(err)
	}
}

func run(ctx context.Context, dsn string) error {
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return err
	}
	defer pool.Close()
	db := stdlib.OpenDBFromPool(pool) // the relay's side shares the pool
	defer db.Close()
	d := dialect.Postgres().In("public", "pgxtx_")
	if err := migrations.Up(ctx, db, d); err != nil {
		return err
	}
	store, err := sqlstore.New(db, d, sqlstore.Options{})
	if err != nil {
		return err
	}
	stock, err := outbox.NewLatest(store, outbox.LatestOptions[int]{Channel: "stock"})
	if err != nil {
		return err
	}

	err = pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
		// … the application's own statements on tx …
		_, err := stock.StageIn(ctx, pgxTx{tx}, outbox.Item[int]{Key: "tea", Value: 3}, outbox.Item[int]{Key: "milk", Deleted: true})
		return err
	})
	if err != nil {
		return err
	}
	store.Wake() // committed: a relay of this process need not look for it

	relay, err := outbox.NewRelay(outbox.RelayOptions{}, stock.Publisher(
		func(_ context.Context, batch []*outbox.Entry[int]) error {
			for _, e := range batch {
				fmt.Println(e.Key, e.Value, "deleted:", e.Deleted)
			}
			return nil
		}, outbox.PublishOptions{}))
	if err != nil {
		return err
	}
	_, err = relay.Flush(ctx)
	return err
}
