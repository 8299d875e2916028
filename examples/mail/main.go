// Mail sends each order's confirmation once, through a provider that can be
// asked what it has taken: go run ./examples/mail
//
// A mail must not go out twice, and no provider knows what it is to leave out.
// So a send of which nobody knows whether it worked (the answer was lost, the
// relay died) is not repeated blindly: the provider is asked first, and where
// it cannot tell, the message is parked as unknown for a person: outbox resolve.
package main

import (
	"bytes"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"log"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"time"

	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// Mail is the payload of a message.
type Mail struct{ To, Text string }

func main() {
	dir, err := os.MkdirTemp("", "mail")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	p := newProvider()
	defer p.Close()
	if err := run(context.Background(), filepath.Join(dir, "shop.db"), p.URL); err != nil {
		log.Fatal(err)
	}
	fmt.Println("mails that left the provider:", p.sent())
}

func run(ctx context.Context, path, provider string) error {
	db, err := sql.Open("sqlite", dialect.SQLiteDSN(path))
	if err != nil {
		return err
	}
	defer db.Close()
	store, err := install(ctx, db)
	if err != nil {
		return err
	}
	mails, err := outbox.NewJournal(store, outbox.JournalOptions{Channel: "mails"})
	if err != nil {
		return err
	}

	// One transaction: the order and its mail, or neither.
	place := func(order int, to string) error {
		payload, err := json.Marshal(Mail{To: to, Text: fmt.Sprintf("Thank you for order %d.", order)})
		if err != nil {
			return err
		}
		return store.Transact(ctx, nil, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES ($1)`, order); err != nil {
				return err
			}
			_, err := mails.Put(ctx, tx, outbox.Message{Key: fmt.Sprintf("confirmation-%d", order), Payload: payload})
			return err
		})
	}
	for i, to := range []string{"ana@example.com", "ben@example.com", "nobody"} {
		if err := place(1001+i, to); err != nil {
			return err
		}
	}

	c := client{provider}
	relay, err := outbox.NewRelay(outbox.RelayOptions{}, mails.Sender(c.send, outbox.SendOptions{
		OnUnknown: outbox.Park,
		Probe:     c.probe,
	}))
	if err != nil {
		return err
	}
	if err := runUntilEnded(ctx, relay, mails); err != nil {
		return err
	}
	ended, _, err := mails.List(ctx, outbox.Filter{All: true})
	for _, r := range ended {
		fmt.Printf("%s: %s %s%s\n", r.Key, r.State, r.Ref, r.Code)
	}
	return err
}

// client calls the provider.
type client struct{ url string }

// send gives a mail to the provider, under the message's key.
func (c client) send(ctx context.Context, r *outbox.Record) (ref string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, c.mail(r), bytes.NewReader(r.Payload))
	if err != nil {
		return "", outbox.Permanent(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", outbox.Unknown(err) // it may have been taken
	}
	defer response.Body.Close()
	switch status := response.StatusCode; {
	case status == http.StatusAccepted:
		return response.Header.Get("Location"), nil
	case status == http.StatusTooManyRequests:
		return "", outbox.RetryAfter(0, fmt.Errorf("the provider answers %d", status))
	case status == http.StatusServiceUnavailable:
		return "", outbox.Unavailable(fmt.Errorf("the provider answers %d", status))
	case status >= 400 && status < 500:
		return "", outbox.WithCode("refused", outbox.Permanent(fmt.Errorf("the provider answers %d", status)))
	default:
		return "", outbox.Unknown(fmt.Errorf("the provider answers %d", status))
	}
}

// probe asks the provider whether it has taken a mail. "No" must mean that it
// never will, from an earlier call that is still on its way: ask a provider
// that is slow to know only once its calls must have ended, and say
// VerdictUnknown before.
func (c client) probe(ctx context.Context, r *outbox.Record) (v outbox.Verdict, ref string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.mail(r), nil)
	if err != nil {
		return outbox.VerdictUnknown, "", err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return outbox.VerdictUnknown, "", err
	}
	defer response.Body.Close()
	switch response.StatusCode {
	case http.StatusOK:
		return outbox.VerdictSent, response.Header.Get("Location"), nil
	case http.StatusNotFound:
		return outbox.VerdictNotSent, "", nil
	}
	return outbox.VerdictUnknown, "", fmt.Errorf("the provider answers %d", response.StatusCode)
}

// mail is the provider's name of a message.
func (c client) mail(r *outbox.Record) string { return c.url + "/mails/" + url.PathEscape(r.Key) }

func install(ctx context.Context, db *sql.DB) (*sqlstore.Store, error) {
	if err := migrations.Up(ctx, db, dialect.SQLite()); err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE orders (id INTEGER PRIMARY KEY)`); err != nil {
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
