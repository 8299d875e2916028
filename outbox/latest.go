package outbox

import (
	"context"
	"database/sql"
	"fmt"
	"time"
)

// LatestOptions are what the staging process and the relaying process must
// agree on. The zero value works.
type LatestOptions[T any] struct {
	// Channel partitions everything: the same key in two channels is two keys.
	// 1 to 128 bytes of valid UTF-8 without NUL. Defaults to DefaultChannel.
	Channel string
	// Codec makes the payload of a value. Defaults to JSON.
	Codec Codec[T]
	// BatchDelay rounds the first publication of a value up to the next
	// multiple of itself since the Unix epoch, so that values staged in one
	// window go out together. At most a year. Defaults to 0: due at once.
	BatchDelay time.Duration
	// MaxPayload bounds a payload, in bytes. Defaults to 1 MiB.
	MaxPayload int
	// Headers adds to the headers of each staged value, from the context given
	// to Stage: a trace, a tenant. h holds the item's own. Defaults to none.
	Headers func(ctx context.Context, h Header)
}

// Latest keeps the newest value per key of one channel, until a [Relay] has
// published it. A value that is replaced before it was published may never be
// published: use it for state, never for events. It is safe for concurrent use.
type Latest[T any] struct {
	store LatestStore
	o     LatestOptions[T]
}

// NewLatest checks o and returns a Latest over s. It does no I/O. Errors are
// ErrInvalid.
func NewLatest[T any](s LatestStore, o LatestOptions[T]) (*Latest[T], error) {
	if o.Channel == "" {
		o.Channel = DefaultChannel
	}
	if o.Codec == nil {
		o.Codec = jsonCodec[T]{}
	}
	if err := o.check(s); err != nil {
		return nil, fmt.Errorf("outbox: open latest: %w", err)
	}
	if o.MaxPayload == 0 {
		o.MaxPayload = defaultMaxPayload
	}
	return &Latest[T]{store: s, o: o}, nil
}

func (o LatestOptions[T]) check(s LatestStore) error {
	if s == nil {
		return invalid("store is nil")
	}
	if o.MaxPayload < 0 {
		return invalid("MaxPayload is %d", o.MaxPayload)
	}
	if err := checkRange("BatchDelay", o.BatchDelay, 0, maxBatchDelay); err != nil {
		return err
	}
	return ValidChannel(o.Channel)
}

// Stage replaces the pending value of key, as part of tx, and returns its
// version. What is refused is refused before anything is written: ErrInvalid
// for a bad key, header or payload, or a value that cannot be encoded, ErrTx for a transaction that is nil or
// finished. An outbox that is not installed is ErrSchema. The driver's error
// stays reachable with errors.As; after one, roll back.
func (l *Latest[T]) Stage(ctx context.Context, tx *sql.Tx, key string, v T) (Version, error) {
	return l.stageOne(ctx, SQL(tx), Item[T]{Key: key, Value: v})
}

// StageDelete replaces the pending value of key by a tombstone: the sink is to
// learn, guarded by the version like any state, that key is gone. Errors are
// those of [Latest.Stage].
func (l *Latest[T]) StageDelete(ctx context.Context, tx *sql.Tx, key string) (Version, error) {
	return l.stageOne(ctx, SQL(tx), Item[T]{Key: key, Deleted: true})
}

// StageMany stages any number of items and returns their versions in the order
// of items. A key given twice keeps its last value, whose version is returned
// for both. Keys are locked in sorted order, so that calls do not deadlock
// each other. Errors are those of [Latest.Stage]; nothing is written if any
// item is refused. No items is no call.
func (l *Latest[T]) StageMany(ctx context.Context, tx *sql.Tx, items []Item[T]) ([]Version, error) {
	return l.stageAll(ctx, SQL(tx), items)
}

// StageIn is [Latest.StageMany] for a transaction of any kind; see [Tx].
func (l *Latest[T]) StageIn(ctx context.Context, tx Tx, items ...Item[T]) ([]Version, error) {
	return l.stageAll(ctx, tx, items)
}

// Pending returns what waits to be published for key: as tx sees it, or as
// committed where tx is nil. ErrNotFound where nothing waits. Where the value
// cannot be decoded, the entry is returned without it beside the error, so
// that it can be discarded.
func (l *Latest[T]) Pending(ctx context.Context, tx Tx, key string) (Entry[T], error) {
	if err := checkKey(key); err != nil {
		return Entry[T]{}, fmt.Errorf("outbox: read %s: %w", l.name(key), err)
	}
	row, err := l.store.PendingRow(ctx, tx, l.o.Channel, key)
	if err != nil {
		return Entry[T]{}, fmt.Errorf("outbox: %w", err)
	}
	e := entryOf[T](row)
	if err := l.decode(row, &e); err != nil {
		return e, fmt.Errorf("outbox: read %s: %w", l.name(key), err)
	}
	return e, nil
}

// Discard deletes what waits for key, published or not, if it is still version
// v: for a value that can never be published. ErrLeaseLost if it was staged
// again meanwhile, ErrNotFound if nothing waits, ErrBusy if a transaction
// holds it. The sink is told nothing.
func (l *Latest[T]) Discard(ctx context.Context, key string, v Version) error {
	err := checkKey(key)
	if err == nil && v <= 0 {
		err = invalid("version is %d", v)
	}
	if err != nil {
		return fmt.Errorf("outbox: discard %s: %w", l.name(key), err)
	}
	if err := l.store.DiscardRow(ctx, l.o.Channel, key, v); err != nil {
		return fmt.Errorf("outbox: %w", err)
	}
	return nil
}

// EntryInfo tells about a waiting entry without its value.
type EntryInfo struct {
	Key        string
	Version    Version
	Deleted    bool
	Attempt    int       // claims of this version
	StagedAt   time.Time // by the store's clock, like the other times
	Due        time.Time
	LeaseUntil time.Time // zero: not leased
	LastError  string
}

const (
	defaultListLimit = 100
	maxListLimit     = 10_000
)

// List returns up to limit waiting entries in the order of their keys, from
// the first key greater than after; "" starts at the beginning. A limit of 0
// is 100, at most 10,000 are allowed. It reads what is committed.
func (l *Latest[T]) List(ctx context.Context, after string, limit int) ([]EntryInfo, error) {
	setDefault(&limit, defaultListLimit)
	err := checkCount("limit", limit, maxListLimit)
	if err == nil && after != "" {
		err = checkKey(after)
	}
	if err != nil {
		return nil, fmt.Errorf("outbox: list channel %q: %w", l.o.Channel, err)
	}
	rows, err := l.store.ListRows(ctx, l.o.Channel, after, limit)
	if err != nil {
		return nil, fmt.Errorf("outbox: %w", err)
	}
	infos := make([]EntryInfo, len(rows))
	for i, r := range rows {
		infos[i] = EntryInfo{
			Key: r.Key, Version: r.Version, Deleted: r.Deleted, Attempt: r.Attempt,
			StagedAt: r.StagedAt, Due: r.Due, LeaseUntil: r.LeaseUntil, LastError: r.LastError,
		}
	}
	return infos, nil
}

// name names a key in an error.
func (l *Latest[T]) name(key string) string { return nameOf(key, l.o.Channel) }
