package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"fmt"
	"io"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// jsonMessage is a message in JSON. Its payload is in one of the last two,
// where it was asked for.
type jsonMessage struct {
	Channel       string        `json:"channel"`
	Key           string        `json:"key"`
	Group         string        `json:"group"` // empty: not ordered
	Number        int64         `json:"number"`
	State         string        `json:"state"`
	Attempts      int           `json:"attempts"`
	Ambiguous     bool          `json:"ambiguous"` // perhaps sent: nobody knows how an earlier attempt ended
	CreatedAt     time.Time     `json:"created_at"`
	Due           *time.Time    `json:"due"`          // null: it has ended
	LeasedUntil   *time.Time    `json:"leased_until"` // null: it is not leased
	CompletedAt   *time.Time    `json:"completed_at"` // null: it has not ended
	Ref           string        `json:"ref"`
	Code          string        `json:"code"`
	LastError     string        `json:"last_error"`
	Header        outbox.Header `json:"header,omitempty"`
	PayloadText   *string       `json:"payload_text,omitempty"`
	PayloadBase64 *string       `json:"payload_base64,omitempty"`
}

func asJSONMessage(r outbox.Record, payload bool) jsonMessage {
	m := jsonMessage{
		Channel: r.Channel, Key: r.Key, Group: r.Group, Number: r.Seq, State: r.State.String(), Attempts: r.Attempt, Ambiguous: r.Ambiguous,
		CreatedAt: r.CreatedAt.UTC(), CompletedAt: orNull(r.CompletedAt),
		Ref: r.Ref, Code: r.Code, LastError: r.LastError, Header: r.Header,
	}
	if r.State == outbox.StateSending {
		m.LeasedUntil = orNull(r.Lease.Until)
	}
	if m.CompletedAt == nil {
		m.Due = orNull(r.Due)
	}
	if payload {
		if text, encoding := readable(r.Payload); encoding == "" {
			m.PayloadText = &text
		} else {
			m.PayloadBase64 = &text
		}
	}
	return m
}

func orNull(t time.Time) *time.Time {
	if t.IsZero() {
		return nil
	}
	t = t.UTC()
	return &t
}

// utc writes a time for people.
func utc(t time.Time) string {
	if t.IsZero() {
		return "-"
	}
	return t.UTC().Format(time.RFC3339)
}

// readable returns a payload as the text that it is or, after "base64:", as
// base64: a terminal takes control characters for commands.
func readable(payload []byte) (text, encoding string) {
	printable := func(r rune) bool { return unicode.IsPrint(r) || r == '\n' || r == '\t' }
	text = string(payload)
	if utf8.ValidString(text) && strings.IndexFunc(text, func(r rune) bool { return !printable(r) }) < 0 {
		return text, ""
	}
	return base64.StdEncoding.EncodeToString(payload), "base64:"
}

// jsonList prints messages as one JSON object, however many pages there are.
type jsonList struct {
	w       io.Writer
	channel string
	payload bool
	n       int
}

func (l *jsonList) page(rs []outbox.Record) error {
	var text bytes.Buffer
	if l.n == 0 {
		fmt.Fprintf(&text, "{\n  \"channel\": %s,\n  \"messages\": [", inJSON(l.channel))
	}
	for _, r := range rs {
		if l.n > 0 {
			text.WriteByte(',')
		}
		l.n++
		text.WriteString("\n    " + strings.ReplaceAll(inJSON(asJSONMessage(r, l.payload)), "\n", "\n    "))
	}
	_, err := l.w.Write(text.Bytes())
	return err
}

// end closes what page has opened.
func (l *jsonList) end(_ context.Context, after string) error {
	indent := "\n  "
	if l.n == 0 {
		indent = ""
	}
	_, err := fmt.Fprintf(l.w, "%s],\n  \"after\": %s\n}\n", indent, inJSON(after))
	return err
}

func inJSON(v any) string {
	var text strings.Builder
	if err := writeJSON(&text, v); err != nil {
		return "null"
	}
	return strings.TrimSuffix(text.String(), "\n")
}
