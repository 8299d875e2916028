package sink

import (
	"errors"
	"fmt"
)

var (
	// ErrInvalid: an option, an argument or a row is refused.
	ErrInvalid = errors.New("invalid argument")
	// ErrTable: the table, a column, its unique index or a grant is missing, or
	// a column has the wrong type. Trying again will not help.
	ErrTable = errors.New("table does not fit")
	// ErrNotFound: the table has neither a value nor a tombstone of the key.
	ErrNotFound = errors.New("key not found")
)

// RowsError names the rows that can never be written: they break a rule of
// [Row], or the database refused their values. [Sink.Apply] has written all
// others of the call; [Sink.ApplyIn] has written none.
type RowsError struct {
	Table string     // quoted, with schema
	Rows  []RowError // by Index; at least one
}

func (e *RowsError) Error() string {
	return fmt.Sprintf("sink: apply to %s: rows refused: %d; the first: %v", e.Table, len(e.Rows), &e.Rows[0])
}

// Unwrap returns the rows' errors.
func (e *RowsError) Unwrap() []error {
	errs := make([]error, len(e.Rows))
	for i := range e.Rows {
		errs[i] = &e.Rows[i]
	}
	return errs
}

// RowError says why one row was refused. Its text never holds the payload,
// not even where the driver's error does.
type RowError struct {
	Index int // in the slice given to Apply
	Key   string
	Err   error // wraps ErrInvalid, or is the driver's
}

func (e *RowError) Error() string {
	return fmt.Sprintf("row %d (key %q): %v", e.Index, e.Key, silence(e.Err))
}

// Unwrap returns Err.
func (e *RowError) Unwrap() error { return e.Err }

// quietError hides the text of an error that quotes a value, and keeps the
// error itself reachable.
type quietError struct {
	text  string
	cause error
}

func (e *quietError) Error() string { return e.text }
func (e *quietError) Unwrap() error { return e.cause }

// silence hides the text of Postgres' data exceptions (SQLSTATE class 22):
// "invalid input syntax for type numeric:" is followed by the value.
func silence(err error) error {
	code := sqlState(err)
	if class(code) != "22" {
		return err
	}
	return &quietError{fmt.Sprintf("a value does not fit its column (SQLSTATE %s)", code), err}
}

// refusesRow tells an error that belongs to one row's values from one that
// belongs to the table or the connection: a data exception, a constraint, a
// trigger's RAISE.
func refusesRow(err error) bool {
	switch class(sqlState(err)) {
	case "22", "23", "P0":
		return true
	}
	switch sqliteCode(err) {
	case sqliteTooBig, sqliteConstraint, sqliteMismatch:
		return true
	}
	return false
}

// explain makes an error of a statement one that says what to do.
func explain(err error) error {
	remedy, ok := map[string]string{
		"42P01": "it does not exist: call Create, or create it in a migration",
		"3F000": "its schema does not exist: create it",
		"42703": "a column of Options is missing: add it",
		"42P10": "there is no unique index on the key column alone: create one",
		"42804": "a column has another type than Options ask for",
		"42501": "the role needs USAGE on the schema and SELECT, INSERT, UPDATE, DELETE on the table",
	}[sqlState(err)]
	if !ok && sqliteCode(err) == sqliteError {
		// A statement of ours that SQLite cannot compile.
		remedy, ok = "the table, a column of Options, or the unique index on the key column is missing: call Create, or change the table", true
	}
	if ok {
		return fmt.Errorf("%w: %s: %w", ErrTable, remedy, err)
	}
	return silence(err)
}

// sqlState returns the SQLSTATE of a Postgres driver's error, or "".
func sqlState(err error) string {
	var e interface{ SQLState() string }
	if errors.As(err, &e) {
		return e.SQLState()
	}
	return ""
}

func class(sqlState string) string {
	if len(sqlState) != 5 {
		return ""
	}
	return sqlState[:2]
}

// Primary result codes of SQLite.
const (
	sqliteError      = 1
	sqliteTooBig     = 18
	sqliteConstraint = 19
	sqliteMismatch   = 20
)

// sqliteCode returns the primary result code of SQLite's driver's error, or 0.
func sqliteCode(err error) int {
	var e interface{ Code() int }
	if errors.As(err, &e) {
		return e.Code() & 0xff
	}
	return 0
}
