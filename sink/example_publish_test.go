package sink_test

import (
	"context"
	"errors"
	"fmt"
	"log"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

type account struct {
	Owner string
	Cents int64
}

// publishTo returns the publish function of a channel whose sink is a table:
// what outbox.Latest.Publisher takes.
func publishTo(s *sink.Sink) outbox.PublishFunc[account] {
	return func(ctx context.Context, batch []*outbox.Entry[account]) error {
		rows := make([]sink.Row, len(batch))
		for i, e := range batch {
			var err error
			if rows[i], err = sink.JSON(e.Key, e.Version, e.Deleted, e.Value); err != nil {
				return err
			}
		}
		_, err := s.Apply(ctx, rows)
		var refused *sink.RowsError
		switch {
		case errors.As(err, &refused): // the others are written
			for i := range refused.Rows {
				batch[refused.Rows[i].Index].Fail(outbox.Permanent(&refused.Rows[i]))
			}
			return nil
		case errors.Is(err, sink.ErrTable):
			return outbox.Unavailable(err) // pauses the channel until someone has mended the table
		}
		return err
	}
}

// A publish function that keeps a table up to date.
func Example_publish() {
	ctx := context.Background()
	db, done := exampleDB()
	defer done()
	s, err := sink.New(db, dialect.SQLite(), sink.Options{Table: "accounts"})
	if err != nil {
		log.Fatal(err)
	}
	if err := s.Create(ctx); err != nil {
		log.Fatal(err)
	}
	publish := publishTo(s)
	newer := []*outbox.Entry[account]{{Key: "ada", Version: 9, Value: account{"Ada", 250}}, {Key: "bob", Version: 4, Deleted: true}}
	older := []*outbox.Entry[account]{{Key: "ada", Version: 8, Value: account{"Ada", 100}}, {Key: "bob", Version: 3}}
	fmt.Println(publish(ctx, newer), publish(ctx, older))

	ada, err := s.Get(ctx, "ada")
	fmt.Println(ada.Version, string(ada.Payload), err)
	bob, err := s.Get(ctx, "bob")
	fmt.Println(bob.Version, bob.Deleted, err)
	// Output:
	// <nil> <nil>
	// 9 {"Owner":"Ada","Cents":250} <nil>
	// 4 true <nil>
}
