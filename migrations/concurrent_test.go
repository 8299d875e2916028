package migrations

import (
	"bufio"
	"context"
	"database/sql"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
)

func TestAllOfManyCallersAtOnceSucceed(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		for range 3 {
			var dbs []*sql.DB
			for range 10 {
				dbs = append(dbs, p.open(t))
			}
			each := func(f func(*sql.DB) error) {
				t.Helper()
				errs := make([]error, len(dbs))
				var wg sync.WaitGroup
				for i, db := range dbs {
					wg.Go(func() { errs[i] = f(db) })
				}
				wg.Wait()
				for _, err := range errs {
					require.NoError(t, err)
				}
			}
			each(func(db *sql.DB) error { return Up(t.Context(), db, p.d) })
			installed(t, p, dbs[0])
			each(func(db *sql.DB) error { return Down(t.Context(), db, p.d, false) })
			require.Empty(t, objects(t, p, dbs[0]))
		}
	})
}

// The test binary runs itself as one of many processes that start at once (S45).
const childEnv = "OUTBOX_MIGRATIONS_CHILD"

func TestMain(m *testing.M) {
	driver, dsn, child := strings.Cut(os.Getenv(childEnv), " ")
	if !child {
		os.Exit(m.Run())
	}
	fmt.Println("ready")
	bufio.NewReader(os.Stdin).ReadString('\n')
	d := dialect.Postgres()
	if driver == "sqlite" {
		d = dialect.SQLite()
	}
	db, err := sql.Open(driver, dsn)
	if err == nil {
		err = Up(context.Background(), db, d)
	}
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func TestAllOfManyProcessesAtOnceSucceed(t *testing.T) {
	onEach(t, func(t *testing.T, p place) {
		manyProcesses(t, p)
		if p.driver == "sqlite" {
			p = onSQLite(t)
			p.dsn, _, _ = strings.Cut(p.dsn, "?") // without what SQLiteDSN adds
			manyProcesses(t, p)
		}
	})
}

func manyProcesses(t *testing.T, p place) {
	t.Helper()
	var start, wait []func() error
	for range 5 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), childEnv+"="+p.driver+" "+p.dsn)
		in, err := cmd.StdinPipe()
		require.NoError(t, err)
		out, err := cmd.StdoutPipe()
		require.NoError(t, err)
		require.NoError(t, cmd.Start())
		lines := bufio.NewReader(out)
		_, err = lines.ReadString('\n')
		require.NoError(t, err)
		start = append(start, in.Close)
		wait = append(wait, func() error {
			said, _ := lines.ReadString('\n')
			if err := cmd.Wait(); err != nil {
				return fmt.Errorf("%w: %s", err, said)
			}
			return nil
		})
	}
	for _, f := range slices.Concat(start, wait) {
		require.NoError(t, f())
	}
	installed(t, p, p.open(t))
}
