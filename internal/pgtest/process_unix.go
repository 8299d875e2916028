//go:build unix

package pgtest

import (
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/user"
	"strconv"
	"strings"
	"syscall"
)

var stopSignals = map[Mode]os.Signal{Fast: syscall.SIGINT, Immediate: syscall.SIGQUIT}

const killSignal = syscall.SIGKILL

// Kill kills the postmaster and all its processes at one instant, as the
// machine's death would.
func (c *Cluster) Kill() error {
	if c.server == nil {
		return errors.New("kill postgres: it is stopped")
	}
	pid := c.server.Process.Pid
	// Stopped, the postmaster neither forks nor answers the deaths of its children.
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		return fmt.Errorf("kill postgres: %w", err)
	}
	children, err := childrenOf(pid)
	for _, child := range children {
		syscall.Kill(child, syscall.SIGKILL) // may have ended by itself
	}
	return errors.Join(err, c.signal(syscall.SIGKILL))
}

func childrenOf(pid int) ([]int, error) {
	out, err := exec.Command("ps", "-A", "-o", "pid=", "-o", "ppid=").Output()
	if err != nil {
		return nil, fmt.Errorf("list processes with ps: %w", err)
	}
	var children []int
	for line := range strings.Lines(string(out)) {
		var child, parent int
		if _, err := fmt.Sscan(line, &child, &parent); err == nil && parent == pid {
			children = append(children, child)
		}
	}
	return children, nil
}

// owner is whom the server runs as: itself refuses to run as root.
type owner struct{ credential *syscall.Credential }

func findOwner() (owner, error) {
	if os.Getuid() != 0 {
		return owner{}, nil
	}
	for _, name := range []string{"postgres", "_postgres", "nobody"} {
		u, err := user.Lookup(name)
		if err != nil {
			continue
		}
		uid, err := strconv.ParseUint(u.Uid, 10, 32)
		if err != nil || uid == 0 {
			continue
		}
		gid, err := strconv.ParseUint(u.Gid, 10, 32)
		if err != nil {
			continue
		}
		return owner{&syscall.Credential{Uid: uint32(uid), Gid: uint32(gid)}}, nil
	}
	return owner{}, errors.New("postgres does not run as root, and there is no user postgres or nobody to run it as")
}

// give makes dir the owner's.
func (o owner) give(dir string) error {
	if o.credential == nil {
		return nil
	}
	return os.Chown(dir, int(o.credential.Uid), int(o.credential.Gid))
}

// run lets cmd run as the owner, away from the terminal's signals: an
// interrupt is for the test, whose end then stops the server.
func (o owner) run(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: o.credential, Setsid: true}
}

// guardScript waits on its standard input, a pipe that only the process of the
// test holds the other end of. A line means that all is cleared away; the end
// of the pipe that the process has ended, be it by SIGKILL: then the guard
// stops the server, if one runs in this very directory, and clears away.
const guardScript = `
read -r done && exit 0
dir=$1
pid=$(head -n 1 "$dir/data/postmaster.pid" 2>/dev/null)
ours() {
	[ -n "$pid" ] || return 1
	if [ -r "/proc/$pid/cmdline" ]; then tr '\0' ' ' <"/proc/$pid/cmdline"; else ps -o args= -p "$pid"; fi |
		grep -qF "$dir/data"
}
if ours; then
	kill -QUIT "$pid"
	kill -CONT "$pid" # a test may have stopped it
	tries=0
	while ours && [ $tries -lt 100 ]; do sleep 0.1; tries=$((tries + 1)); done
	if ours; then kill -KILL "$pid"; fi
fi
rm -rf "$dir"
`

// guard is the process that outlives this one.
type guard struct {
	cmd  *exec.Cmd
	pipe io.WriteCloser
}

func startGuard(dir string) (*guard, error) {
	cmd := exec.Command("/bin/sh", "-c", guardScript, "outbox-postgres-guard", dir)
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // away from the terminal's signals
	pipe, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("start the watchdog: %w", err)
	}
	return &guard{cmd, pipe}, nil
}

// dismiss ends the guard, which clears away itself what is not cleared yet.
func (g *guard) dismiss(cleared bool) error {
	var err error
	if cleared {
		_, err = io.WriteString(g.pipe, "done\n")
	}
	return errors.Join(err, g.pipe.Close(), g.cmd.Wait())
}
