package sink_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"sync"

	"github.com/seed-2b36b211/sqloutbox/sink"
)

// object is the body of what is stored: the version is part of it, so that no
// two versions have the same ETag.
type object struct {
	Version int64           `json:"version"`
	Deleted bool            `json:"deleted,omitempty"`
	Value   json.RawMessage `json:"value,omitempty"`
}

// putIfNewer writes row unless the store has its version or a newer one. With
// the SDK of S3 the headers are the fields IfMatch and IfNoneMatch of
// PutObjectInput; with that of Cloud Storage, storage.Conditions.
func putIfNewer(ctx context.Context, client *http.Client, address string, row sink.Row) error {
	body, err := json.Marshal(object{row.Version, row.Deleted, row.Payload})
	if err != nil {
		return err
	}
	for ctx.Err() == nil {
		have, etag, err := getObject(ctx, client, address)
		if err != nil || have.Version >= row.Version {
			return err
		}
		req, err := http.NewRequestWithContext(ctx, http.MethodPut, address, bytes.NewReader(body))
		if err != nil {
			return err
		}
		if etag == "" {
			req.Header.Set("If-None-Match", "*")
		} else {
			req.Header.Set("If-Match", etag)
		}
		resp, err := client.Do(req)
		if err != nil {
			return err // perhaps written: the next attempt finds out
		}
		resp.Body.Close()
		switch resp.StatusCode {
		case http.StatusOK, http.StatusCreated, http.StatusNoContent:
			return nil
		case http.StatusPreconditionFailed, http.StatusConflict, http.StatusNotFound:
			// Somebody was faster: look again.
		default:
			return fmt.Errorf("put object: %s", resp.Status)
		}
	}
	return ctx.Err()
}

// getObject returns a zero object and no ETag where there is none.
func getObject(ctx context.Context, client *http.Client, address string) (have object, etag string, err error) {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return object{}, "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return object{}, "", err
	}
	defer resp.Body.Close()
	switch resp.StatusCode {
	case http.StatusOK:
		err = json.NewDecoder(resp.Body).Decode(&have)
		return have, resp.Header.Get("ETag"), err
	case http.StatusNotFound:
		return object{}, "", nil
	}
	return object{}, "", fmt.Errorf("get object: %s", resp.Status)
}

// Writers that hold every version publish them at once, and the newest stays.
func Example_objectStore() {
	store := httptest.NewServer(&bucket{})
	defer store.Close()
	var wg sync.WaitGroup
	for version := int64(1); version <= 20; version++ {
		wg.Go(func() {
			row := sink.Row{Key: "ada", Version: version, Payload: []byte(`"same value"`)}
			if err := putIfNewer(context.Background(), store.Client(), store.URL+"/ada", row); err != nil {
				log.Fatal(err)
			}
		})
	}
	wg.Wait()
	have, _, err := getObject(context.Background(), store.Client(), store.URL+"/ada")
	fmt.Println(have.Version, err)
	// Output: 20 <nil>
}

// bucket is one object in a store that knows conditional writes. Its ETag is a
// hash of the content, as that of S3 may be.
type bucket struct {
	mu   sync.Mutex
	body []byte
}

func (b *bucket) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	body, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	etag := fmt.Sprintf(`"%x"`, sha256.Sum256(b.body))
	switch match := r.Header.Get("If-Match"); {
	case r.Method == http.MethodGet && b.body == nil:
		w.WriteHeader(http.StatusNotFound)
	case r.Method == http.MethodGet:
		w.Header().Set("ETag", etag)
		w.Write(b.body)
	case match != "" && match != etag, r.Header.Get("If-None-Match") == "*" && b.body != nil:
		w.WriteHeader(http.StatusPreconditionFailed)
	default:
		b.body = body
	}
}
