//go:build unix

package filestore

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func TestOpenMakesAPrivateDirectoryAndFile(t *testing.T) {
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	path := filepath.Join(t.TempDir(), "a", "b", "outbox.json")
	s := openTest(t, path, Options{}, direct)
	require.Equal(t, path, s.Path())
	_, err := os.Lstat(path)
	require.ErrorIs(t, err, os.ErrNotExist, "made with the first message")
	require.NoError(t, s.Check(t.Context()))
	add(t, journalOn(t, s), "k")
	for name, mode := range map[string]os.FileMode{
		path: 0o600, path + ".lock": 0o600, filepath.Dir(path): 0o700 | os.ModeDir, filepath.Dir(filepath.Dir(path)): 0o700 | os.ModeDir,
	} {
		info, err := os.Lstat(name)
		require.NoError(t, err)
		require.Equal(t, mode, info.Mode(), name)
	}
}

func TestPathDoesNotMoveWithTheWorkingDirectory(t *testing.T) {
	dir := t.TempDir()
	t.Chdir(dir)
	s := openTest(t, "outbox.json", Options{}, direct)
	t.Chdir(t.TempDir())
	add(t, journalOn(t, s), "k")
	_, err := os.Lstat(filepath.Join(dir, "outbox.json"))
	require.NoError(t, err)
}

// What is not safe is refused before anything is touched, by a reason and a
// remedy.
func TestUnsafeFilesAreRefused(t *testing.T) {
	const other = 4242 // some user's
	for name, c := range map[string]struct {
		prepare func(t *testing.T, path string) error
		uid     int
		says    string
	}{
		"symbolic link": {func(t *testing.T, path string) error {
			target := filepath.Join(t.TempDir(), "target")
			return errors.Join(os.WriteFile(target, []byte(golden(t)), 0o600), os.Symlink(target, path))
		}, os.Geteuid(), "is a symbolic link"},
		"link to nothing": {func(_ *testing.T, path string) error { return os.Symlink("nowhere", path) }, os.Geteuid(), "is a symbolic link"},
		"directory":       {func(_ *testing.T, path string) error { return os.Mkdir(path, 0o700) }, os.Geteuid(), "is not a regular file"},
		"pipe":            {func(_ *testing.T, path string) error { return syscall.Mkfifo(path, 0o600) }, os.Geteuid(), "is not a regular file"},
		"group may read":  {func(t *testing.T, path string) error { return withMode(path, 0o640) }, os.Geteuid(), "mode 0640"},
		"others may run":  {func(t *testing.T, path string) error { return withMode(path, 0o601) }, os.Geteuid(), "mode 0601"},
		// Where the directory is not root's, that is refused first.
		"other's file":         {func(_ *testing.T, path string) error { return withMode(path, 0o600) }, other, "is owned by uid"},
		"directory of anyone":  {func(_ *testing.T, path string) error { return os.Chmod(filepath.Dir(path), 0o777) }, os.Geteuid(), "others may write to its directory (mode 0777)"},
		"directory of a group": {func(_ *testing.T, path string) error { return os.Chmod(filepath.Dir(path), 0o770) }, os.Geteuid(), "others may write to its directory (mode 0770)"},
		"linked directory": {func(_ *testing.T, path string) error {
			dir := filepath.Dir(path)
			return errors.Join(os.Rename(dir, dir+"2"), os.Symlink(dir+"2", dir))
		}, os.Geteuid(), "its directory is a symbolic link"},
		"linked lock": {func(_ *testing.T, path string) error { return os.Symlink("elsewhere", path+".lock") }, os.Geteuid(), "is a symbolic link"},
		"open lock":   {func(_ *testing.T, path string) error { return withMode(path+".lock", 0o666) }, os.Geteuid(), "mode 0666"},
	} {
		t.Run(name, func(t *testing.T) {
			path := newPath(t)
			require.NoError(t, os.Mkdir(filepath.Dir(path), 0o700))
			require.NoError(t, c.prepare(t, path))
			before := tree(t, filepath.Dir(path))
			_, err := (&file{path: path, uid: c.uid, sys: direct}).acquire()
			require.ErrorIs(t, err, ErrUnsafe)
			require.ErrorContains(t, err, c.says)
			require.Equal(t, before, tree(t, filepath.Dir(path)), "nothing was touched")
			if c.uid == os.Geteuid() {
				_, err = Open(path, Options{})
				require.ErrorIs(t, err, ErrUnsafe)
				require.ErrorContains(t, err, path)
			}
		})
	}
}

func TestDirectoryOfAnotherUserIsRefused(t *testing.T) {
	path := newPath(t)
	f := &file{path: path, uid: os.Geteuid(), sys: direct}
	require.NoError(t, f.prepare())
	if os.Geteuid() == 0 {
		require.NoError(t, os.Chown(filepath.Dir(path), 4242, -1))
	} else {
		f.uid = 4242
	}
	require.ErrorContains(t, f.prepare(), "its directory is owned by uid")
}

// withMode makes a file with exactly that mode.
func withMode(path string, mode os.FileMode) error {
	return errors.Join(os.WriteFile(path, nil, 0o600), os.Chmod(path, mode))
}

// tree is what is in a directory: names, modes and times of change.
func tree(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	require.NoError(t, err)
	all := map[string]string{}
	for _, e := range entries {
		info, err := e.Info()
		require.NoError(t, err)
		all[e.Name()] = info.Mode().String() + info.ModTime().String()
	}
	return all
}

// The file may become unsafe between Open and its first use.
func TestFileIsJudgedWhenItIsRead(t *testing.T) {
	path := newPath(t)
	s := openTest(t, path, Options{}, direct)
	require.NoError(t, os.WriteFile(path, []byte(golden(t)), 0o600))
	require.NoError(t, os.Chmod(path, 0o644))
	require.ErrorIs(t, s.Check(t.Context()), ErrUnsafe)
	require.NoError(t, os.Rename(path, path+"2"))
	require.NoError(t, os.Chmod(path+"2", 0o600))
	require.NoError(t, os.Symlink(path+"2", path))
	require.ErrorIs(t, s.Check(t.Context()), ErrUnsafe)
	require.NoError(t, os.Remove(path))
	require.NoError(t, syscall.Mkfifo(path, 0o600))
	require.ErrorIs(t, s.Check(t.Context()), ErrUnsafe, "nobody waits for who writes to the pipe")
	require.NoError(t, os.Rename(path+"2", path))
	require.NoError(t, s.Check(t.Context()))
}

func TestSecondStoreOfTheProcessIsRefused(t *testing.T) {
	path := newPath(t)
	first := openTest(t, path, Options{}, direct)
	add(t, journalOn(t, first), "k")
	_, err := Open(path, Options{})
	require.ErrorIs(t, err, ErrLocked)
	require.NoError(t, first.Close())
	require.NoError(t, first.Close(), "closing twice does nothing")
	second := openTest(t, path, Options{}, direct)
	_, err = journalOn(t, first).Get(t.Context(), "k")
	require.ErrorIs(t, err, ErrLocked, "the closed one opens again, if it can")
	add(t, journalOn(t, second), "of the second")
	require.NoError(t, second.Close())
	require.Equal(t, []string{"k", "of the second"}, inMemory(t, journalOn(t, first)), "read again")
}

// Removing the lock while it is held must not let a second process in
// unnoticed for longer than until it looks.
func TestLockThatWasReplacedWhileOpenedIsRefused(t *testing.T) {
	path := newPath(t)
	f := &file{path: path, uid: os.Geteuid(), sys: direct}
	require.NoError(t, f.prepare())
	l, info, err := f.openPrivate(path+".lock", os.O_RDWR|os.O_CREATE)
	require.NoError(t, err)
	defer l.Close()
	require.NoError(t, os.Remove(path+".lock"))
	require.NoError(t, os.WriteFile(path+".lock2", nil, 0o600))
	require.NoError(t, os.Rename(path+".lock2", path+".lock"))
	_, err = f.hold(l, info, path+".lock")
	require.ErrorIs(t, err, ErrUnsafe)
}

func TestLeftoverOfAnInterruptedWriteIsRemoved(t *testing.T) {
	path := newPath(t)
	s := openTest(t, path, Options{}, direct)
	add(t, journalOn(t, s), "k")
	require.NoError(t, os.WriteFile(path+".tmp", []byte("half"), 0o600))
	add(t, journalOn(t, s), "over a leftover")
	_, err := os.Lstat(path + ".tmp")
	require.ErrorIs(t, err, os.ErrNotExist)
	require.NoError(t, os.WriteFile(path+".tmp", []byte("half"), 0o600))
	_, err = Open(path, Options{})
	require.ErrorIs(t, err, ErrLocked)
	_, err = os.Lstat(path + ".tmp")
	require.NoError(t, err, "it may be the holder's: without the lock it is left alone")
	require.NoError(t, s.Close())
	openTest(t, path, Options{}, direct)
	_, err = os.Lstat(path + ".tmp")
	require.ErrorIs(t, err, os.ErrNotExist)
}

func TestOptionsAreChecked(t *testing.T) {
	for _, o := range []Options{{MaxEntries: -1}, {MaxBytes: -1}} {
		_, err := Open(newPath(t), o)
		require.ErrorIs(t, err, outbox.ErrInvalid)
	}
	_, err := Open("", Options{})
	require.ErrorIs(t, err, outbox.ErrInvalid)
}

// A full file refuses new messages, before anything is written, and nothing
// else.
func TestFullFileRefusesNewMessagesOnly(t *testing.T) {
	for name, o := range map[string]Options{"entries": {MaxEntries: 2}, "bytes": {MaxBytes: 500}} {
		t.Run(name, func(t *testing.T) {
			d := newDisk()
			s := openTest(t, newPath(t), o, d.system)
			j := journalOn(t, s)
			add(t, j, "a")
			add(t, j, "b")
			d.calls = nil
			_, err := j.PutMany(t.Context(), nil, []outbox.Message{{Key: "c"}})
			require.ErrorIs(t, err, outbox.ErrTx)
			_, err = s.PutRows(t.Context(), nil, outbox.DefaultChannel, []outbox.PutRow{{Key: "c", Payload: make([]byte, 200)}}, 0)
			require.ErrorIs(t, err, ErrFull)
			require.ErrorContains(t, err, map[string]string{"entries": "MaxEntries is 2", "bytes": "MaxBytes is 500"}[name])
			require.Empty(t, d.calls)
			require.Equal(t, []string{"a", "b"}, inMemory(t, j))
			res, err := j.Add(t.Context(), outbox.Message{Key: "a"})
			require.NoError(t, err)
			require.False(t, res.Created, "what exists is answered")
			r, err := j.Begin(t.Context(), "a", time.Minute)
			require.NoError(t, err)
			require.NoError(t, j.MarkSent(t.Context(), r.Lease, "ref"))
			_, err = j.Discard(t.Context(), outbox.Filter{Key: "a"})
			require.NoError(t, err)
			add(t, j, "c")
		})
	}
}

func TestChannelsOfLatestAreRefused(t *testing.T) {
	s := openTest(t, newPath(t), Options{}, direct)
	ch := outbox.Channel{System: outbox.SystemLatest, Name: "c"}
	_, err := s.Settle(t.Context(), ch, nil)
	require.ErrorIs(t, err, outbox.ErrInvalid)
	_, err = s.Extend(t.Context(), ch, nil, time.Minute)
	require.ErrorIs(t, err, outbox.ErrInvalid)
	require.ErrorIs(t, s.Outage(t.Context(), ch, true, ""), outbox.ErrInvalid)
}

func TestTextThatJSONWouldChangeIsRefused(t *testing.T) {
	s := openTest(t, newPath(t), Options{}, direct)
	for _, r := range []outbox.PutRow{{Key: "\xff"}, {Key: "k", Group: "\xff"}, {Key: "k", Header: outbox.Header{"\xff": ""}}, {Key: "k", Header: outbox.Header{"n": "\xff"}}} {
		_, err := s.PutRows(t.Context(), nil, "c", []outbox.PutRow{r}, 0)
		require.ErrorIs(t, err, outbox.ErrInvalid)
	}
}

// What a caller does to its slices later does not reach the store.
func TestRowsAreTheCallersOwn(t *testing.T) {
	s := openTest(t, newPath(t), Options{}, direct)
	p := outbox.PutRow{Key: "k", Payload: []byte("payload"), Header: outbox.Header{"a": "b"}}
	_, err := s.PutRows(t.Context(), nil, "c", []outbox.PutRow{p}, 0)
	require.NoError(t, err)
	p.Payload[0], p.Header["a"] = 'X', "X"
	for range 2 {
		rows, err := s.ListMessages(t.Context(), nil, "c", outbox.MessageList{Limit: 1, Payloads: true})
		require.NoError(t, err)
		require.Equal(t, "payload", string(rows[0].Payload))
		require.Equal(t, outbox.Header{"a": "b"}, rows[0].Header)
		rows[0].Payload[0], rows[0].Header["a"] = 'X', "X"
	}
}

func TestPauseAndResume(t *testing.T) {
	now := at(0)
	path := newPath(t)
	s := openTest(t, path, Options{Clock: func() time.Time { return now }}, direct)
	j := journalOn(t, s)
	add(t, j, "k")
	ch := journal(outbox.DefaultChannel)
	require.NoError(t, s.Pause(t.Context(), ch.Name, time.Hour, "maintenance"))
	require.NoError(t, s.Outage(t.Context(), ch, true, "503"))
	require.NoError(t, s.Outage(t.Context(), ch, false, ""))
	require.NoError(t, s.Close()) // a pause survives
	stats, err := s.Stats(t.Context())
	require.NoError(t, err)
	require.Equal(t, []outbox.ChannelStats{{Channel: ch, Due: 1, Paused: time.Hour, Reason: "maintenance"}}, stats)
	looks, err := s.Look(t.Context(), []outbox.Channel{ch})
	require.NoError(t, err)
	require.Equal(t, []outbox.Look{{Wait: time.Hour, Paused: time.Hour}}, looks)
	rs, err := j.ClaimDue(t.Context(), 10, time.Minute)
	require.NoError(t, err)
	require.Empty(t, rs)
	woken := 0
	defer s.Hints(func(h outbox.Hint) {
		if h == (outbox.Hint{}) {
			woken++
		}
	})()
	require.NoError(t, s.Pause(t.Context(), ch.Name, 0, ""))
	require.Equal(t, 1, woken)
	rs, err = j.ClaimDue(t.Context(), 10, time.Minute)
	require.NoError(t, err)
	require.Len(t, rs, 1)
	for _, bad := range []error{s.Pause(t.Context(), "", 0, ""), s.Pause(t.Context(), "c", -1, ""), s.Pause(t.Context(), "c", 200*365*24*time.Hour, "")} {
		require.ErrorIs(t, bad, outbox.ErrInvalid)
	}
}
