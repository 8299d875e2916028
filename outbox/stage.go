package outbox

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// What one call of StageRows is given at most. A single row may be larger.
const (
	stageChunkRows  = 10_000
	stageChunkBytes = 16 << 20
)

func (l *Latest[T]) stageOne(ctx context.Context, tx Tx, it Item[T]) (Version, error) {
	vs, err := l.stageAll(ctx, tx, []Item[T]{it})
	if err != nil {
		return 0, err
	}
	return vs[0], nil
}

func (l *Latest[T]) stageAll(ctx context.Context, tx Tx, items []Item[T]) ([]Version, error) {
	if tx == nil {
		return nil, fmt.Errorf("outbox: stage in channel %q: %w: it is nil", l.o.Channel, ErrTx)
	}
	rows := make([]StageRow, len(items))
	for i := range items {
		var err error
		if rows[i], err = l.encode(ctx, &items[i]); err != nil {
			return nil, fmt.Errorf("outbox: stage %s: %w", l.name(items[i].Key), err)
		}
	}
	vs, err := l.stageRows(ctx, tx, rows)
	if err != nil {
		return nil, fmt.Errorf("outbox: %w", err) // the store names key and channel
	}
	return vs, nil
}

// encode makes the row of an item, or says why it is refused.
func (l *Latest[T]) encode(ctx context.Context, it *Item[T]) (StageRow, error) {
	row := StageRow{Key: it.Key, Deleted: it.Deleted}
	if err := checkKey(it.Key); err != nil {
		return row, err
	}
	_, plain := l.o.Codec.(jsonCodec[T])
	if len(it.Header) > 0 || l.o.Headers != nil || !plain {
		row.Header = make(Header, len(it.Header))
		maps.Copy(row.Header, it.Header)
	}
	if l.o.Headers != nil {
		l.o.Headers(ctx, row.Header)
	}
	if !it.Deleted {
		var err error
		if row.Payload, err = l.o.Codec.Encode(row.Header, it.Value); err != nil {
			return row, fmt.Errorf("%w: %w", ErrInvalid, err)
		}
	}
	if len(row.Payload) > l.o.MaxPayload {
		return row, invalid("payload has %d bytes, at most %d are allowed", len(row.Payload), l.o.MaxPayload)
	}
	if len(row.Header) == 0 {
		row.Header = nil
	}
	return row, checkHeader(row.Header)
}

// stageRows hands rows to the store, distinct and in sorted order, in chunks,
// and returns the versions in the order of rows. The order is global: a chunk
// holds its locks while the next one takes its own.
func (l *Latest[T]) stageRows(ctx context.Context, tx Tx, rows []StageRow) ([]Version, error) {
	if len(rows) <= 1 {
		return l.stageChunk(ctx, tx, rows)
	}
	order := make([]int, len(rows))
	for i := range order {
		order[i] = i
	}
	slices.SortFunc(order, func(a, b int) int {
		return cmp.Or(strings.Compare(rows[a].Key, rows[b].Key), cmp.Compare(a, b))
	})
	sorted := make([]StageRow, 0, len(rows))
	place := make([]int, len(rows)) // of each row in sorted
	for _, i := range order {
		if last := len(sorted) - 1; last >= 0 && sorted[last].Key == rows[i].Key {
			sorted[last] = rows[i]
		} else {
			sorted = append(sorted, rows[i])
		}
		place[i] = len(sorted) - 1
	}
	staged := make([]Version, 0, len(sorted))
	for len(sorted) > 0 {
		n := chunkLen(sorted, func(r *StageRow) int { return len(r.Payload) })
		vs, err := l.stageChunk(ctx, tx, sorted[:n])
		if err != nil {
			return nil, err
		}
		staged, sorted = append(staged, vs...), sorted[n:]
	}
	vs := make([]Version, len(rows))
	for i, at := range place {
		vs[i] = staged[at]
	}
	return vs, nil
}

// chunkLen is how many of rows one call is given.
func chunkLen[R any](rows []R, size func(*R) int) int {
	sum := 0
	for i := range rows[:min(len(rows), stageChunkRows)] {
		sum += size(&rows[i])
		if i > 0 && sum > stageChunkBytes {
			return i
		}
	}
	return min(len(rows), stageChunkRows)
}

func (l *Latest[T]) stageChunk(ctx context.Context, tx Tx, rows []StageRow) ([]Version, error) {
	if len(rows) == 0 {
		return nil, nil
	}
	vs, err := l.store.StageRows(ctx, tx, l.o.Channel, rows, l.o.BatchDelay)
	if err != nil {
		return nil, err
	}
	if len(vs) != len(rows) {
		return nil, fmt.Errorf("stage in channel %q: store returned %d versions for %d rows", l.o.Channel, len(vs), len(rows))
	}
	return vs, nil
}
