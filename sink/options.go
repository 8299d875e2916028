package sink

import (
	"fmt"
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// NoColumn, as the name of a column that may be left out, leaves it out.
const NoColumn = "-"

// Options name the table and its columns. Only Table is required: with no
// other field set it is the table that [Sink.Create] makes. Set the others to
// guard a table of your own. All names are quoted, so that any spelling works.
type Options struct {
	// Schema of the table. Defaults to the dialect's schema: "public" on
	// Postgres, "main" on SQLite, unless [dialect.Dialect.In] changed it.
	Schema string
	// Table is the table's name, without schema. Required.
	Table string
	// Key is the column with the outbox's key. A unique index on exactly this
	// column must exist. Defaults to a column "key" of type text. Of another
	// type (uuid, bigint) keys are cast to it; one key must then always be
	// spelled the same way.
	Key Column
	// Version is a bigint column (SQLite: INTEGER). A row whose version is NULL
	// is older than any. Defaults to "version".
	Version string
	// DeletedAt is a nullable column that is set while the key is deleted: to
	// the database's clock on Postgres (timestamptz), to the host's in
	// microseconds since the Unix epoch on SQLite (INTEGER). Readers of the
	// table select WHERE deleted_at IS NULL. Defaults to "deleted_at".
	DeletedAt string
	// UpdatedAt is a column of the same type, set with every change. Defaults
	// to "updated_at"; [NoColumn] for none.
	UpdatedAt string
	// Value is the column with the payload (bytea, BLOB), byte for byte, NULL
	// where the payload is nil or the key is deleted. Defaults to "value".
	// Not used where Columns is set.
	Value string
	// Columns, if not empty, are what the payload is spread over. The payload
	// is then a JSON object, and each column takes the member named for it:
	// NULL where that is absent or the key is deleted, so the columns must be
	// nullable. Members without a column are dropped. Columns of the table that
	// are not named here keep their values, and need a default.
	Columns []Column
}

// Column is a column and its type.
type Column struct {
	// Name of the column. Required, but for Options.Key.
	Name string
	// Type as CREATE TABLE spells it: "numeric(20,2)", "timestamptz", "text[]",
	// "jsonb". It becomes part of the statement, so never take it from input.
	// Defaults to text on Postgres and to no type on SQLite, where the type
	// serves only Create. SQLite keeps a number beyond int64 as a REAL, true
	// and false as 1 and 0, and objects and arrays as JSON text.
	Type string
	// Field is the member of the JSON object. Defaults to Name. Not used in
	// Options.Key.
	Field string
}

// withDefaults fills in what is not set.
func (o Options) withDefaults(d dialect.Dialect) Options {
	set := func(name *string, to string) {
		if *name == "" {
			*name = to
		}
	}
	set(&o.Schema, d.Schema())
	set(&o.Key.Name, "key")
	set(&o.Key.Type, "text")
	set(&o.Version, "version")
	set(&o.DeletedAt, "deleted_at")
	set(&o.UpdatedAt, "updated_at")
	set(&o.Value, "value")
	o.Columns = append([]Column(nil), o.Columns...)
	for i := range o.Columns {
		set(&o.Columns[i].Field, o.Columns[i].Name)
		if d.Name() == "postgres" {
			set(&o.Columns[i].Type, "text")
		}
	}
	return o
}

// columnType is what a type is spelled with: words, sizes, arrays, and a
// schema before it. It keeps statements whole, not attackers out.
var columnType = regexp.MustCompile(`^[\pL\pN_ ."(),\[\]]*$`)

// validate checks options with their defaults filled in.
func (o Options) validate(d dialect.Dialect) error {
	if o.Table == "" {
		return fmt.Errorf("%w: Options.Table is empty", ErrInvalid)
	}
	type named struct{ what, name string }
	columns := []named{{"Key.Name", o.Key.Name}, {"Version", o.Version}, {"DeletedAt", o.DeletedAt}}
	if o.UpdatedAt != NoColumn {
		columns = append(columns, named{"UpdatedAt", o.UpdatedAt})
	}
	if len(o.Columns) == 0 {
		columns = append(columns, named{"Value", o.Value})
	}
	names := append([]named{{"Schema", o.Schema}, {"Table", o.Table}}, columns...)
	types := []named{{"Key.Type", o.Key.Type}}
	for i, c := range o.Columns {
		what := fmt.Sprintf("Columns[%d]", i)
		columns = append(columns, named{what + ".Name", c.Name})
		names = append(names, named{what + ".Name", c.Name}, named{what + ".Field", c.Field})
		types = append(types, named{what + ".Type", c.Type})
		if strings.ContainsAny(c.Field, `"\`) {
			return fmt.Errorf("%w: Options.%s.Field %q contains a quote or a backslash", ErrInvalid, what, c.Field)
		}
	}
	for _, n := range names {
		if err := validName(d, n.name); err != nil {
			return fmt.Errorf("%w: Options.%s %w", ErrInvalid, n.what, err)
		}
	}
	for _, t := range types {
		if !columnType.MatchString(t.name) {
			return fmt.Errorf("%w: Options.%s %q is not the name of a type", ErrInvalid, t.what, t.name)
		}
	}
	seen := map[string]string{}
	for _, c := range columns {
		if other, double := seen[c.name]; double {
			return fmt.Errorf("%w: Options.%s and Options.%s are both %q", ErrInvalid, other, c.what, c.name)
		}
		seen[c.name] = c.what
	}
	return nil
}

// maxIdent is the longest identifier that Postgres keeps, in bytes: a longer
// one it cuts off silently, so that two tables could become one.
const maxIdent = 63

func validName(d dialect.Dialect, name string) error {
	switch {
	case name == "":
		return fmt.Errorf("is empty")
	case !utf8.ValidString(name):
		return fmt.Errorf("is not valid UTF-8")
	case strings.ContainsFunc(name, unicode.IsControl):
		return fmt.Errorf("%q contains a control character", name)
	case d.Name() == "postgres" && len(name) > maxIdent:
		return fmt.Errorf("%q is %d bytes long, over the limit of %d", name, len(name), maxIdent)
	}
	return nil
}
