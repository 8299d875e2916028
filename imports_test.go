package sqloutbox_test

import (
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

const module = "github.com/seed-2b36b211/sqloutbox/"

// What the packages may import, beside the standard library, in files that are
// not tests; "/..." allows all below. Packages that applications import take
// no driver and no test library with them, and nothing crosses between
// siblings.
var (
	drivers = []string{"github.com/jackc/pgx/v5/...", "modernc.org/sqlite"}
	library = []string{
		module + "outbox", module + "sqlstore", module + "dialect", module + "migrations", module + "sink", module + "filestore",
	}
	terminal = []string{"github.com/urfave/cli/v3", "github.com/schollz/progressbar/v3", "golang.org/x/term"}
	allowed  = map[string][]string{
		".":                 {},
		"outbox":            {},
		"outbox/outboxtest": {module + "outbox"},
		"dialect":           {},
		"sqlstore":          {module + "outbox", module + "dialect"},
		"migrations":        {module + "dialect", "github.com/pressly/goose/v3/..."},
		"sink":              {module + "dialect"},
		"filestore":         {module + "outbox"},
		"internal/pgtest":   drivers,
		"integration":       slices.Concat(library, drivers),
		"cmd/outbox":        slices.Concat(library, drivers, terminal),
		"examples":          slices.Concat(library, drivers),
	}
	// Importing testing gives a program its flags.
	forTests = []string{"outbox/outboxtest", "internal/pgtest"}
)

func TestPackagesImportOnlyWhatTheyMay(t *testing.T) {
	checked := make(map[string]bool)
	err := filepath.WalkDir(".", func(name string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir():
			if name != "." && (strings.HasPrefix(d.Name(), ".") || d.Name() == "testdata" || isModule(name)) {
				return fs.SkipDir
			}
			return nil
		case !strings.HasSuffix(name, ".go") || strings.HasSuffix(name, "_test.go"):
			return nil
		}
		dir := path.Dir(filepath.ToSlash(name))
		checked[dir] = true
		rules, ok := rulesOf(dir)
		if !ok {
			t.Errorf("package %s has no rule: say in this test what it may import", dir)
			return nil
		}
		file, err := parser.ParseFile(token.NewFileSet(), name, nil, parser.ImportsOnly)
		if err != nil {
			return err
		}
		for _, spec := range file.Imports {
			imported, err := strconv.Unquote(spec.Path.Value)
			if err != nil {
				return err
			}
			if !mayImport(dir, rules, imported) {
				t.Errorf("%s imports %q, which package %s may not", name, imported, dir)
			}
		}
		return nil
	})
	require.NoError(t, err)
	for _, dir := range []string{"outbox", "sqlstore", "dialect", "migrations", "sink", "filestore", "cmd/outbox"} {
		require.True(t, checked[dir], "package %s was not found", dir)
	}
}

func isModule(dir string) bool {
	_, err := os.Stat(filepath.Join(dir, "go.mod"))
	return err == nil
}

func rulesOf(dir string) ([]string, bool) {
	if strings.HasPrefix(dir, "examples/") {
		dir = "examples"
	}
	rules, ok := allowed[dir]
	return rules, ok
}

func mayImport(dir string, rules []string, imported string) bool {
	if imported == "testing" || strings.HasPrefix(imported, "testing/") {
		return slices.Contains(forTests, dir)
	}
	if first, _, _ := strings.Cut(imported, "/"); !strings.Contains(first, ".") {
		return true // the standard library
	}
	return slices.ContainsFunc(rules, func(rule string) bool {
		if tree, ok := strings.CutSuffix(rule, "/..."); ok {
			return imported == tree || strings.HasPrefix(imported, tree+"/")
		}
		return imported == rule
	})
}

func TestRulesOfImports(t *testing.T) {
	for _, c := range []struct {
		dir, imported string
		may           bool
	}{
		{"outbox", "database/sql", true},
		{"outbox", "testing", false},
		{"outbox", module + "dialect", false},
		{"outbox", "golang.org/x/sync/errgroup", false},
		{"outbox/outboxtest", "testing", true},
		{"outbox/outboxtest", "github.com/stretchr/testify/require", false},
		{"migrations", "github.com/pressly/goose/v3/database", true},
		{"migrations", "github.com/pressly/goose/v30", false},
		{"migrations", "github.com/jackc/pgx/v5", false},
		{"migrations", module + "outbox", false},
		{"sqlstore", module + "migrations", false},
		{"sink", module + "sqlstore", false},
		{"cmd/outbox", "modernc.org/sqlite", true},
		{"cmd/outbox", "github.com/pressly/goose/v3", false},
		{"examples/shop", "github.com/jackc/pgx/v5/stdlib", true},
	} {
		rules, ok := rulesOf(c.dir)
		require.True(t, ok, c.dir)
		require.Equal(t, c.may, mayImport(c.dir, rules, c.imported), "%s imports %s", c.dir, c.imported)
	}
	_, ok := rulesOf("util")
	require.False(t, ok)
}
