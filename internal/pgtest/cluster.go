package pgtest

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Options of a server. The zero value is fast: it survives the death of its
// processes but not that of the machine.
type Options struct {
	Durable  bool     // fsync and full_page_writes on, as in production
	Settings []string // further settings, "name=value"; the last one of a name holds
}

// Cluster is a Postgres server of a test's own. Its methods are not safe for
// concurrent use.
type Cluster struct {
	bin    string // the directory of the server's programs
	dir    string // holds data/ and log
	port   int
	opts   Options
	owner  owner
	guard  *guard          // nil before it is started
	server *exec.Cmd       // nil: stopped
	life   context.Context // of server: done when it has exited
}

// Mode is how [Cluster.Stop] stops a server.
type Mode int

const (
	Fast      Mode = iota // roll back what is open, write all to disk, exit
	Immediate             // exit; what is not on disk is left to recovery
)

// Start starts a server for this test alone and removes it when the test ends.
// It needs the server's programs on this machine, whatever [Env] says.
func Start(t testing.TB, o Options) *Cluster {
	t.Helper()
	c, err := newCluster(o)
	if err != nil {
		t.Fatalf("start postgres for the test: %v\n%s", err, remedy)
	}
	t.Cleanup(func() {
		if err := c.remove(); err != nil {
			t.Errorf("remove the test's postgres: %v", err)
		}
	})
	return c
}

// DSN returns how to reach the server's database "postgres" as a superuser. It
// stays the same when the server is started again.
func (c *Cluster) DSN() string {
	return fmt.Sprintf("postgres://postgres@127.0.0.1:%d/postgres?sslmode=disable", c.port)
}

// PID returns the process id of the postmaster, 0 while it is stopped.
func (c *Cluster) PID() int {
	if c.server == nil {
		return 0
	}
	return c.server.Process.Pid
}

// Standby starts a hot standby of the server, a replica that follows it and
// answers reads, and removes it when the test ends.
func (c *Cluster) Standby(t testing.TB) *Cluster {
	t.Helper()
	s, err := create(c.bin, c.owner, c.opts, func(s *Cluster) *exec.Cmd {
		return s.Command("pg_basebackup", "--dbname="+c.DSN(), "--pgdata="+s.data(), "--write-recovery-conf", "--checkpoint=fast", "--no-sync")
	})
	if err != nil {
		t.Fatalf("start a standby for the test: %v\n%s", err, remedy)
	}
	t.Cleanup(func() {
		if err := s.remove(); err != nil {
			t.Errorf("remove the test's standby: %v", err)
		}
	})
	return s
}

func newCluster(o Options) (*Cluster, error) {
	bin, err := findBinaries()
	if err != nil {
		return nil, err
	}
	owner, err := findOwner()
	if err != nil {
		return nil, err
	}
	return create(bin, owner, o, func(c *Cluster) *exec.Cmd {
		return c.Command("initdb", "--no-sync", "--no-locale", "--encoding=UTF8", "--auth=trust", "--username=postgres", "--pgdata="+c.data())
	})
}

// create makes a server whose files one of the server's programs makes, and
// starts it.
func create(bin string, owner owner, o Options, files func(*Cluster) *exec.Cmd) (_ *Cluster, err error) {
	c := &Cluster{bin: bin, opts: o, owner: owner}
	if c.dir, err = os.MkdirTemp("", "outbox-postgres-"); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, c.remove())
		}
	}()
	if err := c.owner.give(c.dir); err != nil {
		return nil, err
	}
	if c.guard, err = startGuard(c.dir); err != nil {
		return nil, err
	}
	cmd := files(c)
	if out, err := cmd.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("%s: %w\n%s", filepath.Base(cmd.Path), err, out)
	}
	return c, c.Start()
}

func (c *Cluster) data() string { return filepath.Join(c.dir, "data") }
func (c *Cluster) log() string  { return filepath.Join(c.dir, "log") }

// Command prepares one of the server's programs, pg_dump for one, to run as the
// server's owner in a directory that it may write to.
func (c *Cluster) Command(name string, args ...string) *exec.Cmd {
	cmd := exec.Command(filepath.Join(c.bin, name), args...)
	cmd.Dir = c.dir
	cmd.Env = append(os.Environ(), "LC_ALL=C")
	c.owner.run(cmd)
	return cmd
}

// Start starts the stopped or killed server again, on the same port, and
// returns when it answers, recovery included.
func (c *Cluster) Start() error {
	const tries = 10
	if c.server != nil {
		return errors.New("start postgres: it is running")
	}
	fresh := c.port == 0
	var err error
	for range tries {
		if fresh {
			c.port = freePort()
		}
		if err = c.start(); err == nil {
			return nil
		}
		// Another process took the port, or what is left of a killed server
		// has not gone yet.
		time.Sleep(200 * time.Millisecond)
	}
	log, _ := os.ReadFile(c.log())
	return fmt.Errorf("start postgres: %w\n%s", err, log[max(0, len(log)-4096):])
}

func (c *Cluster) start() error {
	args := []string{"-D", c.data(), "-p", strconv.Itoa(c.port)}
	settings := []string{"listen_addresses=127.0.0.1", "unix_socket_directories=", "max_connections=200", "shared_buffers=64MB"}
	if !c.opts.Durable {
		settings = append(settings, "fsync=off", "full_page_writes=off")
	}
	for _, s := range append(settings, c.opts.Settings...) {
		args = append(args, "-c", s)
	}
	log, err := os.OpenFile(c.log(), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := c.Command("postgres", args...)
	cmd.Stdout, cmd.Stderr = log, log
	if err := cmd.Start(); err != nil {
		return err
	}
	life, end := context.WithCancel(context.Background())
	go func() {
		cmd.Wait()
		end()
	}()
	c.server, c.life = cmd, life
	if err := c.ready(); err != nil {
		return errors.Join(err, c.signal(killSignal))
	}
	return nil
}

// ready waits until the server answers.
func (c *Cluster) ready() error {
	deadline := time.After(time.Minute)
	for {
		err := c.ask()
		if err == nil {
			return nil
		}
		select {
		case <-c.life.Done():
			return errors.New("it exited at once")
		case <-deadline:
			return fmt.Errorf("it does not answer after a minute: %w", err)
		case <-time.After(25 * time.Millisecond):
		}
	}
}

// ask tells whether this server answers, and not another one on its port.
func (c *Cluster) ask() error {
	ctx, cancel := context.WithTimeout(c.life, 5*time.Second)
	defer cancel()
	conn, err := pgx.Connect(ctx, c.DSN())
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	var dir string
	if err := conn.QueryRow(ctx, `SHOW data_directory`).Scan(&dir); err != nil {
		return err
	}
	if dir != c.data() {
		return fmt.Errorf("another server has port %d", c.port)
	}
	return nil
}

// Stop stops the server and returns when it has gone.
func (c *Cluster) Stop(m Mode) error {
	if c.server == nil {
		return errors.New("stop postgres: it is stopped")
	}
	return c.signal(stopSignals[m])
}

// signal sends s to the postmaster and waits until it has gone.
func (c *Cluster) signal(s os.Signal) error {
	if err := c.server.Process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop postgres: %w", err)
	}
	select {
	case <-c.life.Done():
	case <-time.After(time.Minute):
		return fmt.Errorf("stop postgres: it is still there a minute after %q", s)
	}
	c.server = nil
	return nil
}

// remove ends the server and deletes its files.
func (c *Cluster) remove() error {
	var err error
	if c.server != nil {
		err = c.Stop(Immediate)
	}
	if err == nil {
		err = os.RemoveAll(c.dir)
	}
	if c.guard != nil {
		err = errors.Join(err, c.guard.dismiss(err == nil))
	}
	return err
}

// freePort returns a port that is free now. It lies below those that systems
// give to outgoing connections: one of these could else take it while the
// server is stopped.
func freePort() int {
	for {
		port := 20000 + rand.IntN(12000)
		l, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", strconv.Itoa(port)))
		if err == nil {
			l.Close()
			return port
		}
	}
}
