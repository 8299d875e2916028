package filestore_test

import (
	"context"
	"errors"
	"fmt"
	"log"
	"os"
	"path/filepath"

	"github.com/seed-2b36b211/sqloutbox/filestore"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A program adds what it has to send, and sends it as soon as it can: now, or
// when it is started again.
func Example() {
	dir, err := os.MkdirTemp("", "agent")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "state", "outbox.json")
	online := false
	send := func(_ context.Context, r *outbox.Record) (ref string, err error) {
		if !online {
			return "", outbox.Unavailable(errors.New("no network"))
		}
		fmt.Printf("sent %s: %s\n", r.Key, r.Payload)
		return "receipt of " + r.Key, nil
	}

	run := func(ms ...outbox.Message) error {
		store, err := filestore.Open(path, filestore.Options{})
		if err != nil {
			return err
		}
		defer store.Close()
		journal, err := outbox.NewJournal(store, outbox.JournalOptions{})
		if err != nil {
			return err
		}
		for _, m := range ms {
			if _, err := journal.Add(context.Background(), m); err != nil { // on the disk when it returns
				return err
			}
		}
		sender := journal.Sender(send, outbox.SendOptions{Retention: outbox.DeleteOnSent, Workers: 1})
		relay, err := outbox.NewRelay(outbox.RelayOptions{}, sender)
		if err != nil {
			return err
		}
		_, err = relay.Flush(context.Background()) // what processes before have left goes out too
		return err
	}

	if err := run(outbox.Message{Key: "reading-1", Payload: []byte("21.5 °C")}); err != nil {
		log.Fatal(err)
	}
	fmt.Println("nothing sent: no network")
	online = true
	resume(path)
	if err := run(outbox.Message{Key: "reading-2", Payload: []byte("21.7 °C")}); err != nil {
		log.Fatal(err)
	}
	// Output:
	// nothing sent: no network
	// sent reading-1: 21.5 °C
	// sent reading-2: 21.7 °C
}

// resume ends the pause of a destination that was down before it is over by
// itself, as `outbox resume` does.
func resume(path string) {
	store, err := filestore.Open(path, filestore.Options{})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	if err := store.Pause(context.Background(), outbox.DefaultChannel, 0, ""); err != nil {
		log.Fatal(err)
	}
}

// Who adds to a file that is full, in use or shared with others is told so.
func ExampleOpen() {
	dir, err := os.MkdirTemp("", "agent")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "outbox.json")
	store, err := filestore.Open(path, filestore.Options{MaxEntries: 1})
	if err != nil {
		log.Fatal(err)
	}
	defer store.Close()
	_, err = filestore.Open(path, filestore.Options{})
	fmt.Println("in use:", errors.Is(err, filestore.ErrLocked))

	journal, err := outbox.NewJournal(store, outbox.JournalOptions{})
	if err != nil {
		log.Fatal(err)
	}
	for i := range 2 {
		_, err := journal.Add(context.Background(), outbox.Message{Key: fmt.Sprint(i)})
		fmt.Println("full:", errors.Is(err, filestore.ErrFull))
	}
	// Output:
	// in use: true
	// full: false
	// full: true
}
