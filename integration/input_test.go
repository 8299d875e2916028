package integration

import (
	"context"
	"database/sql"
	"strings"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// refusals are calls that are refused before anything is written.
var refusals = func() []refusal {
	var list []refusal
	add := func(name string, items ...outbox.Item[string]) {
		list = append(list, refusal{name, func(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) error {
			_, err := l.StageMany(ctx, tx, items)
			return err
		}})
	}
	good := outbox.Item[string]{Key: "good", Value: "good"}
	for name, key := range map[string]string{
		"empty":                 "",
		"of 513 bytes":          strings.Repeat("k", 513),
		"of a megabyte":         strings.Repeat("k", 1<<20),
		"with 0xff":             "a\xffb",
		"cut in a character":    "a\xe2\x82",
		"with a lone surrogate": "a\xed\xa0\x80",
		"with a NUL":            "a\x00b",
	} {
		add("key "+name, outbox.Item[string]{Key: key, Value: "v"})
		add("key "+name+", among good ones", good, outbox.Item[string]{Key: key, Value: "v"}, good)
		list = append(list, refusal{"delete key " + name, func(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) error {
			_, err := l.StageDelete(ctx, tx, key)
			return err
		}}, refusal{"read key " + name, func(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) error {
			_, err := l.Pending(ctx, outbox.SQL(tx), key)
			return err
		}})
	}
	for name, h := range map[string]outbox.Header{
		"without a name":         {"": "v"},
		"with a NUL in its name": {"a\x00": "v"},
		"with a NUL":             {"a": "\x00"},
		"with 0xff in its name":  {"\xff": "v"},
		"with 0xff":              {"a": "\xff"},
		"of ours":                {"outbox-trace": "v"},
		"over 8 KiB":             {"a": strings.Repeat("v", 8<<10)},
	} {
		add("header "+name, outbox.Item[string]{Key: "k", Header: h})
		add("header "+name+", of a tombstone", good, outbox.Item[string]{Key: "k", Header: h, Deleted: true})
	}
	add("payload over a megabyte", outbox.Item[string]{Key: "k", Value: strings.Repeat("v", 1<<20)})
	add("payload over a megabyte, among good ones", good, outbox.Item[string]{Key: "k", Value: strings.Repeat("v", 1<<20)})
	return list
}()

type refusal struct {
	name string
	call func(ctx context.Context, l *outbox.Latest[string], tx *sql.Tx) error
}
