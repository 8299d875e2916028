package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"sync"
	"time"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// relays runs the relay's process, one at a time.
type relays struct {
	spec  relaySpec
	story *story
	fail  context.CancelCauseFunc // called when a process ends that was not to

	mu      sync.Mutex
	current *process
	kills   int
}

// A process is this program as a relay.
type process struct {
	cmd     *exec.Cmd
	stdin   io.WriteCloser
	stderr  bytes.Buffer // read when it has ended
	ended   chan struct{}
	err     error // once it has ended
	doomed  bool  // it is to end; guarded by relays.mu
	reading sync.WaitGroup
}

// start starts a process.
func (r *relays) start() error {
	if err := r.launch(); err != nil {
		return fmt.Errorf("start the relay's process: %w", err)
	}
	return nil
}

func (r *relays) launch() error {
	program, err := os.Executable()
	if err != nil {
		return err
	}
	spec, err := json.Marshal(r.spec)
	if err != nil {
		return err
	}
	p := &process{cmd: exec.Command(program, "demo-relay"), ended: make(chan struct{})}
	p.cmd.Stderr = &p.stderr
	if p.stdin, err = p.cmd.StdinPipe(); err != nil {
		return err
	}
	stdout, err := p.cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := p.cmd.Start(); err != nil {
		return err
	}
	p.reading.Go(func() { r.listen(stdout) })
	go r.watch(p)
	r.mu.Lock()
	r.current = p
	r.mu.Unlock()
	r.story.say("relay", "process %d started", p.cmd.Process.Pid)
	if _, err := p.stdin.Write(append(spec, '\n')); err != nil {
		return errors.Join(err, r.stop())
	}
	return nil
}

// watch waits for a process to end.
func (r *relays) watch(p *process) {
	p.reading.Wait() // Wait would close the pipe before it is read
	p.err = p.cmd.Wait()
	close(p.ended)
	r.mu.Lock()
	defer r.mu.Unlock()
	if !p.doomed {
		r.fail(fmt.Errorf("relay process %d ended by itself: %w\n%s", p.cmd.Process.Pid, p.err, tail(p.stderr.Bytes())))
	}
}

// listen tells the story of a process's events.
func (r *relays) listen(stdout io.Reader) {
	lines := bufio.NewScanner(stdout)
	down := false // said once: every batch in flight and every probe tells it
	for lines.Scan() {
		var e relayEvent
		if json.Unmarshal(lines.Bytes(), &e) != nil {
			continue
		}
		switch e.Kind {
		case outbox.EventOutage:
			if down {
				continue
			}
			down = true
			r.story.say("relay", "channel %q pauses; single entries probe the index (%s)", ordersChannel, oneLine(e.Error))
		case outbox.EventResume:
			down = false
			r.story.say("relay", "the index answers: channel %q goes on", ordersChannel)
		case outbox.EventSlow:
			r.story.say("relay", "whole batches keep failing: waits %s before the next", age(e.Delay))
		case outbox.EventLost:
			r.story.say("relay", "lost the leases of %s", entries(e.Rows))
		case outbox.EventTrouble:
			r.story.say("relay", "trouble with the database: %s", oneLine(e.Error))
		case outbox.EventRecover:
			r.story.say("relay", "the database works again")
		}
	}
	_, _ = io.Copy(io.Discard, stdout) // a line too long for a Scanner must not block the process
}

// doom takes the current process for its end.
func (r *relays) doom() *process {
	r.mu.Lock()
	defer r.mu.Unlock()
	p := r.current
	if p != nil {
		p.doomed = true
	}
	r.current = nil
	return p
}

// kill kills the process without warning and returns its id, 0 if there is none.
func (r *relays) kill() int {
	p := r.doom()
	if p == nil {
		return 0
	}
	_ = p.cmd.Process.Kill()
	<-p.ended
	r.mu.Lock()
	r.kills++
	r.mu.Unlock()
	return p.cmd.Process.Pid
}

// stop lets the process end what it is at, and fails if it does not.
func (r *relays) stop() error {
	p := r.doom()
	if p == nil {
		return nil
	}
	p.stdin.Close()
	const patience = 10 * time.Second
	select {
	case <-p.ended:
	case <-time.After(patience):
		_ = p.cmd.Process.Kill()
		<-p.ended
		return fmt.Errorf("stop the relay's process: it had not ended after %s", patience)
	}
	if p.err != nil {
		return fmt.Errorf("stop the relay's process: %w\n%s", p.err, tail(p.stderr.Bytes()))
	}
	return nil
}

// close ends what is still running, at once.
func (r *relays) close() {
	if p := r.doom(); p != nil {
		_ = p.cmd.Process.Kill()
		<-p.ended
	}
}

// tail returns the last lines of a log.
func tail(log []byte) []byte {
	const lines = 10
	log = bytes.TrimSpace(log)
	parts := bytes.Split(log, []byte("\n"))
	return bytes.Join(parts[max(0, len(parts)-lines):], []byte("\n"))
}
