//go:build unix

package pgtest

import (
	"bufio"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"
)

func TestDatabasesOfTestsAreTheirOwn(t *testing.T) {
	if testing.Short() {
		return
	}
	a, b := Open(t), Open(t)
	_, err := a.Exec(`CREATE TABLE x ()`)
	require.NoError(t, err)
	_, err = b.Exec(`CREATE TABLE x ()`)
	require.NoError(t, err)
}

func TestDatabaseIsDroppedAtTheTestsEnd(t *testing.T) {
	if testing.Short() {
		return
	}
	var dsn string
	var left *sql.DB
	t.Run("uses it", func(t *testing.T) {
		dsn = DSN(t)
		left, _ = sql.Open("pgx", dsn)
		require.NoError(t, left.Ping())
	})
	defer left.Close()
	again := OpenDSN(t, dsn)
	require.ErrorContains(t, again.Ping(), "does not exist")
}

func TestDatabaseOfADSN(t *testing.T) {
	for dsn, want := range map[string]string{
		"postgres://u:p@h:1/postgres?sslmode=disable": "postgres://u:p@h:1/x?sslmode=disable",
		"postgresql://h":              "postgresql://h/x",
		"host=h dbname=postgres":      "host=h dbname=postgres dbname=x",
		"host=/run/postgresql user=u": "host=/run/postgresql user=u dbname=x",
	} {
		got, err := withDatabase(dsn, "x")
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
	_, err := withDatabase("postgres://u:secret@h:port/x", "x")
	require.Error(t, err)
	require.NotContains(t, err.Error(), "secret")
}

func TestClusterKeepsCommittedRows(t *testing.T) {
	if testing.Short() {
		return
	}
	c := Start(t, Options{Durable: true, Settings: []string{"work_mem=5MB"}})
	db := OpenDSN(t, c.DSN())
	var fsync, mem string
	require.NoError(t, db.QueryRow(`SELECT current_setting('fsync'), current_setting('work_mem')`).Scan(&fsync, &mem))
	require.Equal(t, [2]string{"on", "5MB"}, [2]string{fsync, mem})
	_, err := db.Exec(`CREATE TABLE x (n int)`)
	require.NoError(t, err)

	ways := map[string]func() error{
		"fast":      func() error { return c.Stop(Fast) },
		"immediate": func() error { return c.Stop(Immediate) },
		"kill":      c.Kill,
	}
	n := 0
	for name, end := range ways {
		_, err := db.Exec(`INSERT INTO x VALUES (1)`)
		require.NoError(t, err)
		n++
		require.NoError(t, end(), name)
		require.Zero(t, c.PID())
		require.Error(t, db.Ping(), name)
		require.Error(t, end(), name)
		require.NoError(t, c.Start(), name)
		require.Error(t, c.Start(), name)
		var got int
		require.NoError(t, db.QueryRow(`SELECT count(*) FROM x`).Scan(&got), name)
		require.Equal(t, n, got, name)
	}
}

func TestClusterTakesAnotherPortWhereItsOwnIsTaken(t *testing.T) {
	if testing.Short() {
		return
	}
	c := Start(t, Options{})
	require.NoError(t, c.Stop(Fast))
	l, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", c.port))
	require.NoError(t, err)
	defer l.Close()
	require.Error(t, c.start(), "on a port that is taken")
	c.port = 0
	require.NoError(t, c.Start())
}

// The test binary runs itself as the process that is killed.
const childEnv = "OUTBOX_PGTEST_CHILD"

func TestMain(m *testing.M) {
	if os.Getenv(childEnv) == "" {
		os.Exit(m.Run())
	}
	c, err := newCluster(Options{})
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
	fmt.Println(c.PID(), c.dir)
	select {} // until it is killed
}

func TestNothingOutlivesAKilledTestProcess(t *testing.T) {
	if testing.Short() {
		return
	}
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"=1")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	var pid int
	var dir string
	_, err = fmt.Sscan(line, &pid, &dir)
	require.NoError(t, err, line)
	require.NoError(t, syscall.Kill(pid, 0), "the server runs")

	require.NoError(t, cmd.Process.Kill())
	cmd.Wait()
	require.Eventually(t, func() bool {
		_, err := os.Stat(dir)
		return errors.Is(err, fs.ErrNotExist)
	}, time.Minute, 20*time.Millisecond, "the directory stays")
	require.False(t, running(pid), "the server still runs")
}

// running reports whether pid is a process that has not ended. One that has
// may stay as a zombie where its new parent does not wait for it.
func running(pid int) bool {
	state, err := exec.Command("ps", "-o", "stat=", "-p", fmt.Sprint(pid)).Output()
	return err == nil && !strings.HasPrefix(string(state), "Z")
}

func TestPoolerLendsASessionForOneTransaction(t *testing.T) {
	if testing.Short() {
		return
	}
	dsn := Pooler(t, DSN(t), 2)
	db := OpenDSN(t, dsn+"&default_query_exec_mode=simple_protocol")
	conn, err := db.Conn(t.Context())
	require.NoError(t, err)
	defer conn.Close()
	var one, two, inside, locked int
	require.NoError(t, conn.QueryRowContext(t.Context(), `SELECT pg_backend_pid()`).Scan(&one))
	require.NoError(t, conn.QueryRowContext(t.Context(), `SELECT pg_backend_pid()`).Scan(&two))
	require.NotEqual(t, one, two)

	tx, err := conn.BeginTx(t.Context(), nil)
	require.NoError(t, err)
	require.NoError(t, tx.QueryRow(`SELECT pg_backend_pid()`).Scan(&one))
	require.NoError(t, tx.QueryRow(`SELECT pg_backend_pid()`).Scan(&inside))
	require.Equal(t, one, inside)
	require.NoError(t, tx.Commit())

	// A session lock stays where it was taken, out of its taker's reach.
	var ok bool
	require.NoError(t, conn.QueryRowContext(t.Context(), `SELECT pg_try_advisory_lock(1)`).Scan(&ok))
	require.True(t, ok)
	require.NoError(t, conn.QueryRowContext(t.Context(), `SELECT pg_advisory_unlock(1)`).Scan(&ok))
	require.False(t, ok)
	require.NoError(t, conn.QueryRowContext(t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'`).Scan(&locked))
	require.Equal(t, 1, locked)
}

func TestPoolerReplacesASessionWhoseClientWasLost(t *testing.T) {
	if testing.Short() {
		return
	}
	dsn := Pooler(t, DSN(t), 1) + "&default_query_exec_mode=exec"
	for range 3 {
		lost, err := pgx.Connect(t.Context(), dsn)
		require.NoError(t, err)
		_, err = lost.Exec(t.Context(), `BEGIN`)
		require.NoError(t, err)
		_, err = lost.Exec(t.Context(), `CREATE TABLE x (n int DEFAULT $1::int)`, 1)
		require.Error(t, err, "the transaction is now in error")
		require.NoError(t, lost.PgConn().Conn().Close(), "without a word")

		next, err := pgx.Connect(t.Context(), dsn)
		require.NoError(t, err)
		var sum int
		require.NoError(t, next.QueryRow(t.Context(), `SELECT $1::int + 1`, 1).Scan(&sum))
		require.Equal(t, 2, sum)
		require.NoError(t, next.Close(t.Context()))
	}
}
