package sink_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/sink"
)

// versionHeader carries the version of the state in a request's body.
const versionHeader = "Resource-Version"

// receiver applies PUT and DELETE of /{key} where their version is newer than
// what it has, and answers 412 where it is not.
func receiver(s *sink.Sink) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		version, err := strconv.ParseInt(r.Header.Get(versionHeader), 10, 64)
		if err != nil {
			http.Error(w, versionHeader+" is missing or not a number", http.StatusBadRequest)
			return
		}
		body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 1<<20))
		if err != nil {
			http.Error(w, "body cannot be read", http.StatusBadRequest)
			return
		}
		result, err := s.Apply(r.Context(), []sink.Row{{
			Key: r.URL.Path[1:], Version: version, Payload: body, Deleted: r.Method == http.MethodDelete,
		}})
		var refused *sink.RowsError
		switch {
		case errors.As(err, &refused):
			http.Error(w, "state is refused", http.StatusUnprocessableEntity)
		case err != nil:
			http.Error(w, "try again", http.StatusServiceUnavailable)
		case result.Stale > 0:
			w.WriteHeader(http.StatusPreconditionFailed)
		default:
			w.WriteHeader(http.StatusNoContent)
		}
	})
}

// send publishes one row. It returns nil where the receiver has this state or a
// newer one. In a publish function a 429 or 503 becomes an outbox.RetryAfter,
// another 4xx an outbox.Permanent, and a refused connection an outbox.Unavailable.
func send(ctx context.Context, client *http.Client, base string, row sink.Row) error {
	method, body := http.MethodPut, row.Payload
	if row.Deleted {
		method, body = http.MethodDelete, nil
	}
	req, err := http.NewRequestWithContext(ctx, method, base+"/"+url.PathEscape(row.Key), bytes.NewReader(body))
	if err != nil {
		return err
	}
	req.Header.Set(versionHeader, strconv.FormatInt(row.Version, 10))
	req.Header.Set("Idempotency-Key", fmt.Sprintf("%q", fmt.Sprintf("%s/%d", url.PathEscape(row.Key), row.Version)))
	resp, err := client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10)) // lets the connection be used again
	switch {
	case resp.StatusCode/100 == 2:
		return nil
	case resp.StatusCode == http.StatusConflict, resp.StatusCode == http.StatusPreconditionFailed:
		return nil // stale: a newer version is there
	}
	return fmt.Errorf("%s: %s", method, resp.Status)
}

// Both ends of a guarded publication over HTTP.
func Example_http() {
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
	server := httptest.NewServer(receiver(s))
	defer server.Close()

	for _, row := range []sink.Row{
		{Key: "acc/1", Version: 8, Payload: []byte(`{"cents":100}`)},
		{Key: "acc/1", Version: 9, Payload: []byte(`{"cents":250}`)},
		{Key: "acc/1", Version: 8, Payload: []byte(`{"cents":100}`)}, // late
	} {
		if err := send(ctx, server.Client(), server.URL, row); err != nil {
			log.Fatal(err)
		}
	}
	row, err := s.Get(ctx, "acc/1")
	fmt.Println(row.Version, string(row.Payload), err)
	// Output: 9 {"cents":250} <nil>
}
