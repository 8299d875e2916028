package filestore

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// A system runs the system calls of a store, each under its name. Tests make
// them fail, before and after their effect.
type system func(name string, call func() error) error

func direct(_ string, call func() error) error { return call() }

// errLost says that the new content may or may not be in the file.
var errLost = errors.New("it may or may not be there")

// replace makes content that of the file, durable when it returns nil:
//
//	lstat   path      must be the file that was read, or absent where there was none
//	open    path.tmp  O_WRONLY|O_CREAT|O_EXCL|O_NOFOLLOW, 0600
//	write   path.tmp
//	fsync   path.tmp  or a crash could leave the name on a file without content
//	fstat   path.tmp  to know the file again
//	close   path.tmp
//	rename  path.tmp to path
//	fsync   directory or a crash could bring the old file back
//
// An error that is not errLost means that the file is as before. After an
// errLost, was tells the file in place, whose directory is to be synced; nil
// where not even that is known.
func (f *file) replace(content []byte, before fs.FileInfo) (was fs.FileInfo, err error) {
	if err := f.unchanged(before); err != nil {
		return nil, err
	}
	written, err := f.writeTemp(content)
	if err != nil {
		_ = os.Remove(f.temp()) // the next write does so if this one fails
		return nil, err
	}
	if err := f.sys("rename", func() error { return os.Rename(f.temp(), f.path) }); err != nil {
		// An error does not prove that it did not happen.
		switch now, lookErr := f.lstat(); {
		case lookErr == nil && same(now, written): // it did
		case lookErr == nil && same(now, before), errors.Is(lookErr, fs.ErrNotExist) && before == nil:
			_ = os.Remove(f.temp())
			return nil, err
		default:
			return nil, fmt.Errorf("%w: %w", errLost, err)
		}
	}
	if err := f.syncDir(); err != nil {
		return written, fmt.Errorf("%w: sync the directory: %w", errLost, err)
	}
	return written, nil
}

func (f *file) writeTemp(content []byte) (info fs.FileInfo, err error) {
	// Only a crash, or a failed removal, leaves one: the lock is ours.
	if err := os.Remove(f.temp()); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, err
	}
	var t *os.File
	err = f.sys("open", func() (err error) {
		t, err = os.OpenFile(f.temp(), os.O_WRONLY|os.O_CREATE|os.O_EXCL|noFollow, 0o600)
		return err
	})
	if t != nil { // also where the call is said to have failed
		defer t.Close() // a second time, which does no harm
	}
	steps := []struct {
		name string
		call func() error
	}{
		{"write", func() error { _, err := t.Write(content); return err }},
		{"fsync", func() error { return t.Sync() }},
		{"fstat", func() error { info, err = t.Stat(); return err }},
		{"close", func() error { return t.Close() }},
	}
	for _, step := range steps {
		if err == nil {
			err = f.sys(step.name, step.call)
		}
	}
	return info, err
}

func (f *file) syncDir() error {
	return f.sys("fsync directory", func() error { return syncDir(filepath.Dir(f.path)) })
}

func syncDir(path string) error {
	d, err := os.Open(path)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// unchanged refuses a file that is not the one that was read or written last.
func (f *file) unchanged(before fs.FileInfo) error {
	now, err := f.lstat()
	switch {
	case errors.Is(err, fs.ErrNotExist) && before == nil, err == nil && before != nil && same(now, before):
		return nil
	case err != nil && !errors.Is(err, fs.ErrNotExist):
		return err
	}
	return fmt.Errorf("%w: another program has changed or removed it since it was read: find that program, then restart this one, or Close the store, to work on the file as it is now", ErrUnsafe)
}

func (f *file) lstat() (info fs.FileInfo, err error) {
	err = f.sys("lstat", func() error { info, err = os.Lstat(f.path); return err })
	return info, err
}

// same reports whether two looks were at one file, unchanged.
func same(a, b fs.FileInfo) bool {
	return b != nil && os.SameFile(a, b) && a.Size() == b.Size() && a.ModTime().Equal(b.ModTime())
}

// unknown is what callers are told after an errLost.
func unknown(err error) error {
	return fmt.Errorf("%w: read before you write it again: %w", outbox.ErrCommit, err)
}
