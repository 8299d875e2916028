package filestore

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

// A file is where a store keeps its messages. Its lock is a file of its own,
// path.lock, that is never renamed or removed, as replacing the locked file
// would let two processes each lock one of two; its next content is written
// to path.tmp.
type file struct {
	path string
	uid  int // of this process
	sys  system
}

func (f *file) temp() string { return f.path + ".tmp" }

// A lock is held until it is released, or its process dies.
type lock struct {
	f        *os.File
	orphaned bool // whoever had it before died with it
}

// prepare makes the directory if it is missing, and refuses what others could
// read or replace. It changes nothing else.
func (f *file) prepare() error {
	dir := filepath.Dir(f.path)
	if err := makeDir(dir); err != nil {
		return fmt.Errorf("make directory: %w", err)
	}
	info, err := os.Lstat(dir)
	if err != nil {
		return err
	}
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%w: its directory is a symbolic link, which somebody could point elsewhere: name the directory that it leads to", ErrUnsafe)
	case !info.IsDir():
		return fmt.Errorf("%w: %q is not a directory", ErrUnsafe, dir)
	case info.Mode().Perm()&0o022 != 0:
		return fmt.Errorf("%w: others may write to its directory (mode %04o) and so replace it: `chmod go-w %s`, or name another", ErrUnsafe, info.Mode().Perm(), dir)
	}
	if uid, ok := owner(info); ok && uid != f.uid && uid != 0 {
		return fmt.Errorf("%w: its directory is owned by uid %d, this process is uid %d: run as that user, or name a directory of its own", ErrUnsafe, uid, f.uid)
	}
	info, err = os.Lstat(f.path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	return f.private(info)
}

// makeDir makes a directory and what is missing above it, and syncs the
// directories that got an entry: a crash must not take the outbox away with
// its directory.
func makeDir(dir string) error {
	err := os.Mkdir(dir, 0o700)
	switch parent := filepath.Dir(dir); {
	case err == nil:
		return syncDir(parent)
	case errors.Is(err, fs.ErrExist):
		return nil
	case errors.Is(err, fs.ErrNotExist) && parent != dir:
		if err := makeDir(parent); err != nil {
			return err
		}
		return makeDir(dir)
	default:
		return err
	}
}

// private refuses a file that is not one of this user's alone.
func (f *file) private(info fs.FileInfo) error {
	switch {
	case info.Mode()&fs.ModeSymlink != 0:
		return fmt.Errorf("%w: %q is a symbolic link, and writing would replace the link: name the file that it leads to", ErrUnsafe, info.Name())
	case !info.Mode().IsRegular():
		return fmt.Errorf("%w: %q is not a regular file: name another", ErrUnsafe, info.Name())
	case info.Mode().Perm()&0o077 != 0:
		return fmt.Errorf("%w: group or others have permissions on %q (mode %04o): look who used them, then `chmod 600` it", ErrUnsafe, info.Name(), info.Mode().Perm())
	}
	if uid, ok := owner(info); ok && uid != f.uid {
		return fmt.Errorf("%w: %q is owned by uid %d, this process is uid %d: run as that user, or name another file", ErrUnsafe, info.Name(), uid, f.uid)
	}
	return nil
}

// openPrivate opens a file of this user's alone. It follows no link and waits
// for no writer of a pipe, and judges the file that it has opened, not one
// that has been at its place a moment before.
func (f *file) openPrivate(path string, flag int) (*os.File, fs.FileInfo, error) {
	file, err := os.OpenFile(path, flag|noFollow|noWait, 0o600)
	if err != nil {
		if info, lookErr := os.Lstat(path); lookErr == nil { // which may say why
			err = cmp.Or(f.private(info), err)
		}
		return nil, nil, err
	}
	info, err := file.Stat()
	if err == nil {
		err = f.private(info)
	}
	if err != nil {
		file.Close()
		return nil, nil, err
	}
	return file, info, nil
}

// acquire takes the lock and removes what a crash in the middle of a write
// has left.
func (f *file) acquire() (*lock, error) {
	if err := f.prepare(); err != nil {
		return nil, err
	}
	path := f.path + ".lock"
	l, info, err := f.openPrivate(path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, fmt.Errorf("open lock: %w", err)
	}
	held, err := f.hold(l, info, path)
	if err != nil {
		l.Close()
		return nil, err
	}
	return held, nil
}

func (f *file) hold(l *os.File, info fs.FileInfo, path string) (*lock, error) {
	err := tryLock(l)
	mark, readErr := io.ReadAll(io.LimitReader(l, 100))
	switch {
	case errors.Is(err, errHeld):
		return nil, fmt.Errorf("%w%s: one process and one Store use a file at a time: stop the other, or close it, or give this one a file of its own", ErrLocked, holder(mark))
	case err != nil:
		return nil, fmt.Errorf("lock: %w", err)
	case readErr != nil:
		return nil, fmt.Errorf("read lock: %w", readErr)
	}
	// Somebody may have removed the file while it was opened: then the next
	// process would lock another one.
	if now, err := os.Lstat(path); err != nil || !os.SameFile(now, info) {
		return nil, fmt.Errorf("%w: somebody replaced %q just now: try again, and let nobody remove it", ErrUnsafe, path)
	}
	if err := os.Remove(f.temp()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("remove what an interrupted write has left: %w", err)
	}
	// While the lock is held its file says by whom. Release empties it, so
	// that a mark found here is of a process that died.
	if err := writeMark(l, fmt.Sprintf("pid %d\n", os.Getpid())); err != nil {
		return nil, fmt.Errorf("write lock: %w", err)
	}
	return &lock{f: l, orphaned: len(mark) > 0}, nil
}

func holder(mark []byte) string {
	if text := strings.TrimSpace(string(mark)); strings.HasPrefix(text, "pid ") {
		return " (" + text + ")"
	}
	return ""
}

func writeMark(l *os.File, text string) error {
	if err := l.Truncate(0); err != nil {
		return err
	}
	_, err := l.WriteAt([]byte(text), 0)
	return err
}

func (l *lock) release() error {
	return errors.Join(l.f.Truncate(0), l.f.Close())
}

// load reads the file.
func (f *file) load() (content []byte, info fs.FileInfo, err error) {
	var r *os.File
	err = f.sys("open to read", func() error { r, info, err = f.openPrivate(f.path, os.O_RDONLY); return err })
	if err != nil {
		return nil, nil, err
	}
	defer r.Close()
	err = f.sys("read", func() error { content, err = io.ReadAll(r); return err })
	return content, info, err
}
