package integration

import (
	"bufio"
	"context"
	"database/sql"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/dialect"
	"github.com/seed-2b36b211/sqloutbox/outbox"
	"github.com/seed-2b36b211/sqloutbox/outbox/outboxtest"
	"github.com/seed-2b36b211/sqloutbox/sqlstore"
)

// workerEnv holds the order of a process that is a worker.
const workerEnv = "OUTBOX_TEST_WORKER"

// An order tells a worker, a relay in a process of its own, what to do.
type order struct {
	Dialect, Driver, DSN string
	Channel              string
	Lease                time.Duration
	BatchSize, InFlight  int
	Hold                 time.Duration // how long each publication takes; cut short when its context ends
	HaltAt               step          // announce this step and stand still there, for ever
	DieOn                string        // exit in the middle of publishing this key
	Errand               *errand       // the channel is a journal's
}

// A step of a relay at which its process can be killed.
type step string

const (
	beforeClaim   step = "before claim"
	afterClaim    step = "after claim"
	inPublish     step = "in publish"
	beforeSettle  step = "before settle"
	afterSettle   step = "after settle"
	killedExit         = 137 // what an out-of-memory kill looks like
	workerTimeout      = 2 * time.Minute
)

// TestRelayProcess is a worker where it is told to be one, else nothing. It
// ends when its standard input does, as when the process that started it is gone.
func TestRelayProcess(t *testing.T) {
	text := os.Getenv(workerEnv)
	if text == "" {
		return
	}
	var o order
	require.NoError(t, json.Unmarshal([]byte(text), &o))
	ctx, stop := context.WithTimeout(context.Background(), workerTimeout)
	defer stop()
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	announce("ended %v", o.work(ctx))
}

var announcing sync.Mutex

// announce writes a line in one piece: the process may be killed at any time.
func announce(format string, args ...any) {
	announcing.Lock()
	defer announcing.Unlock()
	fmt.Printf("> "+format+"\n", args...)
}

func (o order) work(ctx context.Context) error {
	db, err := sql.Open(o.Driver, o.DSN)
	if err != nil {
		return err
	}
	defer db.Close()
	d := dialect.Postgres()
	if o.Dialect == "sqlite" {
		d = dialect.SQLite()
	}
	store, err := sqlstore.New(db, d, sqlstore.Options{})
	if err != nil {
		return err
	}
	if o.Errand != nil {
		return o.run(ctx, db, store)
	}
	halting := outboxtest.NewFaulty(store)
	halting.Intercept(o.intercept)
	latest, err := outbox.NewLatest(halting, outbox.LatestOptions[string]{Channel: o.Channel})
	if err != nil {
		return err
	}
	relay, err := outbox.NewRelay(outbox.RelayOptions{
		PollInterval: 50 * time.Millisecond, Logger: slog.New(slog.DiscardHandler), Observe: o.observe,
	}, latest.Publisher(o.publish, outbox.PublishOptions{Lease: o.Lease, BatchSize: o.BatchSize, InFlight: o.InFlight}))
	if err != nil {
		return err
	}
	announce("ready")
	return relay.Run(ctx)
}

func (o order) intercept(_ context.Context, s outboxtest.Step, when outboxtest.When) error {
	switch {
	case s == outboxtest.StepClaim && when == outboxtest.Before:
		o.reached(beforeClaim)
	case s == outboxtest.StepClaim:
		o.reached(afterClaim)
	case s == outboxtest.StepSettle && when == outboxtest.Before:
		o.reached(beforeSettle)
	case s == outboxtest.StepSettle:
		o.reached(afterSettle)
	}
	return nil
}

// reached stands still where the order says so.
func (o order) reached(s step) {
	if s == o.HaltAt {
		announce("at %s", s)
		select {}
	}
}

func (o order) publish(ctx context.Context, batch []*outbox.Entry[string]) error {
	for _, e := range batch {
		announce("published %s %d %d", e.Key, e.Version, e.Attempt)
		if e.Key == o.DieOn {
			os.Exit(killedExit)
		}
	}
	o.reached(inPublish)
	select {
	case <-ctx.Done():
		announce("cancelled %v", context.Cause(ctx))
		return ctx.Err()
	case <-time.After(o.Hold):
		return nil
	}
}

func (o order) observe(e outbox.Event) {
	if e.Kind == outbox.EventLost {
		announce("lost %d", e.Rows)
	}
}

// worker is the process as its parent sees it.
type worker struct {
	t     testing.TB
	cmd   *exec.Cmd
	stdin io.Closer
	done  chan struct{} // closed when all that it wrote has been read

	mu    sync.Mutex
	lines []string
}

// startWorker runs this test binary as a worker on the site's database.
func (s *site) startWorker(o order, environment ...string) *worker {
	s.t.Helper()
	o.Dialect, o.Driver, o.DSN = s.dialect.Name(), s.driver, s.dsn
	text, err := json.Marshal(o)
	require.NoError(s.t, err)
	cmd := exec.Command(os.Args[0], "-test.run=^TestRelayProcess$", "-test.count=1")
	cmd.Env = append(os.Environ(), append(environment, workerEnv+"="+string(text))...)
	cmd.Stderr = os.Stderr
	w := &worker{t: s.t, cmd: cmd, done: make(chan struct{})}
	stdin, err := cmd.StdinPipe()
	require.NoError(s.t, err)
	w.stdin = stdin
	stdout, err := cmd.StdoutPipe()
	require.NoError(s.t, err)
	require.NoError(s.t, cmd.Start())
	go w.read(stdout)
	s.t.Cleanup(w.kill)
	return w
}

func (w *worker) read(r io.Reader) {
	defer close(w.done)
	for lines := bufio.NewScanner(r); lines.Scan(); {
		if line, ok := strings.CutPrefix(lines.Text(), "> "); ok {
			w.mu.Lock()
			w.lines = append(w.lines, line)
			w.mu.Unlock()
		}
	}
}

// said returns the lines that start with a text.
func (w *worker) said(text string) (lines []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, line := range w.lines {
		if strings.HasPrefix(line, text) {
			lines = append(lines, line)
		}
	}
	return lines
}

// await waits for a line that starts with a text.
func (w *worker) await(text string) {
	w.t.Helper()
	eventually(w.t, "the worker to say "+text, func() bool { return len(w.said(text)) > 0 })
}

// published returns what the worker has published.
func (w *worker) published() (list []publication) {
	for _, line := range w.said("published ") {
		var p publication
		_, err := fmt.Sscanf(line, "published %s %d %d", &p.key, &p.version, &p.attempt)
		require.NoError(w.t, err, line)
		list = append(list, p)
	}
	return list
}

func (w *worker) publishedKey(key string) bool {
	return slices.ContainsFunc(w.published(), func(p publication) bool { return p.key == key })
}

// kill ends the process with SIGKILL and returns when it is gone.
func (w *worker) kill() {
	_ = w.cmd.Process.Kill() // may have ended by itself
	w.exited()
}

// stop asks the process to end as a deployment does.
func (w *worker) stop() {
	_ = w.stdin.Close()
	w.exited()
}

// exited waits for the end and returns how it ended.
func (w *worker) exited() int {
	<-w.done
	_ = w.cmd.Wait()
	return w.cmd.ProcessState.ExitCode()
}
