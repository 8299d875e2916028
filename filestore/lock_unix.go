//go:build darwin || dragonfly || freebsd || linux || netbsd || openbsd

package filestore

import (
	"errors"
	"io/fs"
	"os"
	"syscall"
)

const (
	noFollow  = syscall.O_NOFOLLOW
	noWait    = syscall.O_NONBLOCK
	supported = true
)

var errHeld = errors.New("held")

// tryLock takes flock's lock, which belongs to the open file: unlike fcntl's
// it also keeps a second Store of this process out, and is not lost when some
// other part of the process opens and closes the file. The kernel releases it
// when the process ends, however it does.
func tryLock(f *os.File) error {
	for {
		switch err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err {
		case syscall.EINTR:
		case syscall.EWOULDBLOCK:
			return errHeld
		default:
			return err
		}
	}
}

func owner(info fs.FileInfo) (uid int, ok bool) {
	st, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return 0, false
	}
	return int(st.Uid), true
}
