package outbox_test

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"log"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// openJournal opens a journal on a database in a folder of its own.
func openJournal(channel string) (*outbox.Journal, *sqlstore.Store, func()) {
	_, store, closeAll := openExample()
	j, err := outbox.NewJournal(store, outbox.JournalOptions{Channel: channel})
	if err != nil {
		log.Fatal(err)
	}
	return j, store, closeAll
}

// transact runs f in a transaction and wakes the relays after its commit.
func transact(store *sqlstore.Store, f func(tx *sql.Tx) error) {
	if err := store.Transact(context.Background(), nil, f); err != nil {
		log.Fatal(err)
	}
}

// A message commits with the business data; its key makes putting it again
// harmless. Messages of a group are sent in order.
func ExampleJournal_Put() {
	ctx := context.Background()
	webhooks, store, closeAll := openJournal("webhooks")
	defer closeAll()
	for _, event := range []string{"placed", "paid", "paid"} {
		transact(store, func(tx *sql.Tx) error {
			// … the application's own statements on tx …
			res, err := webhooks.Put(ctx, tx, outbox.Message{Key: "order-1/" + event, Group: "order-1", Payload: []byte(event)})
			if err == nil && !res.Created {
				fmt.Println(res.Key, "was put before")
			}
			return err
		})
	}

	flush(webhooks.Sender(func(_ context.Context, r *outbox.Record) (string, error) {
		fmt.Printf("POST %s, idempotency key %q\n", r.Payload, r.Key)
		return "receipt-" + r.Key, nil
	}, outbox.SendOptions{}))
	r, err := webhooks.Get(ctx, "order-1/paid")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(r.State, r.Ref)
	// Output:
	// order-1/paid was put before
	// POST placed, idempotency key "order-1/placed"
	// POST paid, idempotency key "order-1/paid"
	// sent receipt-order-1/paid
}

// The class of an error decides what becomes of its message.
func ExampleJournal_Sender() {
	ctx := context.Background()
	mails, store, closeAll := openJournal("mails")
	defer closeAll()
	transact(store, func(tx *sql.Tx) error {
		_, err := mails.PutMany(ctx, tx, []outbox.Message{
			{Key: "ada", Payload: []byte("ada@example.org")},
			{Key: "nobody", Payload: []byte("no address")},
			{Key: "greylisted", Payload: []byte("slow@example.org")},
		})
		return err
	})

	pass := flush(mails.Sender(func(_ context.Context, r *outbox.Record) (string, error) {
		switch r.Key {
		case "nobody":
			return "", outbox.WithCode("no_address", outbox.Permanent(errors.New("no such address")))
		case "greylisted":
			return "", outbox.RetryAfter(10*time.Minute, errors.New("451 try again later"))
		}
		return "message-id", nil
	}, outbox.SendOptions{}))
	fmt.Println("sent:", pass.Published, "dead:", pass.Dead, "to be tried again:", pass.Retried)

	n, err := mails.Retry(ctx, outbox.Filter{Code: "no_address"})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println("retried by hand:", n)
	// Output:
	// sent: 1 dead: 1 to be tried again: 1
	// retried by hand: 1
}

// Nobody knows whether a mail was sent when the connection breaks before the
// answer: the Probe asks, and where it does not know either the message is
// parked, never sent twice.
func ExampleProbeFunc() {
	ctx := context.Background()
	mails, store, closeAll := openJournal("mails")
	defer closeAll()
	transact(store, func(tx *sql.Tx) error {
		_, err := mails.PutMany(ctx, tx, []outbox.Message{{Key: "ada"}, {Key: "grace"}})
		return err
	})

	flush(mails.Sender(func(_ context.Context, r *outbox.Record) (string, error) {
		return "", outbox.Unknown(errors.New("connection reset by peer"))
	}, outbox.SendOptions{
		Workers:   1,
		OnUnknown: outbox.Park,
		Probe: func(_ context.Context, r *outbox.Record) (outbox.Verdict, string, error) {
			if r.Key == "ada" { // found in the provider's list of sent mails
				return outbox.VerdictSent, "message-id-1", nil
			}
			return outbox.VerdictUnknown, "", nil
		},
	}))
	if err := mails.ResolveUnknown(ctx, "grace", outbox.VerdictSent, "seen by a person"); err != nil {
		log.Fatal(err)
	}
	rs, _, err := mails.List(ctx, outbox.Filter{States: []outbox.State{outbox.StateSent}})
	if err != nil {
		log.Fatal(err)
	}
	for _, r := range rs {
		fmt.Println(r.Key, r.State, r.Ref)
	}
	// Output:
	// ada sent message-id-1
	// grace sent seen by a person
}

// A message put begun is sent by its caller right after the commit. Should the
// caller die, a relay sends it.
func ExampleJournal_Deliver() {
	ctx := context.Background()
	codes, store, closeAll := openJournal("login-codes")
	defer closeAll()
	var res outbox.PutResult
	transact(store, func(tx *sql.Tx) (err error) {
		res, err = codes.PutBegun(ctx, tx, outbox.Message{Key: "login-7", Payload: []byte("123456")}, 10*time.Second)
		return err
	})
	if !res.Created {
		return // somebody else is sending it
	}
	r, err := codes.Deliver(ctx, res.Record, func(_ context.Context, r *outbox.Record) (string, error) {
		fmt.Printf("SMS: %s\n", r.Payload)
		return "sms-1", nil
	}, outbox.SendOptions{Retention: time.Hour})
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(r.State, r.Ref)
	// Output:
	// SMS: 123456
	// sent sms-1
}

// A batch is sent in one call, which marks what failed.
func ExampleJournal_BatchSender() {
	ctx := context.Background()
	events, store, closeAll := openJournal("events")
	defer closeAll()
	transact(store, func(tx *sql.Tx) error {
		_, err := events.PutMany(ctx, tx, []outbox.Message{{Key: "a"}, {Key: "b"}, {Key: "c"}})
		return err
	})
	pass := flush(events.BatchSender(func(_ context.Context, batch []*outbox.Delivery) error {
		for _, d := range batch {
			if d.Key == "b" {
				d.Fail(outbox.Permanent(errors.New("refused")))
			}
		}
		return nil
	}, outbox.SendOptions{BatchSize: 1000}))
	fmt.Println("sent:", pass.Published, "dead:", pass.Dead)
	// Output: sent: 2 dead: 1
}

// What a send does to its own database, and that it was sent, can be one
// transaction.
func ExampleJournal_In() {
	ctx := context.Background()
	payouts, store, closeAll := openJournal("payouts")
	defer closeAll()
	transact(store, func(tx *sql.Tx) error {
		_, err := payouts.Put(ctx, tx, outbox.Message{Key: "payout-1"})
		return err
	})
	flush(payouts.Sender(func(ctx context.Context, r *outbox.Record) (string, error) {
		err := store.Transact(ctx, nil, func(tx *sql.Tx) error {
			// … the application's own statements on tx …
			return payouts.In(outbox.SQL(tx)).MarkSent(ctx, r.Lease, "booked")
		})
		if err != nil {
			return "", err
		}
		return "", outbox.ErrSettled
	}, outbox.SendOptions{}))
	r, err := payouts.Get(ctx, "payout-1")
	if err != nil {
		log.Fatal(err)
	}
	fmt.Println(r.State, r.Ref)
	// Output: sent booked
}
