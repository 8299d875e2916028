// Webhook tells a receiver of every order, over HTTP, as often as it takes:
// go run ./examples/webhook
//
// A call whose answer was lost is made again, under the same Idempotency-Key,
// by which a receiver recognises what it has done already.
package main

import (
	"bytes"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	_ "modernc.org/sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/migrations"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

func main() {
	dir, err := os.MkdirTemp("", "webhook")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	r := newReceiver()
	defer r.Close()
	if err := run(context.Background(), filepath.Join(dir, "shop.db"), r.URL); err != nil {
		log.Fatal(err)
	}
	fmt.Println("events that the receiver acted on:", r.acted())
}

func run(ctx context.Context, path, receiver string) error {
	db, err := sql.Open("sqlite", dialect.SQLiteDSN(path))
	if err != nil {
		return err
	}
	defer db.Close()
	store, err := install(ctx, db)
	if err != nil {
		return err
	}
	events, err := outbox.NewJournal(store, outbox.JournalOptions{Channel: "events"})
	if err != nil {
		return err
	}

	// One transaction: the order and the event, or neither.
	place := func(order string) error {
		return store.Transact(ctx, nil, func(tx *sql.Tx) error {
			if _, err := tx.ExecContext(ctx, `INSERT INTO orders VALUES ($1)`, order); err != nil {
				return err
			}
			_, err := events.Put(ctx, tx, outbox.Message{
				Key:     "placed/" + order,
				Payload: fmt.Appendf(nil, `{"event":"placed","order":%q}`, order),
			})
			return err
		})
	}
	for _, order := range []string{"fine", "answer-lost", "throttled", "malformed"} {
		if err := place(order); err != nil {
			return err
		}
	}

	relay, err := outbox.NewRelay(outbox.RelayOptions{}, events.Sender(hook(receiver).send, outbox.SendOptions{
		AttemptTimeout: 10 * time.Second,
	}))
	if err != nil {
		return err
	}
	if err := runUntilEnded(ctx, relay, events); err != nil {
		return err
	}
	ended, _, err := events.List(ctx, outbox.Filter{All: true})
	for _, r := range ended {
		fmt.Println(r.Key, r.State)
	}
	return err
}

// hook is the URL of a receiver.
type hook string

// send calls the receiver.
func (h hook) send(ctx context.Context, r *outbox.Record) (ref string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, string(h), bytes.NewReader(r.Payload))
	if err != nil {
		return "", outbox.Permanent(err)
	}
	request.Header.Set("Content-Type", "application/json")
	// The same at each attempt, and safe in a header whatever the key is made of.
	request.Header.Set("Idempotency-Key", url.QueryEscape(r.Channel+"/"+r.Key))
	response, err := http.DefaultClient.Do(request)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "", outbox.Unavailable(err) // nobody listens: not this event's fault
	case err != nil:
		return "", outbox.Unknown(err) // it may have arrived; Resend, the default, sends it again
	}
	defer response.Body.Close()
	return response.Header.Get("X-Request-Id"), classify(response)
}

// classify makes an error of an answer; nil where the receiver has the event.
func classify(response *http.Response) error {
	status := response.StatusCode
	err := outbox.WithCode("http-"+strconv.Itoa(status), fmt.Errorf("the receiver answers %d", status))
	switch {
	case status >= 200 && status < 300:
		return nil
	case status == http.StatusTooManyRequests:
		return outbox.RetryAfter(retryAfter(response.Header.Get("Retry-After"), time.Now()), err)
	case status == http.StatusServiceUnavailable:
		return outbox.Unavailable(err)
	case status == http.StatusRequestTimeout, status == http.StatusConflict, status == http.StatusTooEarly:
		return err // again after the backoff; 409: an earlier call with this key is still at work
	case status >= 400 && status < 500:
		return outbox.Permanent(err)
	}
	return err
}

// retryAfter reads a Retry-After header: seconds, or a date. 0, which stands
// for the relay's own backoff, where there is none that makes sense.
func retryAfter(value string, now time.Time) time.Duration {
	if seconds, err := strconv.Atoi(value); err == nil {
		return min(max(time.Duration(seconds)*time.Second, 0), time.Hour)
	}
	if at, err := http.ParseTime(value); err == nil {
		return min(max(at.Sub(now), 0), time.Hour)
	}
	return 0
}

func install(ctx context.Context, db *sql.DB) (*sqlstore.Store, error) {
	if err := migrations.Up(ctx, db, dialect.SQLite()); err != nil {
		return nil, err
	}
	if _, err := db.ExecContext(ctx, `CREATE TABLE orders (id TEXT PRIMARY KEY)`); err != nil {
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
