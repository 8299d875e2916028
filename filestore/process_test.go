//go:build unix

package filestore

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// The environment of a child process: what it does, and on which file.
const (
	childRole = "FILESTORE_TEST_ROLE"
	childPath = "FILESTORE_TEST_PATH"
)

// A child is the test that starts it, run again in a process of its own, where
// it plays a role: see played.
type child struct {
	*exec.Cmd
	out *bufio.Reader
}

func startChild(t *testing.T, role, path string) *child {
	t.Helper()
	cmd := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$", "-test.count=1")
	cmd.Env = append(os.Environ(), childRole+"="+role, childPath+"="+path)
	cmd.Stderr = os.Stderr
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	return &child{cmd, bufio.NewReader(out)}
}

// line waits for the child's next line.
func (c *child) line(t *testing.T) string {
	t.Helper()
	text, err := c.out.ReadString('\n')
	require.NoError(t, err)
	return strings.TrimSpace(text)
}

// kill kills the child at any instruction, and returns the whole lines that it
// had still said.
func (c *child) kill(t *testing.T) []string {
	t.Helper()
	require.NoError(t, c.Process.Kill())
	rest, err := io.ReadAll(c.out)
	require.NoError(t, err)
	_ = c.Wait()
	lines := strings.Split(string(rest), "\n")
	return lines[:len(lines)-1]
}

// played reports whether this process is a child, after it has played its role.
func played(t *testing.T) bool {
	path := os.Getenv(childPath)
	switch os.Getenv(childRole) {
	case "":
		return false
	case "hold":
		openTest(t, path, Options{}, direct)
		fmt.Println("locked")
		_, _ = io.Copy(io.Discard, os.Stdin)
		select {}
	case "open":
		_, err := Open(path, Options{})
		fmt.Println("opened:", err)
	case "die sending":
		j := journalOn(t, openTest(t, path, Options{}, direct))
		add(t, j, "k")
		r, err := outbox.NewRelay(outbox.RelayOptions{}, j.Sender(func(context.Context, *outbox.Record) (string, error) {
			fmt.Println("sending")
			select {}
		}, outbox.SendOptions{}))
		require.NoError(t, err)
		_, _ = r.Flush(t.Context())
	case "work":
		work(t, journalOn(t, openTest(t, path, Options{MaxEntries: 1 << 20}, direct)))
	}
	return true
}

// load is the payload of a key: long, so that half of one would be seen.
func load(key string) []byte { return []byte(strings.Repeat(key+" ", 100)) }

// work adds and sends, and says what it was told is done, until it is killed.
func work(t *testing.T, j *outbox.Journal) {
	var mu sync.Mutex
	say := func(verb, key string) {
		mu.Lock()
		defer mu.Unlock()
		fmt.Println(verb, key)
	}
	var wg sync.WaitGroup
	for i := range 4 {
		wg.Go(func() {
			for n := 0; ; n++ {
				key := fmt.Sprintf("%d-%d-%d", os.Getpid(), i, n)
				if _, err := j.Add(t.Context(), outbox.Message{Key: key, Payload: load(key)}); err != nil {
					fmt.Println("failed", err)
					return
				}
				say("added", key)
			}
		})
	}
	wg.Go(func() {
		for {
			rs, err := j.ClaimDue(t.Context(), 5, time.Hour)
			for _, r := range rs {
				if err = j.MarkSent(t.Context(), r.Lease, r.Key); err != nil {
					break
				}
				say("sent", r.Key)
			}
			if err != nil {
				fmt.Println("failed", err)
				return
			}
		}
	})
	wg.Wait()
}

// TestG7KilledProcessLosesNothing kills a process at random that adds and
// sends: every message that it was told is there is there, whole, and what it
// was told is sent is sent. OUTBOX_STRESS_SECONDS makes it longer.
func TestG7KilledProcessLosesNothing(t *testing.T) {
	if played(t) {
		return
	}
	length := 3 * time.Second
	if s := os.Getenv("OUTBOX_STRESS_SECONDS"); s != "" {
		n, err := strconv.Atoi(s)
		require.NoError(t, err)
		length = time.Duration(n) * time.Second
	}
	end := time.Now().Add(length)
	kills, acknowledged := 0, 0
	for time.Now().Before(end) {
		path := newPath(t)
		told := map[string]string{} // the last word about each key
		for range 10 {              // one file through some crashes
			c := startChild(t, "work", path)
			lines := []string{c.line(t)} // from the first word on it is at work
			time.Sleep(time.Duration(rand.Int64N(int64(60 * time.Millisecond))))
			for _, line := range append(lines, c.kill(t)...) {
				verb, key, _ := strings.Cut(line, " ")
				require.Contains(t, []string{"added", "sent"}, verb, line)
				if told[key] != "sent" {
					told[key] = verb
				}
			}
			kills++
			requireTold(t, path, told)
		}
		acknowledged += len(told)
	}
	t.Logf("%d kills, %d messages acknowledged", kills, acknowledged)
}

func requireTold(t *testing.T, path string, told map[string]string) {
	t.Helper()
	s := openTest(t, path, Options{MaxEntries: 1 << 20}, direct)
	defer s.Close()
	rows, err := s.ListMessages(t.Context(), nil, outbox.DefaultChannel, outbox.MessageList{Limit: 1 << 20, Payloads: true})
	require.NoError(t, err)
	there := map[string]outbox.Row{}
	for _, r := range rows {
		require.Equal(t, string(load(r.Key)), string(r.Payload))
		there[r.Key] = r
	}
	for key, verb := range told {
		r, ok := there[key]
		require.True(t, ok, "%s was %s, and is gone", key, verb)
		if verb == "sent" {
			require.Equal(t, outbox.StateSent, r.State, key)
			require.Equal(t, key, r.Ref)
		}
	}
	_, err = os.Lstat(s.file.temp())
	require.ErrorIs(t, err, os.ErrNotExist, "an interrupted write leaves nothing once the file was opened")
}

func TestSecondProcessIsRefused(t *testing.T) {
	if played(t) {
		return
	}
	path := newPath(t)
	c := startChild(t, "hold", path)
	require.Equal(t, "locked", c.line(t))
	_, err := Open(path, Options{})
	require.ErrorIs(t, err, ErrLocked)
	require.ErrorContains(t, err, path)
	require.ErrorContains(t, err, fmt.Sprintf("pid %d", c.Process.Pid), "it says who has it")
	c.kill(t)
	s := openTest(t, path, Options{}, direct) // a holder that crashed leaves nothing behind
	other := startChild(t, "open", path)
	require.Contains(t, other.line(t), ErrLocked.Error())
	require.NoError(t, s.Close())
	other = startChild(t, "open", path)
	require.Equal(t, "opened: <nil>", other.line(t))
}

// What a process was sending when it died goes out at the next start, at once
// and said to be perhaps sent: its lease ended with it.
func TestMessageOfADeadSenderIsFlushedAsAmbiguous(t *testing.T) {
	if played(t) {
		return
	}
	path := newPath(t)
	c := startChild(t, "die sending", path)
	require.Equal(t, "sending", c.line(t))
	c.kill(t)
	j := journalOn(t, openTest(t, path, Options{}, direct))
	add(t, j, "other")
	var got []outbox.Record
	r, err := outbox.NewRelay(outbox.RelayOptions{}, j.Sender(func(_ context.Context, r *outbox.Record) (string, error) {
		got = append(got, *r)
		return "ref of " + r.Key, nil
	}, outbox.SendOptions{Workers: 1}))
	require.NoError(t, err)
	_, err = r.Flush(t.Context())
	require.NoError(t, err)
	require.Len(t, got, 2)
	require.Equal(t, []any{"k", true, []byte("payload of k")}, []any{got[0].Key, got[0].Ambiguous, got[0].Payload})
	require.Equal(t, []any{"other", false}, []any{got[1].Key, got[1].Ambiguous})
	rec, err := j.Get(t.Context(), "k")
	require.NoError(t, err)
	require.Equal(t, []any{outbox.StateSent, "ref of k"}, []any{rec.State, rec.Ref})
}

// A lease that was alive when its store was closed is still its holder's.
func TestLeaseSurvivesAClose(t *testing.T) {
	path := newPath(t)
	s := openTest(t, path, Options{}, direct)
	j := journalOn(t, s)
	add(t, j, "k")
	held, err := j.Begin(t.Context(), "k", time.Hour)
	require.NoError(t, err)
	require.NoError(t, s.Close())
	other := openTest(t, path, Options{}, direct)
	rs, err := journalOn(t, other).ClaimDue(t.Context(), 10, time.Hour)
	require.NoError(t, err)
	require.Empty(t, rs)
	require.NoError(t, other.Close())
	require.NoError(t, j.MarkSent(t.Context(), held.Lease, "ref"))
}
