package outbox_test

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
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

type Profile struct{ Name string }

// openExample opens a store on a database in a folder of its own.
func openExample() (db *sql.DB, store *sqlstore.Store, closeAll func()) {
	dir, err := os.MkdirTemp("", "example")
	if err != nil {
		log.Fatal(err)
	}
	if db, err = sql.Open("sqlite", dialect.SQLiteDSN(filepath.Join(dir, "example.db"))); err != nil {
		log.Fatal(err)
	}
	if err = migrations.Up(context.Background(), db, dialect.SQLite()); err != nil {
		log.Fatal(err)
	}
	if store, err = sqlstore.New(db, dialect.SQLite(), sqlstore.Options{}); err != nil {
		log.Fatal(err)
	}
	return db, store, func() { db.Close(); os.RemoveAll(dir) }
}

// flush publishes what is due.
func flush(as ...outbox.Attachment) outbox.Pass {
	relay, err := outbox.NewRelay(outbox.RelayOptions{}, as...)
	if err != nil {
		log.Fatal(err)
	}
	pass, err := relay.Flush(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	return pass
}

// A restaged key is published once, with its newest value; what is rolled back
// never is.
func ExampleLatest_Stage() {
	ctx := context.Background()
	db, store, closeAll := openExample()
	defer closeAll()
	profiles, err := outbox.NewLatest(store, outbox.LatestOptions[Profile]{Channel: "profiles"})
	if err != nil {
		log.Fatal(err)
	}
	for _, name := range []string{"Ada", "Ada Lovelace"} {
		tx, err := db.BeginTx(ctx, nil)
		if err != nil {
			log.Fatal(err)
		}
		// … the application's own statements on tx …
		if _, err := profiles.Stage(ctx, tx, "user-1", Profile{Name: name}); err != nil {
			log.Fatal(err)
		}
		if err := tx.Commit(); err != nil {
			log.Fatal(err)
		}
	}
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		log.Fatal(err)
	}
	if _, err := profiles.Stage(ctx, tx, "user-1", Profile{Name: "nobody"}); err != nil {
		log.Fatal(err)
	}
	if err := tx.Rollback(); err != nil {
		log.Fatal(err)
	}

	flush(profiles.Publisher(func(_ context.Context, batch []*outbox.Entry[Profile]) error {
		for _, e := range batch {
			fmt.Println(e.Key, e.Value.Name)
		}
		return nil
	}, outbox.PublishOptions{}))
	// Output: user-1 Ada Lovelace
}

// A tombstone tells the sink that the key is gone.
func ExampleLatest_StageDelete() {
	ctx := context.Background()
	_, store, closeAll := openExample()
	defer closeAll()
	profiles, err := outbox.NewLatest(store, outbox.LatestOptions[Profile]{})
	if err != nil {
		log.Fatal(err)
	}
	err = store.Transact(ctx, nil, func(tx *sql.Tx) error {
		_, err := profiles.StageDelete(ctx, tx, "user-1")
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	flush(profiles.Publisher(func(_ context.Context, batch []*outbox.Entry[Profile]) error {
		for _, e := range batch {
			fmt.Println(e.Key, "deleted:", e.Deleted)
		}
		return nil
	}, outbox.PublishOptions{}))
	// Output: user-1 deleted: true
}

// StageMany is one statement for up to 10,000 keys. BatchDelay lets what is
// staged in one window go out in one batch, and Headers carry a trace.
func ExampleLatest_StageMany() {
	type traceKey struct{}
	ctx := context.WithValue(context.Background(), traceKey{}, "4bf92f35")
	_, store, closeAll := openExample()
	defer closeAll()
	profiles, err := outbox.NewLatest(store, outbox.LatestOptions[Profile]{
		BatchDelay: 10 * time.Millisecond,
		Headers: func(ctx context.Context, h outbox.Header) {
			h["trace"], _ = ctx.Value(traceKey{}).(string)
		},
	})
	if err != nil {
		log.Fatal(err)
	}
	err = store.Transact(ctx, nil, func(tx *sql.Tx) error {
		_, err := profiles.StageMany(ctx, tx, []outbox.Item[Profile]{
			{Key: "user-1", Value: Profile{Name: "Ada"}},
			{Key: "user-2", Value: Profile{Name: "Grace"}},
		})
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	time.Sleep(10 * time.Millisecond)
	flush(profiles.Publisher(func(_ context.Context, batch []*outbox.Entry[Profile]) error {
		for _, e := range batch {
			fmt.Println(e.Key, e.Value.Name, e.Header["trace"])
		}
		return nil
	}, outbox.PublishOptions{}))
	// Output:
	// user-1 Ada 4bf92f35
	// user-2 Grace 4bf92f35
}

// Entries of a batch may have fates of their own: what is neither marked nor
// refused by an error is done.
func ExampleEntry_Fail() {
	ctx := context.Background()
	_, store, closeAll := openExample()
	defer closeAll()
	profiles, err := outbox.NewLatest(store, outbox.LatestOptions[Profile]{})
	if err != nil {
		log.Fatal(err)
	}
	err = store.Transact(ctx, nil, func(tx *sql.Tx) error {
		_, err := profiles.StageMany(ctx, tx, []outbox.Item[Profile]{
			{Key: "good"}, {Key: "later"}, {Key: "refused"},
		})
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	pass := flush(profiles.Publisher(func(_ context.Context, batch []*outbox.Entry[Profile]) error {
		for _, e := range batch {
			switch e.Key {
			case "later": // the sink asked us to come back
				e.Retry(time.Minute)
			case "refused": // it will not be better tomorrow: the slowest backoff
				e.Fail(outbox.Permanent(errors.New("name is empty")))
			}
		}
		return nil
	}, outbox.PublishOptions{}))
	fmt.Println("published:", pass.Published, "to be tried again:", pass.Retried)

	waiting, err := profiles.List(ctx, "", 10)
	if err != nil {
		log.Fatal(err)
	}
	for _, e := range waiting {
		fmt.Printf("%s: attempt %d, %q\n", e.Key, e.Attempt, e.LastError)
	}
	// A value that can never be published is discarded by its version.
	if err := profiles.Discard(ctx, "refused", waiting[1].Version); err != nil {
		log.Fatal(err)
	}
	_, err = profiles.Pending(ctx, nil, "refused")
	fmt.Println("gone:", errors.Is(err, outbox.ErrNotFound))
	// Output:
	// published: 1 to be tried again: 2
	// later: attempt 1, "marked to be tried again"
	// refused: attempt 1, "permanent: name is empty"
	// gone: true
}

// A service runs a relay until it is told to stop. Stats and Observe are for
// dashboards and metrics.
func ExampleRelay_Run() {
	_, store, closeAll := openExample()
	defer closeAll()
	profiles, err := outbox.NewLatest(store, outbox.LatestOptions[Profile]{Channel: "profiles"})
	if err != nil {
		log.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.Background())
	relay, err := outbox.NewRelay(outbox.RelayOptions{
		ShutdownTimeout: 10 * time.Second,
		Observe: func(e outbox.Event) {
			if e.Kind == outbox.EventSettle {
				fmt.Println("published", e.Rows, "to", e.Channel.Name)
				stop() // as SIGTERM would
			}
		},
	}, profiles.Publisher(func(context.Context, []*outbox.Entry[Profile]) error { return nil }, outbox.PublishOptions{}))
	if err != nil {
		log.Fatal(err)
	}
	done := make(chan error)
	go func() { done <- relay.Run(ctx) }()

	err = store.Transact(context.Background(), nil, func(tx *sql.Tx) error {
		_, err := profiles.Stage(context.Background(), tx, "user-1", Profile{Name: "Ada"})
		return err
	})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("stopped:", <-done)
	stats, err := relay.Stats(context.Background())
	if err != nil {
		log.Fatal(err)
	}
	for _, c := range stats {
		fmt.Println(c.Channel.Name, "due:", c.Due)
	}
	// Output:
	// published 1 to profiles
	// stopped: <nil>
	// profiles due: 0
}
