package filestore

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"
	"unicode/utf8"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const (
	formatName    = "sqloutbox journal"
	formatVersion = 1
)

// A document is the whole file: JSON, UTF-8, a line for each message, in the
// order of their numbers. Times are microseconds since 1970 in UTC.
//
//	{"format":"sqloutbox journal","version":1,
//	"number":1767225600000002,"token":1767225600500000,
//	"channels":{"mail":{"paused":1767229200000000,"reason":"maintenance"}},
//	"messages":[
//	{"number":1767225600000001,"state":"failed","due":1767225605000000,"attempt":1,"token":1767225600500000,…,"error":"503","channel":"mail","key":"a","put":1767225600000001,"text":"hello"},
//	{"number":1767225600000002,"state":"pending","due":1767225600000002,"channel":"mail","key":"b","group":"g","put":1767225600000002,"base64":"/w=="}
//	]}
//
// A file that was cut short is no JSON. Fields and states that this version
// does not know are refused rather than dropped at the next write.
type document struct {
	Format   string                   `json:"format"`
	Version  int                      `json:"version"`
	Number   int64                    `json:"number"` // the last one given out
	Token    int64                    `json:"token"`  // likewise
	Channels map[string]channelRecord `json:"channels"`
	Messages []messageRecord          `json:"messages"`
}

// channelRecord is a channel that an operator has paused, or whose destination
// is down.
type channelRecord struct {
	Paused  int64  `json:"paused,omitempty"` // until
	Reason  string `json:"reason,omitempty"`
	Outages int    `json:"outages,omitempty"` // reports in a row
	Down    int64  `json:"down,omitempty"`    // until
	Probe   int64  `json:"probe,omitempty"`   // until
	Cause   string `json:"cause,omitempty"`
}

type messageRecord struct {
	changingRecord
	fixedRecord
}

// changingRecord is what claims and settlements change.
type changingRecord struct {
	Number    int64  `json:"number"`
	State     string `json:"state"`
	Due       int64  `json:"due"`
	Attempt   int    `json:"attempt,omitempty"`
	Token     int64  `json:"token,omitempty"`  // of the last lease
	Lease     int64  `json:"lease,omitempty"`  // until
	Lapses    int    `json:"lapses,omitempty"` // leases in a row that nobody settled
	Ended     string `json:"ended,omitempty"`  // how the last lease was settled
	Completed int64  `json:"completed,omitempty"`
	Ref       string `json:"ref,omitempty"`
	Error     string `json:"error,omitempty"` // of the last attempt that failed
	Code      string `json:"code,omitempty"`
}

// fixedRecord is what was put. Text is the payload where that is UTF-8, so
// that a person can read it, else Base64 is; an empty one has neither.
type fixedRecord struct {
	Channel string        `json:"channel"`
	Key     string        `json:"key"`
	Group   string        `json:"group,omitempty"`
	Put     int64         `json:"put"`
	Header  outbox.Header `json:"header,omitempty"`
	Text    string        `json:"text,omitempty"`
	Base64  []byte        `json:"base64,omitempty"`
}

var outcomeNames = map[outbox.Outcome]string{
	outbox.OutcomeDone: "done", outbox.OutcomeRetry: "retry", outbox.OutcomeRelease: "release",
	outbox.OutcomeDead: "dead", outbox.OutcomeUnknown: "unknown",
}

// What stands around the two parts of a message's line, and after it.
const (
	lineStart  = "{"
	lineMiddle = ","
	lineEnd    = "},\n"
)

// encodeFixed must be called once for a message, before it is kept.
func (m *message) encodeFixed() {
	f := fixedRecord{
		Channel: m.channel, Key: m.row.Key, Group: m.row.Group, Put: micros(m.row.StagedAt), Header: m.row.Header,
	}
	if utf8.Valid(m.row.Payload) {
		f.Text = string(m.row.Payload)
	} else {
		f.Base64 = m.row.Payload
	}
	m.fixed = fields(f)
}

func (m *message) encodeChanging() {
	r := &m.row
	m.changing = fields(changingRecord{
		Number: int64(r.Version), State: r.State.String(), Due: micros(r.Due), Attempt: r.Attempt, Token: int64(r.Token),
		Lease: micros(r.LeaseUntil), Lapses: m.lapses, Ended: outcomeNames[m.ended], Completed: micros(r.CompletedAt),
		Ref: r.Ref, Error: r.LastError, Code: r.Code,
	})
}

// fields is the JSON of a record, without its braces.
func fields(record any) []byte {
	text := encode(record)
	return text[1 : len(text)-1]
}

// encode is json.Marshal for values that cannot fail, with <, > and & left as
// they are.
func encode(v any) []byte {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		panic(fmt.Sprintf("filestore: encode %T: %v", v, err)) // only strings, numbers and maps of them
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n"))
}

// appendTo appends the file's content to b.
func (st *state) appendTo(b []byte) []byte {
	channels := map[string]channelRecord{}
	for name, c := range st.channels {
		channels[name] = channelRecord{
			Paused: micros(c.pausedUntil), Reason: c.reason, Outages: c.outages,
			Down: micros(c.downUntil), Probe: micros(c.probeUntil), Cause: c.cause,
		}
	}
	b = slices.Grow(b, int(st.bytes)+1024)
	b = fmt.Appendf(b, "{\"format\":%q,\"version\":%d,\n\"number\":%d,\"token\":%d,\n\"channels\":%s,\n\"messages\":[\n",
		formatName, formatVersion, st.number, st.token, encode(channels))
	for _, sl := range st.slots {
		if sl.m == nil {
			continue
		}
		b = append(b, lineStart...)
		b = append(b, sl.m.changing...)
		b = append(b, lineMiddle...)
		b = append(b, sl.m.fixed...)
		b = append(b, lineEnd...)
	}
	if len(st.byID) > 0 { // the last line has no comma
		b = append(b[:len(b)-2], '\n')
	}
	return append(b, "]}\n"...)
}

// parse reads a file's content. Errors are outbox.ErrSchema; they never show
// what is in the file.
func parse(content []byte) (*state, error) {
	const restore = "move it away and start without it, or restore a copy"
	var head struct {
		Format  string `json:"format"`
		Version int    `json:"version"`
	}
	switch err := json.Unmarshal(content, &head); {
	case len(content) == 0:
		return nil, schema("it is empty, which no write of this library leaves behind: %s", restore)
	case isSyntax(err) || !utf8.Valid(content):
		return nil, schema("it is not JSON: cut short, damaged, or not an outbox: %s", restore)
	case err != nil || head.Format != formatName:
		return nil, schema("it is not an outbox: its format is not %q: name another file", formatName)
	case head.Version > formatVersion:
		return nil, schema("its format version is %d, this library reads up to %d: use the version of the library that wrote it, or a newer one", head.Version, formatVersion)
	case head.Version < 1:
		return nil, schema("its format version is %d: damaged: %s", head.Version, restore)
	}
	var doc document
	d := json.NewDecoder(bytes.NewReader(content))
	d.DisallowUnknownFields()
	if err := d.Decode(&doc); err != nil {
		return nil, schema("it has fields that version %d of the format does not have: damaged, or changed by hand: %s", formatVersion, restore)
	}
	st, err := doc.state()
	if err != nil {
		return nil, schema("%w: damaged, or changed by hand: %s", err, restore)
	}
	return st, nil
}

func isSyntax(err error) bool {
	var syntax *json.SyntaxError
	return errors.As(err, &syntax)
}

func schema(format string, args ...any) error {
	return fmt.Errorf("%w: "+format, append([]any{outbox.ErrSchema}, args...)...)
}

// state checks what the format promises and a careless hand may break.
func (doc *document) state() (*state, error) {
	st := newState()
	st.number, st.token = outbox.Version(doc.Number), outbox.Token(doc.Token)
	if doc.Number < 0 || doc.Token < 0 {
		return nil, errors.New("its counters are negative")
	}
	for name, c := range doc.Channels {
		ch := channel{
			pausedUntil: instant(c.Paused), reason: c.Reason, outages: c.Outages,
			downUntil: instant(c.Down), probeUntil: instant(c.Probe), cause: c.Cause,
		}
		if c.Outages < 0 || outbox.ValidChannel(name) != nil {
			return nil, fmt.Errorf("channel %q is not valid", name)
		}
		if ch != (channel{}) {
			st.channels[name] = ch
		}
	}
	slices.SortStableFunc(doc.Messages, func(a, b messageRecord) int { return cmp.Compare(a.Number, b.Number) })
	for i := range doc.Messages {
		m, err := doc.Messages[i].message()
		switch {
		case err != nil:
			return nil, err
		case st.byID[m.id()] != nil:
			return nil, fmt.Errorf("key %q of channel %q is there twice", m.row.Key, m.channel)
		case i > 0 && doc.Messages[i-1].Number == doc.Messages[i].Number:
			return nil, fmt.Errorf("number %d is there twice", m.row.Version)
		case m.row.Version > st.number, m.row.Token > st.token:
			return nil, fmt.Errorf("key %q of channel %q has a number or token that was never given out", m.row.Key, m.channel)
		}
		m.encodeFixed()
		m.encodeChanging()
		sl := new(slot)
		st.slots = append(st.slots, sl)
		st.assign(sl, m)
	}
	return st, nil
}

func (r *messageRecord) message() (*message, error) {
	state, err := outbox.ParseState(r.State)
	m := &message{channel: r.Channel, lapses: r.Lapses, row: outbox.Row{
		Key: r.Key, Group: r.Group, Version: outbox.Version(r.Number), Token: outbox.Token(r.Token), Attempt: r.Attempt,
		Payload: []byte(r.Text), Header: r.Header, StagedAt: instant(r.Put), Due: instant(r.Due), LeaseUntil: instant(r.Lease),
		LastError: r.Error, State: state, CompletedAt: instant(r.Completed), Ref: r.Ref, Code: r.Code,
	}}
	if len(r.Base64) > 0 {
		m.row.Payload = r.Base64
	}
	if len(r.Header) == 0 {
		m.row.Header = nil
	}
	for outcome, name := range outcomeNames {
		if name == r.Ended {
			m.ended = outcome
		}
	}
	sending, ended := state == outbox.StateSending, state >= outbox.StateSent
	switch {
	case err != nil, r.Ended != "" && m.ended == 0,
		r.Key == "" || outbox.ValidChannel(r.Channel) != nil,
		r.Number < 1 || r.Put < 1 || r.Due < 1 || r.Attempt < 0 || r.Lapses < 0 || r.Token < 0,
		sending != (r.Lease != 0), sending && r.Token == 0, ended != (r.Completed != 0),
		r.Text != "" && len(r.Base64) > 0:
		return nil, fmt.Errorf("the message of number %d contradicts itself", r.Number)
	}
	return m, nil
}

// lapse ends the leases that a process that has died held.
func (st *state) lapse(now time.Time) {
	for _, sl := range st.slots {
		if sl.m != nil && sl.m.leased(now) {
			m := *sl.m
			m.row.LeaseUntil = now
			m.encodeChanging()
			st.assign(sl, &m)
		}
	}
}
