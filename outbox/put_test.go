package outbox

import (
	"context"
	"database/sql"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestPutRefusesBadInputBeforeAnythingIsWritten(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ok := Message{Key: "ok"}
		for name, m := range map[string]Message{
			"empty key":            {},
			"key too long":         {Key: strings.Repeat("k", 513)},
			"key of bad UTF-8":     {Key: "\xff"},
			"key with NUL":         {Key: "a\x00"},
			"group too long":       {Key: "k", Group: strings.Repeat("g", 513)},
			"group of bad UTF-8":   {Key: "k", Group: "\xff"},
			"payload too large":    {Key: "k", Payload: make([]byte, defaultMaxPayload+1)},
			"reserved header":      {Key: "k", Header: Header{"outbox-x": "1"}},
			"header of bad UTF-8":  {Key: "k", Header: Header{"x": "\xff"}},
			"negative delay":       {Key: "k", Delay: -1},
			"delay over ten years": {Key: "k", Delay: maxPutDelay + 1},
		} {
			_, err := g.journal.PutIn(t.Context(), committed{}, ok, m)
			require.ErrorIs(t, err, ErrInvalid, name)
			_, err = g.journal.Add(t.Context(), m)
			require.ErrorIs(t, err, ErrInvalid, name)
		}
		for _, lease := range []time.Duration{0, -1, minLease - 1, maxLease + 1} {
			_, err := g.journal.PutBegun(t.Context(), nil, ok, lease)
			require.ErrorIs(t, err, ErrInvalid, lease)
		}
		require.Zero(t, g.store.count("put"))
	})
}

func TestPutInNoTransactionIsErrTx(t *testing.T) {
	g := bareJournalRig(t)
	ctx, m := t.Context(), Message{Key: "k"}
	var tx *sql.Tx
	_, err := g.journal.Put(ctx, tx, m)
	require.ErrorIs(t, err, ErrTx)
	_, err = g.journal.PutMany(ctx, tx, []Message{m})
	require.ErrorIs(t, err, ErrTx)
	_, err = g.journal.PutBegun(ctx, tx, m, time.Second)
	require.ErrorIs(t, err, ErrTx)
	_, err = g.journal.PutIn(ctx, nil, m)
	require.ErrorIs(t, err, ErrTx)
	require.Zero(t, g.store.count(""))
}

func TestPutAnswersTheWholeRecord(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		m := Message{Key: "k", Group: "g", Payload: []byte("p"), Header: Header{"h": "1"}, Delay: time.Hour}
		r, err := g.journal.Add(t.Context(), m)
		require.NoError(t, err)
		now := time.Now()
		require.Equal(t, PutResult{Created: true, Record: Record{
			Channel: "c", Key: "k", Group: "g", Seq: 1, Payload: []byte("p"), Header: Header{"h": "1"},
			State: StatePending, CreatedAt: now, Due: now.Add(time.Hour),
		}}, r)
		m.Payload[0], m.Header["h"] = 'X', "2"
		require.Equal(t, []byte("p"), r.Payload, "the record is a copy")
		require.Equal(t, Header{"h": "1"}, r.Header)

		r, err = g.journal.Add(t.Context(), Message{Key: "k", Group: "g", Payload: []byte("p")})
		require.NoError(t, err)
		require.False(t, r.Created)
		require.False(t, r.Differs)
		require.Equal(t, []byte("p"), r.Payload)
		for _, other := range []Message{{Key: "k", Group: "g"}, {Key: "k", Payload: []byte("p")}} {
			r, err = g.journal.Add(t.Context(), other)
			require.NoError(t, err)
			require.True(t, r.Differs)
		}
		r, err = g.journal.Add(t.Context(), Message{Key: "nil"})
		require.NoError(t, err)
		require.Equal(t, []byte{}, r.Payload)
	})
}

func TestPutBegunHoldsOnlyWhatIsNew(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		m := Message{Key: "k"}
		first, err := g.journal.put(t.Context(), committed{}, []Message{m}, time.Second)
		require.NoError(t, err)
		require.NotZero(t, first[0].Lease.Token)
		require.Equal(t, "sending 1", first[0].State.String()+" "+string(rune('0'+first[0].Attempt)))
		again, err := g.journal.put(t.Context(), committed{}, []Message{m}, time.Second)
		require.NoError(t, err)
		require.False(t, again[0].Created)
		require.Zero(t, again[0].Lease.Token, "the lease of another is not handed out")
		require.Equal(t, first[0].Lease.Until, again[0].Lease.Until)
		got, err := g.journal.Get(t.Context(), "k")
		require.NoError(t, err)
		require.Zero(t, got.Lease.Token)
	})
}

func TestPutManyOfOneKeyTwicePutsTheFirst(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		rs, err := g.journal.PutIn(t.Context(), committed{},
			Message{Key: "a", Payload: []byte("1")}, Message{Key: "b"}, Message{Key: "a", Payload: []byte("2")}, Message{Key: "a", Payload: []byte("1")})
		require.NoError(t, err)
		var created, differs []bool
		for _, r := range rs {
			created, differs = append(created, r.Created), append(differs, r.Differs)
		}
		require.Equal(t, []bool{true, true, false, false}, created)
		require.Equal(t, []bool{false, false, true, false}, differs)
		require.Equal(t, rs[0].Seq, rs[2].Seq)
		require.Equal(t, []byte("1"), rs[2].Payload)
		require.Len(t, g.store.puts[0], 2)
	})
}

func TestPutManyGoesInChunksInOneOrderOfLocks(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		ms := make([]Message, stageChunkRows+2)
		for i, k := range keys(len(ms)) {
			ms[len(ms)-1-i] = Message{Key: k}
		}
		ms[0].Group, ms[1].Group = "g", "g"
		rs, err := g.journal.PutIn(t.Context(), committed{}, ms...)
		require.NoError(t, err)
		require.Len(t, g.store.puts, 2)
		for i, r := range rs {
			require.Equal(t, ms[i].Key, r.Key)
		}
		require.Less(t, g.store.puts[0][0].Key, g.store.puts[0][1].Key)
		require.Equal(t, ms[0].Key, g.store.puts[1][0].Key, "groups come last, their messages as given")
		require.Less(t, rs[0].Seq, rs[1].Seq)

		big := []Message{{Key: "x", Payload: make([]byte, 1<<20)}}
		for i := range 17 {
			m := big[0]
			m.Key += string(rune('a' + i))
			big = append(big, m)
		}
		g.store.puts = nil
		_, err = g.journal.PutIn(t.Context(), committed{}, big...)
		require.NoError(t, err)
		require.Len(t, g.store.puts, 2, "no statement of more than 16 MiB")
	})
}

func TestPutAddsHeadersFromTheContext(t *testing.T) {
	bubble(t, func(t *testing.T) {
		g := bareJournalRig(t)
		type tenant struct{}
		j, err := NewJournal(g.store, JournalOptions{Headers: func(ctx context.Context, h Header) {
			if v, ok := ctx.Value(tenant{}).(string); ok {
				h["tenant"] = v
			}
		}})
		require.NoError(t, err)
		r, err := j.Add(context.WithValue(t.Context(), tenant{}, "t1"), Message{Key: "k", Header: Header{"a": "b"}})
		require.NoError(t, err)
		require.Equal(t, Header{"a": "b", "tenant": "t1"}, r.Header)
		r, err = j.Add(t.Context(), Message{Key: "none"})
		require.NoError(t, err)
		require.Nil(t, r.Header)
	})
}

func TestNewJournalRefusesBadOptions(t *testing.T) {
	s := newFakeJournal()
	_, err := NewJournal(nil, JournalOptions{})
	require.ErrorIs(t, err, ErrInvalid)
	for _, o := range []JournalOptions{{Channel: strings.Repeat("c", 129)}, {MaxPayload: -1}} {
		_, err := NewJournal(s, o)
		require.ErrorIs(t, err, ErrInvalid)
	}
}

func TestStatesHaveNames(t *testing.T) {
	for s := StatePending; s <= StateUnknown; s++ {
		parsed, err := ParseState(s.String())
		require.NoError(t, err)
		require.Equal(t, s, parsed)
	}
	_, err := ParseState("gone")
	require.ErrorIs(t, err, ErrInvalid)
	require.Equal(t, "no state", State(0).String())
	require.Equal(t, "not sent", VerdictNotSent.String())
	require.Equal(t, "no verdict", Verdict(9).String())
}
