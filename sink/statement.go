package sink

import (
	"strings"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// target is one column that an upsert fills beside key, version and deleted_at:
// its quoted name, and the expression over the given row that it takes.
type target struct{ name, value string }

// fill puts the names of a table into a statement. Names are replaced in one
// pass, so that a name that looks like a placeholder is safe.
func fill(text string, d dialect.Dialect, o Options, table string, targets []target, more ...string) string {
	var names, values, sets strings.Builder
	for _, t := range targets {
		names.WriteString(", " + t.name)
		values.WriteString(", " + t.value)
		sets.WriteString(", " + t.name + " = excluded." + t.name)
	}
	value := "NULL"
	if len(o.Columns) == 0 {
		value = d.Ident(o.Value)
	}
	return strings.NewReplacer(append(more,
		"{table}", table,
		"{key}", d.Ident(o.Key.Name),
		"{key type}", o.Key.Type,
		"{version}", d.Ident(o.Version),
		"{deleted_at}", d.Ident(o.DeletedAt),
		"{value}", value,
		"{, names}", names.String(),
		"{, values}", values.String(),
		"{, sets}", sets.String(),
	)...).Replace(text)
}

// definitions returns the columns that Create adds beside key, version and
// deleted_at.
func definitions(d dialect.Dialect, o Options, valueType, timeType string) string {
	var text strings.Builder
	define := func(name, typ string) { text.WriteString(",\n\t" + d.Ident(name) + " " + typ) }
	if len(o.Columns) == 0 {
		define(o.Value, valueType)
	}
	for _, c := range o.Columns {
		define(c.Name, c.Type)
	}
	if o.UpdatedAt != NoColumn {
		define(o.UpdatedAt, timeType+" NOT NULL")
	}
	return text.String()
}
