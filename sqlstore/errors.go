package sqlstore

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"time"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// failed says what was being done when err came, and what to do about it. The
// driver's error stays reachable with errors.As.
func (s *Store) failed(ctx context.Context, err error, format string, args ...any) error {
	if err == nil {
		return nil
	}
	return s.explain(ctx, s.reader(ctx), err, fmt.Sprintf(format, args...))
}

func (s *Store) explain(ctx context.Context, read reader, err error, doing string) error {
	switch fault := s.d.Classify(err); {
	case fault == dialect.FaultSchema && s.d.HostClock():
		if schema := s.checkSchema(ctx, read); schema != nil {
			return fmt.Errorf("%s: %w", doing, schema)
		}
	case fault == dialect.FaultOtherKind:
		return fmt.Errorf("%s: %w", doing, s.otherKind(err))
	case fault == dialect.FaultSchema:
		return fmt.Errorf("%s: %w", doing, s.schemaMissing(err))
	case fault == dialect.FaultGrant:
		return fmt.Errorf("%s: the role lacks a grant, `outbox doctor` tells which: %w", doing, err)
	case fault == dialect.FaultReadOnly && s.d.HostClock():
		return fmt.Errorf("%s: the file or the connection is read-only: look at the file's permissions, and for mode=ro in the DSN: %w", doing, err)
	case fault == dialect.FaultReadOnly:
		return fmt.Errorf("%s: the server or transaction is read-only: connect to the primary: %w", doing, err)
	}
	return fmt.Errorf("%s: %w", doing, cancelled(ctx, err))
}

// inTx is failed for a statement in a caller's transaction. What it has to ask
// it asks in tx: that may be of another database than the store's, or have the
// pool's only connection.
func (s *Store) inTx(ctx context.Context, tx outbox.Tx, err error, format string, args ...any) error {
	doing := fmt.Sprintf(format, args...)
	read := s.readerIn(ctx, tx)
	fault := s.d.Classify(err)
	if fault == dialect.FaultOther && !errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
		// database/sql itself refuses arguments that the driver does not take.
		if s.d.Classify(read(s.d.Installed(), func(outbox.Rows) error { return nil })) == dialect.FaultOtherKind {
			fault = dialect.FaultOtherKind
		}
	}
	switch {
	case errors.Is(err, sql.ErrTxDone), errors.Is(err, sql.ErrConnDone):
		return fmt.Errorf("%s: %w: it has ended already: %w", doing, outbox.ErrTx, cancelled(ctx, err))
	case fault == dialect.FaultAborted:
		return fmt.Errorf("%s: %w: it was aborted by an earlier error: roll it back: %w", doing, outbox.ErrTx, err)
	case fault == dialect.FaultOtherKind:
		return fmt.Errorf("%s: %w: it belongs to another kind of database than %s: %w", doing, outbox.ErrTx, s.d.Name(), err)
	case fault == dialect.FaultBusy:
		return fmt.Errorf("%s: another connection is writing; if this came at once, the transaction had read before it wrote: "+
			"open the database with dialect.SQLiteDSN, or add _txlock=immediate to the DSN: %w", doing, err)
	}
	return s.explain(ctx, read, err, doing)
}

// cancelled adds the reason to an error that only followed from a cancelled
// context: database/sql's watcher races with the caller, and a driver that
// keeps the deadline itself may be ahead of both.
func cancelled(ctx context.Context, err error) error {
	cause := ctx.Err()
	if end, ok := ctx.Deadline(); ok && cause == nil && !time.Now().Before(end) {
		cause = context.DeadlineExceeded
	}
	if cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w (%w)", cause, err)
	}
	return err
}
