package main

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
)

// settings of the server: fsync and the like are as they come, on; memory and
// the distance of checkpoints are as one would set them on a server this small.
var settings = []string{"shared_buffers=512MB", "max_wal_size=8GB", "checkpoint_timeout=30min"}

// A server is a Postgres of the run's own.
type server struct {
	cluster *pgtest.Cluster
	dsn     string
	holder  *holder
}

// A holder stands in for the test that pgtest starts servers for: embedding
// the interface lends it the method that only package testing can write, and
// pgtest calls none but those below.
type holder struct {
	testing.TB
	failed   error
	cleanups []func()
}

func (h *holder) Helper()          {}
func (h *holder) Cleanup(f func()) { h.cleanups = append(h.cleanups, f) }
func (h *holder) Errorf(format string, args ...any) {
	h.failed = errors.Join(h.failed, fmt.Errorf(format, args...))
}

// Fatalf ends the call of pgtest, not the program; startServer catches it.
func (h *holder) Fatalf(format string, args ...any) { panic(fatal{fmt.Errorf(format, args...)}) }

type fatal struct{ error }

// startServer starts a server that loses nothing: fsync, full_page_writes and
// synchronous_commit are on.
func startServer() (s *server, err error) {
	h := &holder{}
	defer func() {
		if r := recover(); r != nil {
			f, ok := r.(fatal)
			if !ok {
				panic(r)
			}
			err = f.error
		}
	}()
	c := pgtest.Start(h, pgtest.Options{Durable: true, Settings: settings})
	return &server{cluster: c, dsn: c.DSN(), holder: h}, nil
}

// stop stops the server and removes its files.
func (s *server) stop() error {
	for i := len(s.holder.cleanups) - 1; i >= 0; i-- {
		s.holder.cleanups[i]()
	}
	return s.holder.failed
}

// cpu returns the time that the server's processes have computed, those that
// have ended included, to a hundredth of a second. NaN seconds where the
// system does not tell (it needs Linux's /proc).
func (s *server) cpu() float64 {
	self := procStat(s.cluster.PID())
	if self == nil {
		return math.NaN()
	}
	ticks := self[11] + self[12] + self[13] + self[14] // its own, and its children's that it has waited for
	dirs, _ := filepath.Glob("/proc/[0-9]*")           // fails for a bad pattern only
	for _, dir := range dirs {
		pid, _ := strconv.Atoi(filepath.Base(dir)) // digits, by the pattern
		if child := procStat(pid); child != nil && int(child[1]) == s.cluster.PID() {
			ticks += child[11] + child[12]
		}
	}
	return ticks / 100
}

// procStat returns the numbers after a process's name in /proc/PID/stat, nil
// where there are none.
func procStat(pid int) []float64 {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return nil
	}
	text := string(b)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 15 {
		return nil
	}
	numbers := make([]float64, len(fields))
	for i, f := range fields {
		numbers[i], _ = strconv.ParseFloat(f, 64) // the first is a letter
	}
	return numbers
}

// clientCPU returns the seconds that this process has computed.
func clientCPU() float64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return math.NaN()
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano()).Seconds()
}

// wal returns how many bytes of WAL were written since the server was made.
func wal(ctx context.Context, db *sql.DB) (n float64, err error) {
	err = db.QueryRowContext(ctx, `SELECT (pg_current_wal_insert_lsn() - '0/0'::pg_lsn)::float8`).Scan(&n)
	return n, err
}

// A counter counts the statements of the pools that were opened with it, BEGIN
// and COMMIT included. Each is a round trip, but for those that a driver sends
// in one batch.
type counter struct{ n atomic.Int64 }

func (c *counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (*counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (c *counter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (c *counter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) { c.n.Add(1) }
func (*counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)       {}

func (c *counter) TraceCopyFromStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceCopyFromStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (*counter) TraceCopyFromEnd(context.Context, *pgx.Conn, pgx.TraceCopyFromEndData) {}

// openStd opens a pool of database/sql over pgx; c may be nil.
func openStd(dsn string, connections int, c *counter) (*sql.DB, error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	if c != nil {
		config.Tracer = c
	}
	db := stdlib.OpenDB(*config)
	db.SetMaxOpenConns(connections)
	db.SetMaxIdleConns(connections)
	return db, nil
}

// openPgx opens a pool of pgx's own; c may be nil.
func openPgx(ctx context.Context, dsn string, connections int, c *counter) (*pgxpool.Pool, error) {
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		return nil, err
	}
	config.MaxConns = int32(connections)
	if c != nil {
		config.ConnConfig.Tracer = c
	}
	return pgxpool.NewWithConfig(ctx, config)
}
