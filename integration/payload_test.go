package integration

import (
	"bytes"
	"context"
	crand "crypto/rand"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// verbatim is a codec of bytes as they are.
type verbatim struct{}

func (verbatim) Encode(_ outbox.Header, v []byte) ([]byte, error) { return v, nil }
func (verbatim) Decode(_ outbox.Header, p []byte) ([]byte, error) { return p, nil }

func (s *site) bytesOf(channel string) *outbox.Latest[[]byte] {
	l, err := outbox.NewLatest(s.store, outbox.LatestOptions[[]byte]{Channel: channel, Codec: verbatim{}})
	require.NoError(s.t, err)
	return l
}

// awkward are payloads that some databases, drivers or codecs change (field
// cases S63, S64, S65 and S69).
func awkward() map[string][]byte {
	random := make([]byte, 1<<20)
	crand.Read(random)
	every := make([]byte, 256)
	for i := range every {
		every[i] = byte(i)
	}
	return map[string][]byte{
		"nil":                    nil,
		"empty":                  {},
		"a NUL":                  {0},
		"NULs":                   make([]byte, 1<<20),
		"0xff":                   bytes.Repeat([]byte{0xff}, 1<<20),
		"every byte":             every,
		"a megabyte at random":   random,
		"over the NOTIFY limit":  bytes.Repeat([]byte("x"), 8001),
		"JSON out of order":      []byte(` {"b":1.0, "a":1e2,"a" :2,"c":1e400,"big":9223372036854775807,"n":-0.0}` + "\n"),
		"an escaped NUL":         []byte(`{"a":"\u0000"}`),
		"a lone surrogate":       []byte("{\"a\":\"\\ud800\"}\xed\xa0\x80"),
		"UTF-8 of four bytes":    []byte("\U0001f600"),
		"text that looks hex":    []byte(`\x00ff`),
		"text with backslashes":  []byte(`\\'\0\n"`),
		"a byte order mark":      []byte("\ufeff{}"),
		"a number":               []byte("12"),
		"a number with zeros":    []byte("1.00"),
		"the word null":          []byte("null"),
		"carriage returns":       []byte("a\r\nb\r"),
		"an SQL statement":       []byte(`'; DROP TABLE outbox_entries; --`),
		"format characters":      []byte("%s%d%n{t:entries}$1?1"),
		"a time of some driver":  []byte("2026-01-02 03:04:05.999 +0000 UTC m=+0.1"),
		"a text with whitespace": []byte(" \t "),
	}
}

// TestG10PayloadsAreBitIdenticalAtEachAttempt, alone and in bulk.
func TestG10PayloadsAreBitIdenticalAtEachAttempt(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		for _, bulk := range []bool{false, true} {
			l := s.bytesOf(fmt.Sprint("bulk ", bulk))
			want := map[string][32]byte{}
			var items []outbox.Item[[]byte]
			for name, payload := range awkward() {
				want[name] = sha256.Sum256(payload)
				items = append(items, outbox.Item[[]byte]{Key: name, Value: payload})
			}
			tx := s.begin()
			if bulk {
				_, err := l.StageMany(t.Context(), tx, items)
				require.NoError(t, err)
			} else {
				for _, it := range items {
					_, err := l.Stage(t.Context(), tx, it.Key, it.Value)
					require.NoError(t, err, it.Key)
				}
			}
			require.NoError(t, tx.Commit())

			for attempt := 1; attempt <= 3; attempt++ {
				seen := 0
				r, err := outbox.NewRelay(outbox.RelayOptions{Logger: quiet}, l.Publisher(func(_ context.Context, batch []*outbox.Entry[[]byte]) error {
					for _, e := range batch {
						require.NotNil(t, e.Value, "%s: nil and empty are the same: empty", e.Key)
						require.Equal(t, want[e.Key], sha256.Sum256(e.Value), "%s at attempt %d", e.Key, attempt)
						require.Equal(t, attempt, e.Attempt)
						seen++
						if attempt < 3 {
							e.Retry(time.Nanosecond)
						}
					}
					return nil
				}, outbox.PublishOptions{BatchSize: 100}))
				require.NoError(t, err)
				time.Sleep(time.Millisecond)
				_, err = r.RunOnce(t.Context())
				require.NoError(t, err)
				require.Equal(t, len(want), seen)
			}
			require.True(t, s.empty())
		}
	})
}

// TestG10JSONKeepsNumbersAndText is field case S66.
func TestG10JSONKeepsNumbersAndText(t *testing.T) {
	type order struct {
		ID     int64
		Odd    uint64
		Ratio  float64
		Text   string
		Raw    json.RawMessage
		Nested map[string]int64
		Any    json.Number
	}
	want := order{
		ID: math.MaxInt64, Odd: math.MaxUint64, Ratio: 0.1 + 0.2, Text: "<script>&'\u2028\U0001f600\x00",
		Raw: json.RawMessage(`{"b":1.0,"a":1e2}`), Nested: map[string]int64{"2^53+1": 1<<53 + 1}, Any: "123456789012345678901234567890",
	}
	onBoth(t, func(t *testing.T, s *site) {
		l, err := outbox.NewLatest(s.store, outbox.LatestOptions[order]{})
		require.NoError(t, err)
		tx := s.begin()
		_, err = l.Stage(t.Context(), tx, "k", want)
		require.NoError(t, err)
		require.NoError(t, tx.Commit())
		e, err := l.Pending(t.Context(), nil, "k")
		require.NoError(t, err)
		require.Equal(t, want, e.Value)
		r, err := outbox.NewRelay(outbox.RelayOptions{}, l.Publisher(func(_ context.Context, batch []*outbox.Entry[order]) error {
			require.Equal(t, want, batch[0].Value)
			return nil
		}, outbox.PublishOptions{}))
		require.NoError(t, err)
		pass, err := r.RunOnce(t.Context())
		require.NoError(t, err)
		require.Equal(t, 1, pass.Published)
		payload := s.table(`SELECT count(*) FROM {t:entries}`)
		require.Equal(t, []string{"[0]"}, payload)
	})
}

func TestG10HeadersComeBackAsTheyWere(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		l := s.latest("orders")
		want := map[string]outbox.Header{
			"none":  nil,
			"empty": {},
			"one":   {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"},
			"odd": {
				"quotes": `"'\`, "lines": "a\r\nb", "markup": "<a>&amp;", "wide": "\U0001f600\u2028\ufeff", " ": " ",
				"empty": "", "\u00e9": "e\u0301", "null": "null", "$1": "?1", "control": "\x01\x1f\x7f",
			},
		}
		var items []outbox.Item[string]
		for key, h := range want {
			items = append(items, outbox.Item[string]{Key: key, Header: h})
		}
		items = append(items, outbox.Item[string]{Key: "tombstone", Header: want["odd"], Deleted: true})
		want["tombstone"] = want["odd"]
		want["empty"] = nil
		tx := s.begin()
		_, err := l.StageMany(t.Context(), tx, items)
		require.NoError(t, err)
		require.NoError(t, tx.Commit())
		s.once(l, outbox.PublishOptions{}, func(_ context.Context, batch []*outbox.Entry[string]) error {
			require.Len(t, batch, 5)
			for _, e := range batch {
				require.Equal(t, want[e.Key], e.Header, e.Key)
			}
			return nil
		})
		require.True(t, s.empty())
	})
}

// TestG10DamagedRowsKeepNobodyElseBack is field case S67: rows changed by hand,
// and twenty good ones around them.
func TestG10DamagedRowsKeepNobodyElseBack(t *testing.T) {
	type damage struct {
		set    string
		unread bool // stays, with the reason
	}
	damages := map[string]damage{
		"headers cut off":         {`headers = '{"a"'`, true},
		"headers of numbers":      {`headers = '{"a":1}'`, true},
		"headers in a list":       {`headers = '["a"]'`, true},
		"headers no JSON":         {`headers = 'a=b'`, true},
		"headers with more after": {`headers = '{"a":"b"} {"c":"d"}'`, true},
		"headers null":            {`headers = 'null'`, false},
		"headers with a space":    {`headers = ' {} '`, false},
		"payload no JSON":         {`payload = $2`, true},
		"attempts negative":       {`attempt = -7`, false},
		"attempts at their end":   {`attempt = 2147483647`, false},
		"due long ago":            {`due = -9223372036854775807`, false},
		"due at the epoch":        {`due = 0`, false},
		"due before the epoch":    {`due = -1`, false},
		"staged long ago":         {`staged_at = -9223372036854775807`, false},
		"token at its end":        {`token = 9223372036854775807`, false},
		"huge last error":         {`last_error = '` + strings.Repeat("e", 100_000) + `'`, false},
	}
	onBothUnsynced(t, func(t *testing.T, s *site) {
		for name, d := range damages {
			t.Run(name, func(t *testing.T) {
				l := s.latest(name)
				s.stageMany(l, "good before ", 10)
				s.stage(l, "damaged", "value")
				s.stageMany(l, "good behind ", 10)
				args := []any{name}
				if strings.Contains(d.set, "$2") {
					args = append(args, []byte("no JSON"))
				}
				s.exec(s.dialect.Render(`UPDATE {t:entries} SET `+d.set+` WHERE key = 'damaged' AND channel = $1`), args...)
				_, err := s.store.Stats(t.Context())
				require.NoError(t, err)
				_, err = s.store.Look(t.Context(), []outbox.Channel{latestChannel(name)})
				require.NoError(t, err)
				m := newMirror()
				// One batch must hold them all, and batches of a few must get by.
				for _, size := range []int{50, 4, 4} {
					s.once(l, outbox.PublishOptions{BatchSize: size}, m.publish)
				}
				for i := range 10 {
					require.NotEmpty(t, m.value(fmt.Sprintf("good before %07d", i)))
					require.NotEmpty(t, m.value(fmt.Sprintf("good behind %07d", i)))
				}
				stats, err := s.store.Stats(t.Context())
				require.NoError(t, err)
				if !d.unread {
					require.Equal(t, "value", m.value("damaged"))
					require.Empty(t, stats)
					return
				}
				require.Equal(t, 20, m.published)
				info, ok := entry(t, l, "damaged")
				require.True(t, ok, "a row that cannot be read was dropped")
				require.NotEmpty(t, info.LastError)
				require.NotContains(t, info.LastError, "no JSON", "the payload")
				require.Equal(t, info.LastError, stats[0].LastError)
				e, err := l.Pending(t.Context(), nil, "damaged")
				require.Error(t, err)
				require.NoError(t, l.Discard(t.Context(), "damaged", e.Version))
				require.True(t, s.empty())
			})
		}
	})
}

// TestG10NoHandPutsATextIntoAnInteger: SQLite would keep it elsewhere (S59, S67).
func TestG10NoHandPutsATextIntoAnInteger(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		s.stage(s.latest("orders"), "k", "value")
		for _, set := range []string{
			`due = 'soon'`, `due = '2026-01-01 00:00:00'`, `due = NULL`, `lease_until = 'x'`, `version = NULL`,
			`attempt = 'many'`, `payload = NULL`, `headers = NULL`, `key = NULL`, `due = 1.5e300`,
		} {
			_, err := s.db.Exec(s.dialect.Render(`UPDATE {t:entries} SET ` + set))
			require.Error(t, err, set)
		}
		if !s.postgres() {
			_, err := s.db.Exec(s.dialect.Render(`UPDATE {t:entries} SET due = datetime('now')`))
			require.Error(t, err)
		}
		require.Equal(t, 1, s.once(s.latest("orders"), outbox.PublishOptions{}, newMirror().publish).Published)
	})
}

// TestG10BulkOfAnySizeIsStoredWhole is field cases S71 and S19: no limit of
// parameters is met, and each result belongs to its input, keys given twice
// included.
func TestG10BulkOfAnySizeIsStoredWhole(t *testing.T) {
	t.Parallel()
	onBothUnsynced(t, func(t *testing.T, s *site) {
		l := s.latest("bulk")
		sizes := []int{1, 3_000, 11_000, 33_000, 66_000}
		if raceFactor > 1 && !s.postgres() {
			sizes = []int{1, 999, 1_000, 1_001, 3_000, 11_000}
		}
		for _, n := range sizes {
			items := make([]outbox.Item[string], n)
			for i := range items {
				items[i] = outbox.Item[string]{Key: fmt.Sprint("k", rand.N(n*9/10+1)), Value: fmt.Sprint(i)}
				if i%7 == 0 {
					items[i].Key = fmt.Sprint("of ", i) // in an order that is not the bytes'
				}
			}
			tx := s.begin()
			versions, err := l.StageMany(t.Context(), tx, items)
			require.NoError(t, err, "%d items", n)
			require.Len(t, versions, n)
			require.NoError(t, tx.Commit())
			requireStored(t, s, items, versions)
			s.exec(s.dialect.Render(`DELETE FROM {t:entries}`))
		}
	})
}

func requireStored(t *testing.T, s *site, items []outbox.Item[string], versions []outbox.Version) {
	t.Helper()
	type stored struct {
		version outbox.Version
		payload string
	}
	have := map[string]stored{}
	rows, err := s.db.Query(s.dialect.Render(`SELECT key, version, payload FROM {t:entries}`))
	require.NoError(t, err)
	defer rows.Close()
	for rows.Next() {
		var key string
		var r stored
		var payload []byte
		require.NoError(t, rows.Scan(&key, &r.version, &payload))
		r.payload = string(payload)
		have[key] = r
	}
	require.NoError(t, rows.Err())
	last := map[string]string{}
	for _, it := range items {
		last[it.Key] = `"` + it.Value + `"`
	}
	require.Len(t, have, len(last))
	for i, it := range items {
		if have[it.Key] != (stored{versions[i], last[it.Key]}) {
			t.Fatalf("item %d, key %q: got version %d, stored is %+v, its last value %s", i, it.Key, versions[i], have[it.Key], last[it.Key])
		}
	}
}

// TestG10BulkThatIsRefusedLeavesNothing: the one bad item is the last.
func TestG10BulkThatIsRefusedLeavesNothing(t *testing.T) {
	onBoth(t, func(t *testing.T, s *site) {
		items := make([]outbox.Item[string], 2_500)
		for i := range items {
			items[i].Key = fmt.Sprint("k", i)
		}
		items[len(items)-1].Key = ""
		tx := s.begin()
		_, err := s.latest("bulk").StageMany(t.Context(), tx, items)
		require.ErrorIs(t, err, outbox.ErrInvalid)
		versions, err := s.latest("bulk").StageMany(t.Context(), tx, nil)
		require.NoError(t, err)
		require.Empty(t, versions)
		require.NoError(t, tx.Commit())
		require.True(t, s.empty())
	})
}

// TestG10ClaimedBatchComesInTheOrderItFellDue is the other half of S19.
func TestG10ClaimedBatchComesInTheOrderItFellDue(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		clock := s.onClock()
		l := s.latest("orders")
		var want []string
		for i, n := range rand.Perm(60) {
			s.stage(l, fmt.Sprint("k", n), "value")
			want = append(want, fmt.Sprint("k", n))
			if i%3 == 0 { // some fall due in the same microsecond: the order of their birth
				clock.Advance(time.Microsecond)
			}
		}
		var got []string
		s.once(l, outbox.PublishOptions{BatchSize: 100}, func(_ context.Context, batch []*outbox.Entry[string]) error {
			for _, e := range batch {
				got = append(got, e.Key)
			}
			return nil
		})
		require.Equal(t, want, got)
	})
}
