package sink

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Row is the state of one key, as an outbox entry carries it.
type Row struct {
	Key     string // not empty, valid UTF-8 without NUL
	Version int64  // at least 1
	// Payload is kept byte for byte; nil (NULL) and empty are told apart. With
	// Options.Columns it is a JSON object. Not looked at where Deleted is true.
	Payload []byte
	Deleted bool // the key is gone: keep a tombstone with this version
}

// JSON makes a Row of an entry's fields, with value as JSON for payload:
//
//	row, err := sink.JSON(e.Key, e.Version, e.Deleted, e.Value)
//
// The value of a deleted key is not encoded. It returns what json.Marshal does.
func JSON[V ~int64 | ~int](key string, version V, deleted bool, value any) (Row, error) {
	row := Row{Key: key, Version: int64(version), Deleted: deleted}
	if deleted {
		return row, nil
	}
	payload, err := json.Marshal(value)
	if err != nil {
		return Row{}, fmt.Errorf("sink: encode the value of key %q: %w", key, err)
	}
	row.Payload = payload
	return row, nil
}

// numbered is a row and its place in the caller's slice.
type numbered struct {
	Row
	index int
}

// arrange returns the rows to write and those that cannot be. The rows to
// write are sorted by key, because two relays that lock the same keys in
// different orders deadlock; and a key is there once, with its highest version
// (of equal ones the last), because Postgres refuses to change a row twice in
// one statement (SQLSTATE 21000).
func (s *Sink) arrange(given []Row) (rows []numbered, refused []RowError) {
	rows = make([]numbered, 0, len(given))
	for i, r := range given {
		if err := s.check(r); err != nil {
			refused = append(refused, RowError{Index: i, Key: r.Key, Err: err})
			continue
		}
		if r.Deleted {
			r.Payload = nil
		}
		rows = append(rows, numbered{r, i})
	}
	slices.SortFunc(rows, func(a, b numbered) int {
		return cmp.Or(strings.Compare(a.Key, b.Key), cmp.Compare(b.Version, a.Version), b.index-a.index)
	})
	rows = slices.CompactFunc(rows, func(a, b numbered) bool { return a.Key == b.Key })
	return rows, refused
}

func (s *Sink) check(r Row) error {
	switch {
	case r.Key == "":
		return fmt.Errorf("%w: key is empty", ErrInvalid)
	case !utf8.ValidString(r.Key) || strings.ContainsRune(r.Key, 0):
		return fmt.Errorf("%w: key is not valid UTF-8 without NUL", ErrInvalid)
	case r.Version < 1:
		return fmt.Errorf("%w: version %d is below 1", ErrInvalid, r.Version)
	case r.Deleted || len(s.options.Columns) == 0:
		return nil
	}
	if err := checkObject(r.Payload); err != nil {
		return fmt.Errorf("%w: payload %w, which Options.Columns needs", ErrInvalid, err)
	}
	return nil
}

// checkObject says why payload is not a JSON object in valid UTF-8.
func checkObject(payload []byte) error {
	switch {
	case !bytes.HasPrefix(bytes.TrimLeft(payload, " \t\r\n"), []byte("{")), !json.Valid(payload):
		return errors.New("is not a JSON object")
	case !utf8.Valid(payload):
		return errors.New("is not UTF-8")
	}
	return nil
}

// chunks cuts rows into runs of at most maxRows rows and, but for a single
// larger row, maxBytes bytes of keys and payloads.
func chunks(rows []numbered, maxRows, maxBytes int) [][]numbered {
	var cut [][]numbered
	start, size := 0, 0
	for i, r := range rows {
		n := len(r.Key) + len(r.Payload)
		if i > start && (i-start == maxRows || size+n > maxBytes) {
			cut = append(cut, rows[start:i])
			start, size = i, 0
		}
		size += n
	}
	if start < len(rows) {
		cut = append(cut, rows[start:])
	}
	return cut
}
