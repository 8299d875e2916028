//go:build pgbouncer

// The tests of this file need PgBouncer, so they are apart: make test-bouncer.
// The same is tried with a pooler of our own wherever there is a Postgres, see
// pooler_test.go.

package integration

import (
	"database/sql"
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
)

// bouncer is a PgBouncer in transaction mode.
type bouncer struct {
	t      *testing.T
	config string
	dsn    string // of the database given, through it
	cmd    *exec.Cmd
}

// newBouncer starts one before the server of a DSN, with so many sessions for
// each database.
func newBouncer(t *testing.T, dsn string, sessions int) *bouncer {
	t.Helper()
	server, err := url.Parse(dsn)
	require.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	port := listener.Addr().(*net.TCPAddr).Port
	require.NoError(t, listener.Close())

	dir := t.TempDir()
	for d := dir; d != os.TempDir() && d != "/"; d = filepath.Dir(d) { // it does not run as root
		require.NoError(t, os.Chmod(d, 0o755))
	}
	b := &bouncer{t: t, config: filepath.Join(dir, "pgbouncer.ini")}
	users := filepath.Join(dir, "users.txt")
	require.NoError(t, os.WriteFile(users, fmt.Appendf(nil, "%q \"\"\n", server.User.Username()), 0o644))
	require.NoError(t, os.WriteFile(b.config, fmt.Appendf(nil, `[databases]
* = host=%s port=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = %s
pool_mode = transaction
default_pool_size = %d
max_client_conn = 500
`, server.Hostname(), server.Port(), port, users, sessions), 0o644))
	server.Host = fmt.Sprint("127.0.0.1:", port)
	b.dsn = server.String()
	b.start()
	t.Cleanup(b.stop)
	return b
}

func (b *bouncer) start() {
	b.t.Helper()
	args := []string{"-q", b.config}
	if os.Getuid() == 0 {
		args = append([]string{"-u", "nobody"}, args...)
	}
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		program = "/usr/sbin/pgbouncer"
	}
	b.cmd = exec.Command(program, args...)
	b.cmd.Stderr = os.Stderr
	require.NoError(b.t, b.cmd.Start(), "these tests need PgBouncer: make test-bouncer installs it")
	eventually(b.t, "PgBouncer to answer", func() bool {
		conn, err := pgx.Connect(b.t.Context(), b.dsn+"&default_query_exec_mode=exec")
		if err == nil {
			err = conn.Close(b.t.Context())
		}
		return err == nil
	})
}

func (b *bouncer) stop() {
	_ = b.cmd.Process.Kill()
	_ = b.cmd.Wait()
}

// behindBouncer is a site behind a PgBouncer.
func behindBouncer(t *testing.T, mode string, sessions int) (*site, *bouncer, *sql.DB) {
	dsn := pgtest.DSN(t)
	b := newBouncer(t, dsn, sessions)
	return newSite(t, dialect.Postgres(), "pgx", withParameter(t, b.dsn, "default_query_exec_mode", mode)), b, pgtest.OpenDSN(t, dsn)
}

func TestPgBouncerRounds(t *testing.T) {
	for _, mode := range pooled {
		t.Run(mode, func(t *testing.T) {
			s, _, direct := behindBouncer(t, mode, 4)
			s.round(t)
			s.mailRound(t)
			requireUnchanged(t, s, direct)
		})
	}
}

func TestPgBouncerKeepsTheContract(t *testing.T) {
	outboxtest.TestLatest(t, func(t *testing.T) (outbox.LatestStore, *sql.DB) {
		s, _, _ := behindBouncer(t, "exec", 30)
		return s.store, s.db
	})
	outboxtest.TestJournal(t, func(t *testing.T) (outbox.JournalStore, *sql.DB) {
		s, _, _ := behindBouncer(t, "exec", 30)
		return s.store, s.db
	})
}

// A PgBouncer that is killed and started again under load costs nothing.
func TestPgBouncerRestarts(t *testing.T) {
	s, b, _ := behindBouncer(t, "exec", 4)
	j := s.journal("mail")
	ms := append(letters("plain", 200, 0), letters("grouped", 200, 9)...)
	s.put(j, ms...)
	var r receiver
	stop := s.senders(2, new(logbook), "mail", r.send, outbox.SendOptions{BatchSize: 5, Lease: 2 * time.Second})
	for n := range 3 {
		eventually(t, "messages to be sent", func() bool { return r.len() > n*100 })
		b.stop()
		time.Sleep(200 * time.Millisecond)
		b.start()
	}
	s.db = s.open()
	eventually(t, "all to be sent", func() bool { return s.unfinished() == 0 })
	stop()
	for _, m := range ms {
		require.NotZero(t, r.times()[m.Key], m.Key)
	}
}
