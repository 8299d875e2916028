package outboxtest

import (
	"fmt"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// clip prints a value at a length that a person still reads.
func clip(v any) string {
	const most = 2000
	text := fmt.Sprintf("%+v", v)
	if s, ok := v.([]byte); ok {
		text = fmt.Sprintf("%q (nil %t)", s, s == nil)
	}
	if r, ok := v.(outbox.Row); ok {
		text += fmt.Sprintf(" (payload %d bytes, nil %t; header nil %t)", len(r.Payload), r.Payload == nil, r.Header == nil)
	}
	if len(text) > most {
		return fmt.Sprintf("%s… %s (%d bytes in all)", text[:most/2], text[len(text)-most/2:], len(text))
	}
	return text
}

// keys returns the keys of rows, in their order.
func keys(rows []outbox.Row) []string {
	ks := []string{}
	for _, r := range rows {
		ks = append(ks, r.Key)
	}
	return ks
}

// named returns results by their names.
func named(rs []outbox.Result) []string {
	names := map[outbox.Result]string{
		outbox.ResultDone: "done", outbox.ResultSuperseded: "superseded",
		outbox.ResultStale: "stale", outbox.ResultBusy: "busy",
	}
	out := []string{}
	for _, r := range rs {
		name, ok := names[r]
		if !ok {
			name = fmt.Sprintf("result %d", r)
		}
		out = append(out, name)
	}
	return out
}
