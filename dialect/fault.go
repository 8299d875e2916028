package dialect

import "errors"

// A Fault is what an error of a driver means, asked of what the error is,
// never of what it says.
type Fault uint8

const (
	FaultOther     Fault = iota // none of the below: a lost connection, a full disk, a bug
	FaultRetry                  // nothing happened: the same transaction may work if it is run again
	FaultBusy                   // SQLite: another connection is writing
	FaultSchema                 // a table, function or schema is missing or other than expected
	FaultAborted                // the transaction is lost to an earlier error
	FaultGrant                  // the role may not do this
	FaultReadOnly               // the server or the transaction takes no writes
	FaultOtherKind              // the error of another kind of database
	FaultAnswered               // the server refused it in any other way: nothing happened
)

// Classify says what an error of this dialect's driver means.
func (d Dialect) Classify(err error) Fault { return d.engine.classify(err) }

// sqlState returns the SQLSTATE of err, as pgx and other Postgres drivers give it.
func sqlState(err error) (string, bool) {
	var s interface{ SQLState() string }
	if errors.As(err, &s) {
		return s.SQLState(), true
	}
	return "", false
}

// resultCode returns the extended result code of err, as modernc.org/sqlite gives it.
func resultCode(err error) (int, bool) {
	var c interface{ Code() int }
	if errors.As(err, &c) {
		return c.Code(), true
	}
	return 0, false
}
