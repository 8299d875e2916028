// Sendnow sends a login code right after the commit that made it, without
// waiting for a relay, and yet never loses one: go run ./examples/sendnow
//
// PutBegun puts the message with a lease on it, so that no relay takes it;
// Deliver sends it as a relay would. Should the program die in between, the
// lease lapses and the relay sends it: the safety net.
package main

import (
	"bytes"
	"context"
	"database/sql"
	"fmt"
	"log"
	"net/http"
	"os"
	"path/filepath"
	"time"

	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// lease is how long the relay waits for a program that may have died. Short,
// for the example; Deliver extends it while the call runs.
const lease = time.Second

func main() {
	dir, err := os.MkdirTemp("", "sendnow")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	g := newGateway()
	defer g.Close()
	if err := run(context.Background(), filepath.Join(dir, "app.db"), g.URL); err != nil {
		log.Fatal(err)
	}
}

// logins is the part of the application that lets people in.
type logins struct {
	store   *sqlstore.Store
	codes   *outbox.Journal
	gateway string
	options outbox.SendOptions // the same for Deliver and the relay
}

func run(ctx context.Context, path, gateway string) error {
	db, err := sql.Open("sqlite", dialect.SQLiteDSN(path))
	if err != nil {
		return err
	}
	defer db.Close()
	store, err := install(ctx, db)
	if err != nil {
		return err
	}
	codes, err := outbox.NewJournal(store, outbox.JournalOptions{Channel: "codes"})
	if err != nil {
		return err
	}
	l := &logins{store: store, codes: codes, gateway: gateway, options: outbox.SendOptions{Lease: lease}}

	if err := l.begin(ctx, "ana", false); err != nil {
		return err
	}
	if err := l.begin(ctx, "ben", true); err != nil { // dies at the worst moment
		return err
	}
	l.print(ctx, "before the relay runs")

	relay, err := outbox.NewRelay(outbox.RelayOptions{}, codes.Sender(l.send, l.options))
	if err != nil {
		return err
	}
	if err := runUntilEnded(ctx, relay, codes); err != nil {
		return err
	}
	l.print(ctx, "after it")
	return nil
}

// begin makes a login and sends its code.
func (l *logins) begin(ctx context.Context, user string, dies bool) error {
	var put outbox.PutResult
	err := l.store.Transact(ctx, nil, func(tx *sql.Tx) (err error) {
		if _, err := tx.ExecContext(ctx, `INSERT INTO logins VALUES ($1)`, user); err != nil {
			return err
		}
		put, err = l.codes.PutBegun(ctx, tx, outbox.Message{Key: "login-" + user, Payload: []byte(user + ": 4711")}, lease)
		return err
	})
	if err != nil {
		return err
	}
	if dies {
		return nil
	}
	if !put.Created { // somebody else has put it, and sends it
		return nil
	}
	_, err = l.codes.Deliver(ctx, put.Record, l.send, l.options)
	return err // the message is kept all the same, and the relay tries it again
}

// send calls the gateway, which sends the message of an id once.
func (l *logins) send(ctx context.Context, r *outbox.Record) (ref string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, l.gateway+"/"+r.Key, bytes.NewReader(r.Payload))
	if err != nil {
		return "", outbox.Permanent(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", outbox.Unknown(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		return "", fmt.Errorf("the gateway answers %d", response.StatusCode)
	}
	return "", nil
}

func (l *logins) print(ctx context.Context, when string) {
	fmt.Println(when + ":")
	rs, _, err := l.codes.List(ctx, outbox.Filter{All: true})
	if err != nil {
		fmt.Println(err)
	}
	for _, r := range rs {
		fmt.Printf("  %s %s\n", r.Key, r.State)
	}
}

func install(ctx context.Context, db *sql.DB) (*sqlstore.Store, error) {
	if err := migrations.Up(ctx, db, dialect.SQLite()); err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE logins (name TEXT PRIMARY KEY)`); err != nil {
		return nil, err
	}
	return sqlstore.New(db, dialect.SQLite(), sqlstore.Options{})
}

// runUntilEnded runs the relay until nothing is left to be sent. A service
// runs it until it is told to stop: signal.NotifyContext.
func runUntilEnded(ctx context.Context, relay *outbox.Relay, j *outbox.Journal) error {
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	go func() {
		defer stop()
		open := outbox.Filter{States: []outbox.State{outbox.StatePending, outbox.StateFailed, outbox.StateSending}, Limit: 1}
		for ctx.Err() == nil {
			if left, _, err := j.List(ctx, open); err == nil && len(left) == 0 {
				return
			}
			time.Sleep(50 * time.Millisecond)
		}
	}()
	return relay.Run(ctx)
}
