// Package dialect holds all that differs between Postgres and SQLite: the
// statements, how a relay's write is run, and what the drivers' errors mean.
// Everything special about one database is in the file named for it.
//
// A [Dialect] also carries the schema and the prefix of the outbox's tables, so
// that the store and the migrations given the same value meet in the same
// tables, and two stores with different ones never do. Make one with [Postgres]
// or [SQLite], and change the names with [Dialect.In].
//
// The other exported methods serve the packages sqlstore, migrations and sink
// of this module and are outside its compatibility promise.
package dialect

import (
	"errors"
	"fmt"
	"regexp"
	"strings"
	"sync"
	"unicode"
	"unicode/utf8"
)

// SchemaVersion is the schema that this release's statements need. A newer one
// serves too if its meta row says that it is compatible with this.
const SchemaVersion = 2

// maxIdent is the longest identifier that Postgres keeps, in bytes: a longer
// one it cuts off silently, so that two prefixes could meet in one table.
const maxIdent = 63

// longestName is the longest name that a prefix is put before.
const longestName = "entries_channel_key_key"

// Dialect is one database's way of speaking. The zero value is not usable.
type Dialect struct {
	engine engine
	schema string
	prefix string
	cache  *sync.Map // unrendered text to rendered; shared by copies of the value
}

// Postgres returns the dialect of PostgreSQL 12 and later, through database/sql
// with pgx/v5/stdlib: schema "public", prefix "outbox_".
func Postgres() Dialect { return Dialect{postgres{}, "public", "outbox_", new(sync.Map)} }

// SQLite returns the dialect of SQLite 3.38 and later, through modernc.org/sqlite:
// schema "main", prefix "outbox_".
func SQLite() Dialect { return Dialect{sqlite{}, "main", "outbox_", new(sync.Map)} }

// In returns the same dialect with other names: schema (empty: as it was) and
// the prefix of every table, index, sequence and function (may be empty). Odd
// names are quoted; impossible ones are refused where the dialect is used. To
// SQLite, names that differ in case only are the same.
func (d Dialect) In(schema, prefix string) Dialect {
	if schema != "" {
		d.schema = schema
	}
	d.prefix = prefix
	d.cache = new(sync.Map)
	return d
}

// Validate says what is wrong with the schema or the prefix.
func (d Dialect) Validate() error {
	if d.engine == nil {
		return errors.New("dialect is empty: use dialect.Postgres() or dialect.SQLite()")
	}
	if err := validName("schema", d.schema, maxIdent); err != nil {
		return err
	}
	if d.prefix == "" {
		return nil
	}
	return validName("prefix", d.prefix, maxIdent-len(longestName))
}

func validName(what, name string, limit int) error {
	switch {
	case !utf8.ValidString(name):
		return fmt.Errorf("%s is not valid UTF-8", what)
	case len(name) > limit:
		return fmt.Errorf("%s %q is %d bytes long, over the limit of %d", what, name, len(name), limit)
	case strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("%s %q contains a control character", what, name)
	case strings.Contains(name, bodyQuote):
		return fmt.Errorf("%s %q contains %s, which delimits function bodies", what, name, bodyQuote)
	}
	return nil
}

// bodyQuote delimits the bodies of functions in the migrations.
const bodyQuote = "$outbox$"

// Name returns "postgres" or "sqlite".
func (d Dialect) Name() string { return d.engine.name() }

// Schema returns the schema's name, unquoted.
func (d Dialect) Schema() string { return d.schema }

// Prefix returns the prefix of every name, unquoted.
func (d Dialect) Prefix() string { return d.prefix }

// Ident quotes an identifier.
func (d Dialect) Ident(name string) string { return `"` + strings.ReplaceAll(name, `"`, `""`) + `"` }

var placeholder = regexp.MustCompile(`\{(?:schema|[tis]:[a-z0-9_]+)\}`)

// Render fills in the names of a statement or a migration:
//
//	{schema}  "schema"
//	{t:x}     "schema"."prefix_x"      a table, sequence or function
//	{i:x}     "prefix_x"               where no schema may stand: indexes
//	{s:x}     '"schema"."prefix_x"'    the same as {t:x} in a literal, for ::regclass
func (d Dialect) Render(text string) string {
	if r, ok := d.cache.Load(text); ok {
		return r.(string)
	}
	r := d.render(text)
	if len(text) < 4096 { // statements, not the one-off texts of migrations
		d.cache.Store(text, r)
	}
	return r
}

func (d Dialect) render(text string) string {
	return placeholder.ReplaceAllStringFunc(text, func(p string) string {
		if p == "{schema}" {
			return d.Ident(d.schema)
		}
		local := d.Ident(d.prefix + p[3:len(p)-1])
		switch p[1] {
		case 'i':
			return local
		case 's':
			return `'` + strings.ReplaceAll(d.Ident(d.schema)+"."+local, `'`, `''`) + `'`
		}
		return d.Ident(d.schema) + "." + local
	})
}
