package integration

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// awkwardError has a text that no database keeps as it is.
type awkwardError struct{ text string }

func (e awkwardError) Error() string { return e.text }

// TestG10ErrorTextsThatCannotBeStoredAsTheyAre, nor references, keep no message
// from being settled: they are kept as far as they can be.
func TestG10ErrorTextsThatCannotBeStoredAsTheyAre(t *testing.T) {
	texts := map[string]string{
		"invalid UTF-8":     "bad \xff\xfe byte",
		"NUL":               "bad \x00 byte",
		"cut in the middle": "bad \xe2\x82",
		"ten megabytes":     "bad " + strings.Repeat("x", 10<<20),
		"wide characters":   "bad " + strings.Repeat("\U0001f600", 2000),
		"only NULs":         "\x00\x00",
		"empty":             "",
		"lone surrogate":    "bad \xed\xa0\x80",
	}
	onBoth(t, func(t *testing.T, s *site) {
		j := s.journal("mail")
		for name := range texts {
			for _, kind := range []string{"error", "permanent", "code", "panic", "ref"} {
				s.post(j, kind+" "+name)
			}
		}
		s.sendOnce(j, func(_ context.Context, m *outbox.Record) (string, error) {
			kind, name, _ := strings.Cut(m.Key, " ")
			err := error(awkwardError{texts[name]})
			switch kind {
			case "ref":
				return texts[name], nil
			case "permanent":
				return "", outbox.Permanent(err)
			case "code":
				return "", outbox.WithCode(texts[name], err)
			case "panic":
				panic(texts[name])
			}
			return "", err
		}, outbox.SendOptions{Backoff: constant(time.Hour)})
		for _, r := range s.records(j) {
			kind, name, _ := strings.Cut(r.Key, " ")
			want := map[string]outbox.State{"ref": outbox.StateSent, "permanent": outbox.StateDead}[kind]
			if want == 0 {
				want = outbox.StateFailed
			}
			require.Equal(t, want, r.State, r.Key)
			for _, text := range []string{r.LastError, r.Ref, r.Code} {
				require.True(t, utf8.ValidString(text) && !strings.Contains(text, "\x00"), r.Key)
				require.LessOrEqual(t, len(text), outbox.MaxErrorText, r.Key)
			}
			if strings.HasPrefix(texts[name], "bad") {
				require.Contains(t, r.LastError+r.Ref, "bad", r.Key)
			}
		}
		n, err := j.Retry(t.Context(), outbox.Filter{All: true})
		require.NoError(t, err)
		require.EqualValues(t, 4*len(texts), n)
		stats, err := s.store.Stats(t.Context())
		require.NoError(t, err)
		require.True(t, utf8.ValidString(stats[0].LastError))
	})
}

// TestG10DamagedMessageKeepsNobodyElseBack: rows changed by hand, in the middle
// of a batch, with twenty good ones around them.
func TestG10DamagedMessageKeepsNobodyElseBack(t *testing.T) {
	damages := map[string]outbox.State{
		`headers = '{"a"'`:                         outbox.StateDead, // it cannot be read, and will not get better
		`headers = '{"a":1}'`:                      outbox.StateDead,
		`headers = '["a"]'`:                        outbox.StateDead,
		`headers = 'a=b'`:                          outbox.StateDead,
		`headers = 'null'`:                         outbox.StateSent,
		`attempt = -7`:                             outbox.StateSent,
		`attempt = 2147483647`:                     outbox.StateSent, // it is due, so it is tried
		`due = -9223372036854775807`:               outbox.StateSent,
		`due = 0`:                                  outbox.StateSent,
		`created_at = -9223372036854775807`:        outbox.StateSent,
		`token = 9223372036854775807`:              outbox.StateSent,
		`lapses = 32767`:                           outbox.StateSent, // of a message that is not leased
		`last_error = 'x' || cast(100000 AS text)`: outbox.StateSent,
	}
	onBothUnsynced(t, func(t *testing.T, s *site) {
		for damage, want := range damages {
			for _, group := range []string{"", "g"} {
				name := damage + group
				j := s.journal(name)
				good := append(letters("a", 10, 0), letters("z", 10, 0)...)
				s.put(j, append(append(good[:10:10], outbox.Message{Key: "damaged", Group: group}), good[10:]...)...)
				s.exec(s.dialect.Render(`UPDATE {t:messages} SET `+damage+` WHERE key = 'damaged' AND channel = $1`), name)
				var r receiver
				for _, size := range []int{50, 4, 4} {
					s.sendOnce(j, r.send, outbox.SendOptions{BatchSize: size})
				}
				states := s.states(j)
				require.Equal(t, want, states["damaged"], name)
				require.Equal(t, all(outbox.StateSent, keysOf(good)...), without(states, "damaged"), name)
				require.Equal(t, each(1, keysOf(good)...), without(r.times(), "damaged"), name)
				_, err := s.store.Stats(t.Context())
				require.NoError(t, err)
				n, err := j.Discard(t.Context(), outbox.Filter{Key: "damaged"})
				require.NoError(t, err)
				require.EqualValues(t, 1, n)
			}
		}
	})
}

// TestG10MessagePayloadsAreBitIdenticalAtEachAttempt, alone and in bulk, and in
// what Put answers about them.
func TestG10MessagePayloadsAreBitIdenticalAtEachAttempt(t *testing.T) {
	onBothUnsynced(t, func(t *testing.T, s *site) {
		payloads := awkward()
		headers := outbox.Header{
			"quotes": `"'\`, "lines": "a\r\nb", "markup": "<a>&amp;", "wide": "\U0001f600\u2028\ufeff", " ": " ", "empty": "", "null": "null", "control": "\x01\x1f\x7f",
		}
		for _, bulk := range []bool{false, true} {
			j := s.journal(fmt.Sprint("bulk ", bulk))
			var ms []outbox.Message
			for name, payload := range payloads {
				ms = append(ms, outbox.Message{Key: name, Payload: payload, Header: headers})
			}
			if bulk {
				s.put(j, ms...)
			} else {
				for _, m := range ms {
					s.put(j, m)
				}
			}
			for _, res := range s.put(j, ms...) {
				require.False(t, res.Created || res.Differs, res.Key)
			}
			for attempt := 1; attempt <= 3; attempt++ {
				var r receiver
				s.sendOnce(j, func(_ context.Context, m *outbox.Record) (string, error) {
					if m.Payload == nil || !bytes.Equal(payloads[m.Key], m.Payload) {
						t.Errorf("payload %q changed at attempt %d", m.Key, attempt)
					}
					if fmt.Sprint(m.Header) != fmt.Sprint(headers) {
						t.Errorf("headers of %q changed at attempt %d: %q", m.Key, attempt, m.Header)
					}
					r.took(m)
					if attempt < 3 {
						return "", errors.New("again")
					}
					return "", nil
				}, outbox.SendOptions{Backoff: constant(time.Millisecond), Workers: 1})
				time.Sleep(5 * time.Millisecond)
				require.Equal(t, len(payloads), r.len())
			}
			require.Zero(t, s.unfinished())
		}
	})
}
