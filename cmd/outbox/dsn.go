package main

import (
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite" // the driver "sqlite"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// target is a database or a file store, as a DSN names it.
type target struct {
	fileStore string // its path; then nothing but the label is set beside it

	d     dialect.Dialect
	label string // for people, without a password

	postgres *pgx.ConnConfig // nil: SQLite
	path     string          // of the SQLite file
	file     string          // its DSN, file:…, without anything added
	bare     bool            // the DSN was only a path: nothing is known of how the application opens it
}

var (
	anyScheme = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9+.-]*://`)
	keyword   = regexp.MustCompile(`^\s*(host|hostaddr|port|dbname|user|password|passfile|service|servicefile|` +
		`ssl\w+|application_name|connect_timeout|target_session_attrs|options|default_query_exec_mode)\s*=`)
)

// parseDSN tells what a DSN names. No error of it quotes the DSN, in which the
// password may be anywhere if it was written down wrongly. All are usage errors.
func parseDSN(dsn string) (target, error) {
	dsn = strings.Trim(dsn, "\r\n")
	head := strings.TrimSpace(dsn)
	scheme, rest, isURL := strings.Cut(head, "://")
	if !isURL {
		scheme = ""
	}
	switch {
	case head == "":
		return target{}, usagef("no database: give --dsn, or set OUTBOX_DSN")
	case strings.EqualFold(scheme, "postgres"), strings.EqualFold(scheme, "postgresql"):
		return parsePostgres("postgres://" + rest)
	case keyword.MatchString(dsn):
		return parsePostgres(dsn)
	case strings.EqualFold(scheme, "sqlite"), strings.EqualFold(scheme, "sqlite3"):
		if strings.HasPrefix(rest, "//") {
			rest = "/" + strings.TrimLeft(rest, "/")
		}
		return parseFile("file:" + rest)
	case strings.HasPrefix(head, "sqlite:"):
		return parseFile("file:" + head[len("sqlite:"):])
	case strings.HasPrefix(head, "file:"):
		t, err := parseFile(head)
		if err == nil && isFileStore(t.path) {
			return fileStoreTarget(t.path, t.file)
		}
		return t, err
	case anyScheme.MatchString(head):
		return target{}, usagef("the DSN's scheme %q is not known: it is postgres://, sqlite:// or file:, or the DSN is the path of a SQLite file", scheme+"://")
	}
	path, query, found := strings.Cut(dsn, "?")
	if found && strings.HasPrefix(query, "_") { // modernc takes app.db?_pragma=… too
		if _, err := os.Stat(dsn); err != nil {
			return parseFile("file:" + (&url.URL{Path: path}).EscapedPath() + "?" + query)
		}
	}
	return parsePath(dsn)
}

func parsePostgres(dsn string) (target, error) {
	if strings.HasPrefix(dsn, "postgres://") {
		if err := checkURL(dsn); err != nil {
			return target{}, err
		}
	}
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return target{}, usagef("the Postgres DSN cannot be read%s", reason(err, dsn))
	}
	if !strings.Contains(dsn, "default_query_exec_mode") {
		// Works behind a transaction pooler too, and costs a few statements nothing.
		config.DefaultQueryExecMode = pgx.QueryExecModeExec
	}
	if config.RuntimeParams["application_name"] == "" {
		config.RuntimeParams["application_name"] = "outbox"
	}
	label := fmt.Sprintf("Postgres database %q on %s as %q", config.Database, config.Host, config.User)
	return target{d: dialect.Postgres(), label: label, postgres: config}, nil
}

// hosts is what may stand between user and database: names, addresses, ports.
var hosts = regexp.MustCompile(`^[\pL\pN._,:%\[\]-]*$`)

// checkURL refuses URLs in which a character of the password that should have
// been escaped ends the password: a server of the remaining name would be
// looked up. A URL has at most one @, and before its hosts.
func checkURL(dsn string) error {
	authority, rest := strings.TrimPrefix(dsn, "postgres://"), ""
	if i := strings.IndexAny(authority, "/?#"); i >= 0 {
		authority, rest = authority[:i], authority[i:]
	}
	_, host, found := strings.Cut(authority, "@")
	if !found {
		host = authority
	}
	if hosts.MatchString(host) && !strings.ContainsAny(rest, "@#") {
		return nil
	}
	return usagef("the postgres:// URL cannot be read: in user name, password and parameters write " +
		"%%40 for @, %%3A for :, %%2F for /, %%3F for ?, %%23 for # and %%25 for %%")
}

// reason is what err, of pgx, has to say, after the DSN that it quotes as well
// as it can without the password; nothing where that has part of the password.
func reason(err error, dsn string) string {
	_, text, found := cutLast(err.Error(), "`: ")
	if !found || mentions(text, secret(dsn)) {
		return ""
	}
	return ": " + text
}

// password is where one begins: ToLower would change the length of what is not UTF-8.
var password = regexp.MustCompile(`(?i)password`)

// secret returns what of a Postgres DSN may hold a password.
func secret(dsn string) string {
	found := ""
	if rest, ok := strings.CutPrefix(dsn, "postgres://"); ok {
		if user, _, ok := cutLast(rest, "@"); ok {
			rest = user
		}
		_, found, _ = strings.Cut(rest, ":")
	}
	if at := password.FindStringIndex(dsn); at != nil {
		found += " " + dsn[at[1]:]
	}
	return found
}

func cutLast(s, sep string) (before, after string, found bool) {
	if i := strings.LastIndex(s, sep); i >= 0 {
		return s[:i], s[i+len(sep):], true
	}
	return s, "", false
}

// mentions reports whether text holds any three bytes of secret.
func mentions(text, secret string) bool {
	const n = 3
	for i := 0; i+n <= len(secret); i++ {
		if strings.Contains(text, secret[i:i+n]) {
			return true
		}
	}
	return false
}

// isFileStore tells a file store from a SQLite database: its name ends in
// .json. A database of such a name is sqlite:PATH.
func isFileStore(path string) bool { return strings.HasSuffix(path, ".json") }

func fileStoreTarget(path, dsn string) (target, error) {
	if strings.Contains(dsn, "?") {
		return target{}, usagef("a path that ends in .json names a file store, which takes no parameters; a SQLite database of such a name is sqlite:PATH")
	}
	path = filepath.Clean(path)
	return target{fileStore: path, label: "outbox file " + path}, nil
}

func parsePath(path string) (target, error) {
	if path == ":memory:" {
		return target{}, errInMemory
	}
	if isFileStore(path) {
		return fileStoreTarget(path, "")
	}
	// Two slashes at the start would make the next part a host.
	t, err := parseFile("file:" + (&url.URL{Path: filepath.ToSlash(filepath.Clean(path))}).EscapedPath())
	t.bare = true
	return t, err
}

var errInMemory = usagef("a database in memory is gone when this program ends: name a file")

// parseFile reads a SQLite DSN: file:PATH?QUERY.
func parseFile(dsn string) (target, error) {
	dsn, _, _ = strings.Cut(dsn, "#") // SQLite ignores a fragment
	escaped, query, _ := strings.Cut(strings.TrimPrefix(dsn, "file:"), "?")
	if strings.HasPrefix(escaped, "//") {
		host, path, _ := strings.Cut(escaped[2:], "/")
		if host != "" && host != "localhost" {
			return target{}, usagef("the SQLite DSN cannot be read: between file:// and the next slash SQLite expects the name of a host: write file:PATH")
		}
		escaped = "/" + strings.TrimLeft(path, "/")
	}
	path, err := url.PathUnescape(escaped)
	if err != nil {
		return target{}, usagef("the SQLite DSN's path cannot be read: a %% in it is written %%25")
	}
	values, err := url.ParseQuery(query)
	switch {
	case err != nil:
		return target{}, usagef("the SQLite DSN's parameters, behind the ?, cannot be read: a %% in them is written %%25, a ; is not allowed")
	case path == "":
		return target{}, usagef("the SQLite DSN names no file")
	case path == ":memory:", values.Get("mode") == "memory", values.Get("vfs") == "memdb":
		return target{}, errInMemory
	}
	if query != "" {
		escaped += "?" + query
	}
	return target{d: dialect.SQLite(), label: "SQLite file " + path, path: path, file: "file:" + escaped}, nil
}

// in sets the names of the outbox's tables.
func (t target) in(schema, prefix string) (target, error) {
	if t.fileStore != "" {
		return t, nil
	}
	if t.d.Name() == "sqlite" && schema != "" && schema != "main" {
		return t, usagef("--schema: SQLite has only the schema main here")
	}
	t.d = t.d.In(schema, prefix)
	if err := t.d.Validate(); err != nil {
		return t, usagef("--schema, --prefix: %w", err)
	}
	return t, nil
}

// purpose is what a database is opened for.
type purpose int

const (
	toOperate purpose = iota
	toInstall         // a SQLite file may be created, and is put into WAL mode
	toRemove
	toAmend   // as toOperate, but it may take long
	toExamine // a SQLite DSN is left as it is, to be judged
)

// open opens the database; it does not connect.
func (t target) open(p purpose) (*sql.DB, error) {
	if t.postgres != nil {
		return stdlib.OpenDB(*t.postgres), nil
	}
	info, err := os.Stat(t.path)
	switch {
	case err == nil && info.IsDir():
		return nil, fmt.Errorf("open SQLite file %s: it is a directory", t.path)
	case errors.Is(err, fs.ErrNotExist) && p != toInstall:
		return nil, fmt.Errorf("open SQLite file %s: it does not exist; outbox migrate up would make it", t.path)
	case err != nil && p != toInstall:
		return nil, fmt.Errorf("open SQLite file: %w", err)
	}
	return sql.Open("sqlite", t.sqliteDSN(p))
}

// sqliteDSN adds what is missing in a SQLite DSN.
func (t target) sqliteDSN(p purpose) string {
	path, query, _ := strings.Cut(t.file, "?")
	given, _ := url.ParseQuery(query) // parseFile has read it
	add := func(parameter string) {
		if query != "" {
			query += "&"
		}
		query += parameter
	}
	if p != toInstall && !given.Has("mode") {
		add("mode=rw") // a misspelt path is an error, not a new database
	}
	if p == toExamine && !t.bare {
		return path + "?" + query
	}
	if !given.Has("_txlock") {
		add("_txlock=immediate")
	}
	for _, pragma := range []struct {
		name, value string
		short       []string // modernc's other ways to say it
	}{
		{"busy_timeout", "5000", []string{"_busy_timeout", "_timeout"}},
		{"synchronous", "FULL", []string{"_synchronous", "_sync"}},
		{"journal_mode", "WAL", []string{"_journal_mode", "_journal"}}, // changes the file for good
	} {
		said := slices.ContainsFunc(given["_pragma"], func(s string) bool {
			return strings.HasPrefix(strings.ToLower(strings.TrimSpace(s)), pragma.name)
		})
		said = said || slices.ContainsFunc(pragma.short, given.Has)
		if !said && (p == toInstall || pragma.name != "journal_mode") {
			add("_pragma=" + pragma.name + "(" + pragma.value + ")")
		}
	}
	return path + "?" + query
}
