package filestore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// What a caller may want to act on, beside the errors of package outbox.
var (
	// ErrLocked: another process, or another Store of this one, uses the file.
	ErrLocked = errors.New("file is in use")
	// ErrUnsafe: the file, its lock or its directory is not a private one of
	// this user, or somebody else has changed it. It was left as it was.
	ErrUnsafe = errors.New("file is not safe to use")
	// ErrFull: a limit of the Options would be passed. Nothing was written.
	ErrFull = errors.New("file is full")
)

// Options of a Store; the zero value works.
type Options struct {
	// MaxEntries is how many messages the file may hold, those included that
	// are kept after they were sent. Only a new message is refused, by
	// [ErrFull]; what is there can always be sent. Defaults to 10,000.
	MaxEntries int
	// MaxBytes is how many bytes the messages may take in the file, encoded,
	// when one is added. Defaults to 64 MiB.
	MaxBytes int64
	// Clock judges what is due and whose lease has lapsed. It is called by any
	// number of goroutines. Defaults to the host's. For tests.
	Clock func() time.Time
}

const (
	defaultMaxEntries = 10_000
	defaultMaxBytes   = 64 << 20
)

func (o *Options) complete() error {
	switch {
	case o.MaxEntries < 0:
		return fmt.Errorf("%w: MaxEntries is %d", outbox.ErrInvalid, o.MaxEntries)
	case o.MaxBytes < 0:
		return fmt.Errorf("%w: MaxBytes is %d", outbox.ErrInvalid, o.MaxBytes)
	}
	if o.MaxEntries == 0 {
		o.MaxEntries = defaultMaxEntries
	}
	if o.MaxBytes == 0 {
		o.MaxBytes = defaultMaxBytes
	}
	if o.Clock == nil {
		o.Clock = time.Now
	}
	return nil
}

// Store keeps an outbox in one file. It is safe for concurrent use: calls run
// one after another, and those that come while the file is being written
// share the next write. A call whose context ends while it waits for its turn
// has done nothing; once it has begun it is waited for.
type Store struct {
	o      Options
	file   file
	hinter outbox.Hinter

	mu    sync.Mutex
	queue []*op // waiting for the turn

	turn   chan struct{} // full while somebody has the turn, and with it all below
	lock   *lock         // nil once closed
	state  *state        // nil where the file is to be read
	read   fs.FileInfo   // of the file as last read or written; nil: there is none
	synced bool          // the directory, since the file was renamed into it
	served int           // ops in the last group
	buffer []byte        // for the next content
}

var _ outbox.JournalStore = (*Store)(nil)

// Open returns a store on the file at path and locks it: [ErrLocked] while
// another process, or another Store, has it. It makes the directory, with mode
// 0700, if that is missing. The file itself is read on first use, see
// [Store.Check], and made when the first message is added.
//
// It refuses, by [ErrUnsafe], a file that is a symbolic link, not a regular
// file, of another user, or on which group or others have any permission; and
// a directory that is a symbolic link, of another user than this one or root,
// or that others may write to. Bad options are outbox.ErrInvalid. Systems
// without flock are errors.ErrUnsupported.
func Open(path string, o Options) (*Store, error) {
	s, err := open(path, o, direct)
	if err != nil {
		return nil, fmt.Errorf("open outbox file %q: %w", path, err)
	}
	return s, nil
}

func open(path string, o Options, sys system) (*Store, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	switch {
	case path == "":
		return nil, fmt.Errorf("%w: the path is empty", outbox.ErrInvalid)
	case !supported:
		return nil, fmt.Errorf("%w on %s: it has no flock: use SQLite there", errors.ErrUnsupported, runtime.GOOS)
	}
	path, err := filepath.Abs(path) // it must not move with the working directory
	if err != nil {
		return nil, err
	}
	s := &Store{
		o: o, file: file{path: path, uid: os.Geteuid(), sys: sys}, turn: make(chan struct{}, 1),
	}
	if s.lock, err = s.file.acquire(); err != nil {
		return nil, err
	}
	return s, nil
}

// Path returns the absolute path of the file.
func (s *Store) Path() string { return s.file.path }

// Close waits for the calls in flight, forgets what was read and gives the
// lock back. A later call locks and reads the file again. Stop a relay first:
// it would be such a call. Closing twice does nothing.
func (s *Store) Close() error {
	s.turn <- struct{}{}
	defer func() { <-s.turn }()
	if s.lock == nil {
		return nil
	}
	s.serve(s.take())
	err := s.lock.release()
	s.lock, s.state, s.read, s.synced, s.buffer = nil, nil, nil, false, nil
	if err != nil {
		return fmt.Errorf("close outbox file %q: %w", s.file.path, err)
	}
	return nil
}

// Wake makes the relays on this store look at once.
func (s *Store) Wake() { s.hinter.Tell(outbox.Hint{}) }

// Hints implements outbox.RelayStore.
func (s *Store) Hints(f func(outbox.Hint)) (stop func()) { return s.hinter.Listen(f) }

// gather lets callers that the last write has woken join the next one, where
// several shared it: else the first of them would write alone.
func (s *Store) gather() {
	for range 2 * s.served {
		s.mu.Lock()
		waiting := len(s.queue)
		s.mu.Unlock()
		if waiting >= s.served {
			return
		}
		runtime.Gosched()
	}
}
