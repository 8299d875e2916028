package outbox

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"math"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestNewLatestRefusesBadOptions(t *testing.T) {
	s := newFakeStore()
	for name, c := range map[string]struct {
		s    LatestStore
		o    LatestOptions[int]
		want string
	}{
		"nil store":        {nil, LatestOptions[int]{}, "store is nil"},
		"channel too long": {s, LatestOptions[int]{Channel: strings.Repeat("x", 129)}, "129 bytes"},
		"channel UTF-8":    {s, LatestOptions[int]{Channel: "a\xff"}, "valid UTF-8"},
		"channel NUL":      {s, LatestOptions[int]{Channel: "a\x00"}, "NUL"},
		"delay":            {s, LatestOptions[int]{BatchDelay: -1}, "BatchDelay"},
		"delay huge":       {s, LatestOptions[int]{BatchDelay: maxBatchDelay + 1}, "BatchDelay"},
		"payload":          {s, LatestOptions[int]{MaxPayload: -1}, "MaxPayload"},
	} {
		t.Run(name, func(t *testing.T) {
			l, err := NewLatest(c.s, c.o)
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorContains(t, err, c.want)
			require.Nil(t, l)
		})
	}
	l, err := NewLatest(s, LatestOptions[int]{})
	require.NoError(t, err)
	require.Equal(t, "default", l.o.Channel)
	require.Zero(t, s.count(""), "no I/O")
}

func TestStageRefusesBadInputBeforeTheStoreIsCalled(t *testing.T) {
	for name, c := range map[string]struct {
		item Item[string]
		want string
	}{
		"empty key":       {Item[string]{}, "key is empty"},
		"long key":        {Item[string]{Key: strings.Repeat("k", 513)}, "513 bytes"},
		"key UTF-8":       {Item[string]{Key: "\xff"}, "valid UTF-8"},
		"key NUL":         {Item[string]{Key: "a\x00b"}, "NUL"},
		"payload":         {Item[string]{Key: "a", Value: strings.Repeat("x", 99)}, "payload has 101 bytes, at most 100 are allowed"},
		"header empty":    {Item[string]{Key: "a", Header: Header{"": "x"}}, "header name is empty"},
		"header reserved": {Item[string]{Key: "a", Header: Header{"outbox-x": "x"}}, "reserved"},
		"header UTF-8":    {Item[string]{Key: "a", Header: Header{"\xff": "x"}}, "valid UTF-8"},
		"header NUL":      {Item[string]{Key: "a", Header: Header{"a\x00": "x"}}, "NUL"},
		"value UTF-8":     {Item[string]{Key: "a", Header: Header{"a": "\xff"}}, "valid UTF-8"},
		"value NUL":       {Item[string]{Key: "a", Header: Header{"a": "\x00"}}, "NUL"},
		"header size":     {Item[string]{Key: "a", Header: Header{"a": strings.Repeat("x", 8192)}}, "8192 bytes"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newFakeStore()
			l, err := NewLatest(s, LatestOptions[string]{MaxPayload: 100})
			require.NoError(t, err)
			_, err = l.StageIn(t.Context(), committed{}, Item[string]{Key: "good"}, c.item)
			require.ErrorIs(t, err, ErrInvalid)
			require.ErrorContains(t, err, c.want)
			require.Less(t, len(err.Error()), 400)
			require.Zero(t, s.count(""))
		})
	}
}

func TestStageAcceptsWhatIsJustWithinTheLimits(t *testing.T) {
	s := newFakeStore()
	l, err := NewLatest(s, LatestOptions[string]{Channel: strings.Repeat("c", 128), MaxPayload: 100, BatchDelay: maxBatchDelay})
	require.NoError(t, err)
	_, err = l.StageIn(t.Context(), committed{}, Item[string]{
		Key: strings.Repeat("k", 512), Value: strings.Repeat("x", 98), Header: Header{"ab": strings.Repeat("x", 8190-1), "c": ""},
	})
	require.NoError(t, err)
}

func TestStageRefusesANilTransaction(t *testing.T) {
	s := newFakeStore()
	l, err := NewLatest(s, LatestOptions[string]{})
	require.NoError(t, err)
	_, err = l.Stage(t.Context(), nil, "a", "b")
	require.ErrorIs(t, err, ErrTx)
	_, err = l.StageDelete(t.Context(), nil, "a")
	require.ErrorIs(t, err, ErrTx)
	_, err = l.StageMany(t.Context(), nil, nil)
	require.ErrorIs(t, err, ErrTx)
	_, err = l.StageIn(t.Context(), nil)
	require.ErrorIs(t, err, ErrTx)
	require.Zero(t, s.count(""))
}

func TestStageManySortsKeysAndAnswersInInputOrder(t *testing.T) {
	s := newFakeStore()
	l, err := NewLatest(s, LatestOptions[string]{})
	require.NoError(t, err)
	in := []string{"b", "ä", "a", "B", "b", "aa", "a"}
	items := make([]Item[string], len(in))
	for i, k := range in {
		items[i] = Item[string]{Key: k, Value: fmt.Sprint(i)}
	}
	vs, err := l.StageIn(t.Context(), committed{}, items...)
	require.NoError(t, err)
	require.Len(t, s.staged, 1)
	var order, values []string
	for _, r := range s.staged[0] {
		order, values = append(order, r.Key), append(values, string(r.Payload))
	}
	require.Equal(t, []string{"B", "a", "aa", "b", "ä"}, order, "bytewise")
	require.Equal(t, []string{`"3"`, `"6"`, `"5"`, `"4"`, `"1"`}, values, "a key given twice keeps its last value")
	require.Len(t, vs, 7)
	for i, k := range in {
		row, ok := s.row("default", k)
		require.True(t, ok)
		require.Equal(t, row.Version, vs[i])
	}
}

// Field case S71.
func TestStageManyTakesAnyNumberInSortedChunks(t *testing.T) {
	for _, n := range []int{0, 1, 2, 9_999, 10_000, 10_001, 66_000} {
		s := newFakeStore()
		l, err := NewLatest(s, LatestOptions[string]{})
		require.NoError(t, err)
		items := make([]Item[string], n)
		for i := range items {
			items[i].Key = fmt.Sprint(i * 7919 % max(n, 1))
		}
		vs, err := l.StageIn(t.Context(), committed{}, items...)
		require.NoError(t, err)
		require.Len(t, vs, n)
		require.Equal(t, (n+stageChunkRows-1)/stageChunkRows, len(s.staged), "no items is no call")
		last := ""
		for _, chunk := range s.staged {
			require.LessOrEqual(t, len(chunk), stageChunkRows)
			for _, r := range chunk {
				require.Greater(t, r.Key, last, "sorted over all chunks")
				last = r.Key
			}
		}
	}
}

func TestStageManyBoundsTheBytesOfAChunk(t *testing.T) {
	s := newFakeStore()
	l, err := NewLatest(s, LatestOptions[string]{})
	require.NoError(t, err)
	items := make([]Item[string], 50)
	value := strings.Repeat("x", 1<<20-2)
	for i := range items {
		items[i] = Item[string]{Key: keys(50)[i], Value: value}
	}
	_, err = l.StageIn(t.Context(), committed{}, items...)
	require.NoError(t, err)
	require.Len(t, s.staged, 4)
	require.Len(t, s.staged[0], 16)
	require.Len(t, s.staged[3], 2)
}

func TestStageErrorsKeepTheStoresAndNeverTheValue(t *testing.T) {
	s := newFakeStore()
	s.fault = failing("stage")
	l, err := NewLatest(s, LatestOptions[any]{Channel: "c"})
	require.NoError(t, err)
	_, err = l.StageIn(t.Context(), committed{}, Item[any]{Key: "a", Value: "secret"})
	require.ErrorIs(t, err, errDown)
	for name, v := range map[string]any{
		"unsupported": map[string]any{"secret": make(chan int)}, "not a number": math.NaN(), "marshaler": touchy{},
	} {
		_, err = l.StageIn(t.Context(), committed{}, Item[any]{Key: "the key", Value: v})
		require.Error(t, err, name)
		require.ErrorContains(t, err, `outbox: stage key "the key" of channel "c": invalid argument: encode JSON: `)
		require.NotContains(t, err.Error(), "secret")
	}
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorAs(t, err, new(*codecError))
	require.Equal(t, 1, s.count("stage"), "before anything is written")
}

type touchy struct{}

func (touchy) MarshalJSON() ([]byte, error) { return nil, errors.New("secret") }

func TestTombstoneHasNoPayloadAndNeedsNoCodec(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		l, err := NewLatest(g.store, LatestOptions[string]{Channel: "d", Codec: noCodec{}})
		require.NoError(t, err)
		_, err = l.StageIn(t.Context(), committed{}, Item[string]{Key: "a", Value: "ignored", Deleted: true, Header: Header{"x": "y"}})
		require.NoError(t, err)
		var got []*Entry[string]
		r := g.newRelay(RelayOptions{}, l.Publisher(func(_ context.Context, b []*Entry[string]) error { got = b; return nil }, PublishOptions{}))
		_, err = r.RunOnce(t.Context())
		require.NoError(t, err)
		require.Len(t, got, 1)
		require.True(t, got[0].Deleted)
		require.Zero(t, got[0].Value)
		require.Equal(t, Header{"x": "y"}, got[0].Header)
	})
}

type noCodec struct{}

func (noCodec) Encode(Header, string) ([]byte, error) { panic("called") }
func (noCodec) Decode(Header, []byte) (string, error) { panic("called") }

func TestCodecThatPanicsMakesAnUnreadableEntry(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, nil)
		g.stage("a")
		l, err := NewLatest(g.store, LatestOptions[string]{Channel: "c", Codec: noCodec{}})
		require.NoError(t, err)
		r := g.newRelay(RelayOptions{}, l.Publisher(g.record(nil), PublishOptions{}))
		pass, err := r.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 1, Retried: 1}, pass)
		e, err := l.Pending(t.Context(), nil, "a")
		require.ErrorContains(t, err, `read key "a" of channel "c": decode value: codec panicked with string`)
		require.Equal(t, "a", e.Key)
		require.Positive(t, e.Version)
		require.Equal(t, 1, e.Attempt)
	})
}

func TestHeadersComeFromItemContextAndCodec(t *testing.T) {
	type ctxKey struct{}
	s := newFakeStore()
	l, err := NewLatest(s, LatestOptions[[]byte]{
		Codec:   rawCodec{},
		Headers: func(ctx context.Context, h Header) { h["trace"] = ctx.Value(ctxKey{}).(string) },
	})
	require.NoError(t, err)
	own := Header{"tenant": "t"}
	ctx := context.WithValue(t.Context(), ctxKey{}, "abc")
	_, err = l.StageIn(ctx, committed{}, Item[[]byte]{Key: "a", Value: []byte("x"), Header: own}, Item[[]byte]{Key: "b", Deleted: true})
	require.NoError(t, err)
	require.Equal(t, Header{"tenant": "t"}, own, "the caller's is not changed")
	require.Equal(t, Header{"tenant": "t", "trace": "abc", "content-type": "raw"}, s.staged[0][0].Header)
	require.Equal(t, Header{"trace": "abc"}, s.staged[0][1].Header)
}

type rawCodec struct{}

func (rawCodec) Encode(h Header, v []byte) ([]byte, error) { h["content-type"] = "raw"; return v, nil }
func (rawCodec) Decode(_ Header, p []byte) ([]byte, error) { return p, nil }

func TestNoHeadersAreNil(t *testing.T) {
	s := newFakeStore()
	l, err := NewLatest(s, LatestOptions[string]{Headers: func(context.Context, Header) {}})
	require.NoError(t, err)
	_, err = l.StageIn(t.Context(), committed{}, Item[string]{Key: "a", Header: Header{}})
	require.NoError(t, err)
	require.Nil(t, s.staged[0][0].Header)
}

// Field case S66.
func TestJSONKeepsNumbersAndCharacters(t *testing.T) {
	type value struct {
		Max  int64
		Big  uint64
		F    float64
		HTML string
	}
	in := value{math.MaxInt64, 1<<53 + 1, 0.1, "<a href=\"x\">&\u2028</a>"}
	b, err := jsonCodec[value]{}.Encode(nil, in)
	require.NoError(t, err)
	require.Contains(t, string(b), `<a href=`)
	require.Contains(t, string(b), `9223372036854775807`)
	require.False(t, bytes.HasSuffix(b, []byte("\n")))
	out, err := jsonCodec[value]{}.Decode(nil, b)
	require.NoError(t, err)
	require.Equal(t, in, out)
}

func TestJSONErrorsNeverQuoteTheValue(t *testing.T) {
	type value struct {
		N int8
		T time.Time
	}
	for _, payload := range []string{
		``, `{`, `{"N":7777777}`, `{"N":"7777777"}`, `{"T":"7777777"}`, `"7777777"`, `{} 7777777`, `7777777`,
	} {
		_, err := jsonCodec[value]{}.Decode(nil, []byte(payload))
		require.Error(t, err, payload)
		require.ErrorContains(t, err, "decode JSON: ")
		require.NotContains(t, err.Error(), "777", payload)
	}
}

func TestPendingDiscardAndListRefuseBadInput(t *testing.T) {
	s := newFakeStore()
	l, err := NewLatest(s, LatestOptions[string]{})
	require.NoError(t, err)
	ctx := t.Context()
	_, err = l.Pending(ctx, nil, "")
	require.ErrorIs(t, err, ErrInvalid)
	require.ErrorIs(t, l.Discard(ctx, "", 1), ErrInvalid)
	require.ErrorIs(t, l.Discard(ctx, "a", 0), ErrInvalid)
	require.ErrorIs(t, l.Discard(ctx, strings.Repeat("x", 1<<20), 1), ErrInvalid)
	require.ErrorIs(t, l.Discard(ctx, "a", 1), ErrNotFound)
	for _, limit := range []int{-1, 10_001, math.MaxInt, math.MinInt} {
		_, err = l.List(ctx, "", limit)
		require.ErrorIs(t, err, ErrInvalid)
	}
	_, err = l.List(ctx, "\xff", 1)
	require.ErrorIs(t, err, ErrInvalid)
	_, err = l.Pending(ctx, nil, "a")
	require.ErrorIs(t, err, ErrNotFound)
}

func TestPendingReturnsTheEntry(t *testing.T) {
	s := newFakeStore()
	l, err := NewLatest(s, LatestOptions[string]{})
	require.NoError(t, err)
	vs, err := l.StageIn(t.Context(), committed{}, Item[string]{Key: "a", Value: "b", Header: Header{"x": "y"}})
	require.NoError(t, err)
	e, err := l.Pending(t.Context(), nil, "a")
	require.NoError(t, err)
	require.Equal(t, Entry[string]{Key: "a", Version: vs[0], Value: "b", Header: Header{"x": "y"}, StagedAt: e.StagedAt}, e)
	e.Retry(0) // outside a publication marks do nothing
	e.Fail(nil)
	require.ErrorIs(t, l.Discard(t.Context(), "a", vs[0]+1), ErrLeaseLost)
	require.NoError(t, l.Discard(t.Context(), "a", vs[0]))
}

func TestMarksAreSafeForConcurrentUse(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := newRig(t, RelayOptions{}, PublishOptions{}, func(_ context.Context, b []*Entry[string]) error {
			done := make(chan struct{})
			for _, e := range b {
				go func() {
					e.Retry(time.Hour)
					e.Fail(errSink)
					done <- struct{}{}
				}()
			}
			for range b {
				<-done
			}
			return nil
		})
		g.stage(keys(40)...)
		pass, err := g.relay.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, Pass{Claimed: 40, Retried: 40}, pass)
		row, _ := g.store.row("c", "k00000")
		require.Equal(t, "sink says no", row.LastError, "the last mark counts")
	})
}
