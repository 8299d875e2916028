//go:build !(darwin || dragonfly || freebsd || linux || netbsd || openbsd)

package filestore

import (
	"errors"
	"io/fs"
	"os"
)

// Systems without flock: Open refuses.
const (
	noFollow  = 0
	noWait    = 0
	supported = false
)

var errHeld = errors.New("held")

func tryLock(*os.File) error { return errors.ErrUnsupported }

func owner(fs.FileInfo) (uid int, ok bool) { return 0, false }
