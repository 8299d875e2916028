package migrations

import (
	"context"
	"database/sql"
	"fmt"
	"io/fs"
	"regexp"
	"strings"
	"testing"
	"testing/fstest"

	"github.com/pressly/goose/v3"
	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

// An application may have a goose of its own, in the same database and process.
func TestHostsOwnGooseIsLeftAlone(t *testing.T) {
	goose.ResetGlobalMigrations()
	defer goose.ResetGlobalMigrations()
	ran := 0
	goose.AddNamedMigrationContext("00001_host.go", func(context.Context, *sql.Tx) error { ran++; return nil }, nil)
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		host, err := goose.NewProvider(goose.Dialect(map[string]string{"postgres": "postgres", "sqlite": "sqlite3"}[p.d.Name()]), db, nil)
		require.NoError(t, err)
		ran = 0
		require.NoError(t, Up(t.Context(), db, p.d))
		require.Zero(t, ran)
		_, err = host.Up(t.Context())
		require.NoError(t, err)
		require.Equal(t, 1, ran)
		before := objects(t, p, db)
		require.NoError(t, Down(t.Context(), db, p.d, false))
		require.NoError(t, Up(t.Context(), db, p.d))
		require.Equal(t, 1, ran)
		require.Equal(t, before, objects(t, p, db))
		v, err := host.GetDBVersion(t.Context())
		require.NoError(t, err)
		require.Equal(t, int64(1), v)
	})
}

func TestFilesAreForTheApplicationsOwnTool(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		db := p.open(t)
		files, err := Files(p.d)
		require.NoError(t, err)
		tool, err := goose.NewProvider(goose.Dialect(map[string]string{"postgres": "postgres", "sqlite": "sqlite3"}[p.d.Name()]), db, files)
		require.NoError(t, err)
		_, err = tool.Up(t.Context())
		require.NoError(t, err)
		before := objects(t, p, db)

		require.NoError(t, Up(t.Context(), db, p.d), "nothing is due")
		require.Equal(t, before, objects(t, p, db))
		steps, err := Status(t.Context(), db, p.d)
		require.NoError(t, err)
		require.Equal(t, Step{Version: 1, Name: "0001_latest.sql", Applied: true}, steps[0])

		require.ErrorIs(t, Down(t.Context(), db, p.d, false), ErrSchema, "the tool would not know")
		if dialect.SchemaVersion > 1 {
			_, err = db.Exec(p.d.Render(`UPDATE {t:meta} SET version = 1`))
			require.NoError(t, err)
			require.ErrorIs(t, Up(t.Context(), db, p.d), ErrSchema)
		}
		_, err = tool.DownTo(t.Context(), 0)
		require.NoError(t, err)
	})
}

func TestFilesAreWholeAndNumbered(t *testing.T) {
	for _, d := range []dialect.Dialect{dialect.Postgres(), dialect.SQLite()} {
		files, err := Files(d)
		require.NoError(t, err)
		names, err := fs.Glob(files, "*")
		require.NoError(t, err)
		require.NoError(t, fstest.TestFS(files, names...))
		require.Len(t, names, dialect.SchemaVersion, "the last file is the schema's version")
		for i, name := range names {
			require.Regexp(t, fmt.Sprintf(`^%04d_[a-z_]+\.sql$`, i+1), name)
			data, err := fs.ReadFile(files, name)
			require.NoError(t, err)
			text := string(data)
			require.NotRegexp(t, `\{[a-z]+(:[a-z_0-9]+)?\}`, text, "a placeholder is left")
			require.NotContains(t, text, "NO TRANSACTION", "a run is one transaction")
			// goose sends what is between the marks as it is; outside of them it splits at semicolons.
			bare := regexp.MustCompile(`(?s)-- \+goose StatementBegin\n.*?-- \+goose StatementEnd\n`).ReplaceAllString(text, "")
			for line := range strings.Lines(bare) {
				require.Regexp(t, `^(--.*)?\n$`, line, "a statement outside of the marks")
			}
		}
	}
}
