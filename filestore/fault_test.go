package filestore

import (
	"errors"
	"fmt"
	"os"
	"runtime"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

var errDisk = errors.New("no space left on device")

// A disk makes chosen system calls fail. It is used by who has the turn.
type disk struct {
	calls  []string                            // since they were last reset
	faults map[string]func(func() error) error // by name; nil entries work
}

func newDisk() *disk { return &disk{faults: map[string]func(func() error) error{}} }

func (d *disk) system(name string, call func() error) error {
	d.calls = append(d.calls, name)
	if fault := d.faults[name]; fault != nil {
		return fault(call)
	}
	return call()
}

func failBefore(func() error) error { return errDisk }

// failAfter is a call that took effect and whose answer says otherwise.
func failAfter(call func() error) error {
	_ = call()
	return errDisk
}

// once lets a fault happen the first time only.
func once(fault func(func() error) error) func(func() error) error {
	over := false
	return func(call func() error) error {
		if over {
			return call()
		}
		over = true
		return fault(call)
	}
}

func journalOn(t testing.TB, s *Store) *outbox.Journal {
	t.Helper()
	j, err := outbox.NewJournal(s, outbox.JournalOptions{})
	require.NoError(t, err)
	return j
}

func add(t testing.TB, j *outbox.Journal, key string) {
	t.Helper()
	res, err := j.Add(t.Context(), outbox.Message{Key: key, Payload: []byte("payload of " + key)})
	require.NoError(t, err)
	require.True(t, res.Created)
}

// inFile returns the keys that a process would find that started now.
func inFile(t testing.TB, s *Store) []string {
	t.Helper()
	content, err := os.ReadFile(s.Path())
	require.NoError(t, err)
	st, err := parse(content)
	require.NoError(t, err)
	return stateKeys(st)
}

func stateKeys(st *state) []string {
	keys := []string{}
	for _, m := range st.of(outbox.DefaultChannel) {
		keys = append(keys, m.row.Key)
	}
	return keys
}

// inMemory returns the keys that the store answers with.
func inMemory(t testing.TB, j *outbox.Journal) []string {
	t.Helper()
	rs, _, err := j.List(t.Context(), outbox.Filter{})
	require.NoError(t, err)
	keys := []string{}
	for _, r := range rs {
		keys = append(keys, r.Key)
	}
	return keys
}

var writeCalls = []string{"lstat", "open", "write", "fsync", "fstat", "close", "rename", "fsync directory"}

func TestWriteMakesTheseCallsInThisOrder(t *testing.T) {
	d := newDisk()
	j := journalOn(t, openTest(t, newPath(t), Options{}, d.system))
	add(t, j, "first")
	d.calls = nil
	add(t, j, "second")
	require.Equal(t, writeCalls, d.calls)
	d.calls = nil
	res, err := j.Add(t.Context(), outbox.Message{Key: "second"})
	require.NoError(t, err)
	require.False(t, res.Created)
	require.True(t, res.Differs)
	require.Empty(t, inMemoryCalls(t, j, d), "nothing is written where nothing changed")
}

func inMemoryCalls(t *testing.T, j *outbox.Journal, d *disk) []string {
	inMemory(t, j)
	return d.calls
}

// Each system call fails before it took effect, and after: memory and file
// agree, the caller knows, and the next call works.
func TestEachSystemCallFails(t *testing.T) {
	for _, name := range writeCalls {
		for when, fault := range map[string]func(func() error) error{"before": failBefore, "after": failAfter} {
			for _, fresh := range []bool{true, false} { // no file yet, and one
				t.Run(fmt.Sprintf("%s fails %s its effect, first write %t", name, when, fresh), func(t *testing.T) {
					d := newDisk()
					s := openTest(t, newPath(t), Options{}, d.system)
					j := journalOn(t, s)
					old := []string{}
					inMemory(t, j)
					if !fresh {
						add(t, j, "old")
						old = append(old, "old")
					}
					before, _ := os.ReadFile(s.Path())
					d.faults[name] = once(fault)
					_, err := j.Add(t.Context(), outbox.Message{Key: "new"})
					d.calls = nil
					both := append(slices.Clone(old), "new")
					switch {
					case name == "rename" && when == "after":
						require.NoError(t, err, "it is seen to have happened")
						require.Equal(t, both, inMemory(t, j))
					case name == "fsync directory":
						require.ErrorIs(t, err, outbox.ErrCommit)
						require.ErrorIs(t, err, errDisk)
						require.ErrorContains(t, err, s.Path())
						require.Equal(t, both, inFile(t, s))
						require.Equal(t, both, inMemory(t, j))
						require.Equal(t, []string{"fsync directory"}, d.calls, "the next call syncs first")
						_, err := j.Add(t.Context(), outbox.Message{Key: "new"})
						require.NoError(t, err, "read it, and it is there")
					default:
						require.ErrorIs(t, err, errDisk)
						require.NotErrorIs(t, err, outbox.ErrCommit)
						require.ErrorContains(t, err, s.Path())
						after, _ := os.ReadFile(s.Path())
						require.Equal(t, string(before), string(after))
						require.Equal(t, old, inMemory(t, j))
						_, err = os.Lstat(s.file.temp())
						require.ErrorIs(t, err, os.ErrNotExist)
						add(t, j, "new")
					}
					require.Equal(t, both, inFile(t, s))
					require.Equal(t, both, inMemory(t, j))
					add(t, j, "next")
					require.Equal(t, append(both, "next"), inFile(t, s))
					require.NoError(t, s.Close())
					require.Equal(t, append(both, "next"), inMemory(t, j), "read again")
				})
			}
		}
	}
}

// Every call waits for the directory to be synced where that is in doubt, or
// it would tell what a crash could take back.
func TestNothingIsToldBeforeTheDirectoryIsSynced(t *testing.T) {
	d := newDisk()
	s := openTest(t, newPath(t), Options{}, d.system)
	j := journalOn(t, s)
	add(t, j, "old")
	d.faults["fsync directory"] = failBefore
	_, err := j.Add(t.Context(), outbox.Message{Key: "new"})
	require.ErrorIs(t, err, outbox.ErrCommit)
	for range 2 {
		_, err = j.Get(t.Context(), "new")
		require.ErrorIs(t, err, errDisk)
		_, err = j.Add(t.Context(), outbox.Message{Key: "other"})
		require.ErrorIs(t, err, errDisk)
		require.NotErrorIs(t, err, outbox.ErrCommit, "of the other nothing was done")
	}
	require.Equal(t, []string{"old", "new"}, inFile(t, s))
	d.faults["fsync directory"] = nil
	require.Equal(t, []string{"old", "new"}, inMemory(t, j))
}

// Also what a process has left that died before it synced the directory.
func TestFirstReadSyncsTheDirectory(t *testing.T) {
	path := newPath(t)
	s := openTest(t, path, Options{}, unsynced)
	add(t, journalOn(t, s), "k")
	require.NoError(t, s.Close())
	d := newDisk()
	s = openTest(t, path, Options{}, d.system)
	require.NoError(t, s.Check(t.Context()))
	require.Equal(t, []string{"fsync directory", "open to read", "read"}, d.calls)
}

// A rename that failed, of which it cannot be seen whether it happened.
func TestRenameOfUnknownOutcome(t *testing.T) {
	for when, fault := range map[string]func(func() error) error{"before": failBefore, "after": failAfter} {
		t.Run(when, func(t *testing.T) {
			d := newDisk()
			s := openTest(t, newPath(t), Options{}, d.system)
			j := journalOn(t, s)
			add(t, j, "old")
			d.faults["rename"] = once(func(call func() error) error {
				d.faults["lstat"] = once(failBefore)
				return fault(call)
			})
			_, err := j.Add(t.Context(), outbox.Message{Key: "new"})
			require.ErrorIs(t, err, outbox.ErrCommit)
			want := map[string][]string{"before": {"old"}, "after": {"old", "new"}}[when]
			require.Equal(t, want, inMemory(t, j))
			require.Equal(t, want, inFile(t, s))
			add(t, j, "next")
			require.Equal(t, append(want, "next"), inFile(t, s))
		})
	}
}

func TestFailedReadIsTriedAgain(t *testing.T) {
	for _, name := range []string{"open to read", "read", "fsync directory"} {
		for when, fault := range map[string]func(func() error) error{"before": failBefore, "after": failAfter} {
			t.Run(name+" "+when, func(t *testing.T) {
				path := newPath(t)
				s := openTest(t, path, Options{}, unsynced)
				add(t, journalOn(t, s), "k")
				require.NoError(t, s.Close())
				d := newDisk()
				d.faults[name] = once(fault)
				s = openTest(t, path, Options{}, d.system)
				j := journalOn(t, s)
				_, err := j.Get(t.Context(), "k")
				require.ErrorIs(t, err, errDisk)
				require.ErrorContains(t, err, path)
				require.Equal(t, []string{"k"}, inMemory(t, j))
			})
		}
	}
}

// queued waits until n calls wait for their turn.
func (s *Store) queued(n int) {
	for {
		s.mu.Lock()
		waiting := len(s.queue)
		s.mu.Unlock()
		if waiting >= n {
			return
		}
		runtime.Gosched()
	}
}

// While one write is under way, calls gather: the next write carries them all,
// and when it fails all of them are told, those too whose answer came from the
// change of another that failed.
func TestGroupSharesOneWriteAndItsFailure(t *testing.T) {
	for _, c := range []struct {
		name string
		call string
		want error
	}{
		{"done", "", nil}, {"undone", "fsync", errDisk}, {"unknown", "fsync directory", outbox.ErrCommit},
	} {
		t.Run(c.name, func(t *testing.T) {
			d := newDisk()
			s := openTest(t, newPath(t), Options{}, d.system)
			j := journalOn(t, s)
			add(t, j, "old")
			const callers = 20
			var wg sync.WaitGroup
			errs := make([]error, callers)
			d.faults["fsync"] = func(call func() error) error {
				delete(d.faults, "fsync")
				for i := range callers {
					wg.Go(func() { // half of them find the key of another
						_, errs[i] = j.Add(t.Context(), outbox.Message{Key: fmt.Sprint("new ", i/2), Payload: []byte("p")})
					})
				}
				s.queued(callers)
				d.calls = nil
				if c.call != "" {
					first := true
					d.faults[c.call] = func(call func() error) error {
						if first && c.call == "fsync directory" { // of the write under way
							first = false
							return call()
						}
						delete(d.faults, c.call)
						return errDisk
					}
				}
				return call()
			}
			add(t, j, "first")
			wg.Wait()
			for _, err := range errs {
				require.ErrorIs(t, err, c.want)
			}
			if c.want == nil {
				require.Equal(t, 1, count(d.calls, "write"), "one write for all: %v", d.calls)
			}
			wantCount := map[string]int{"done": 12, "undone": 2, "unknown": 12}[c.name]
			require.Len(t, inFile(t, s), wantCount)
			require.Len(t, inMemory(t, j), wantCount)
			add(t, j, "next")
			require.Len(t, inFile(t, s), wantCount+1)
		})
	}
}

func count(all []string, one string) (n int) {
	for _, s := range all {
		if s == one {
			n++
		}
	}
	return n
}

// A read during a write that fails sees nothing of it.
func TestReadDuringAWriteSeesWhatIsDurable(t *testing.T) {
	for _, fail := range []bool{false, true} {
		d := newDisk()
		s := openTest(t, newPath(t), Options{}, d.system)
		j := journalOn(t, s)
		add(t, j, "old")
		var wg sync.WaitGroup
		var seen []string
		d.faults["rename"] = once(func(call func() error) error {
			wg.Go(func() { seen = inMemory(t, j) })
			wg.Go(func() { add(t, j, "behind") }) // in the group of the read: not durable yet either
			s.queued(2)
			if fail {
				return errDisk
			}
			return call()
		})
		_, err := j.Add(t.Context(), outbox.Message{Key: "new"})
		require.Equal(t, fail, err != nil)
		wg.Wait()
		require.Equal(t, map[bool][]string{true: {"old"}, false: {"old", "new"}}[fail], seen)
	}
}

// Every kind of change is undone: the state is byte by byte as before, but
// for the counters, which never go back.
func TestFailedWriteTakesEveryChangeBack(t *testing.T) {
	d := newDisk()
	s := openTest(t, newPath(t), Options{}, d.system)
	ctx, ch := t.Context(), journal(outbox.DefaultChannel)
	put := func(key, group string, begin time.Duration) error {
		_, err := s.PutRows(ctx, nil, ch.Name, []outbox.PutRow{{Key: key, Group: group, Payload: []byte("\xff")}}, begin)
		return err
	}
	claim := func(limit int) ([]outbox.Row, error) {
		c, err := s.ClaimMessages(ctx, nil, outbox.Claim{Channel: ch.Name, Limit: limit, Lease: time.Hour})
		return c.Rows, err
	}
	require.NoError(t, put("done", "", time.Hour))
	require.NoError(t, put("dead", "", time.Hour))
	require.NoError(t, put("kept", "", time.Hour))
	require.NoError(t, s.Pause(ctx, "other", time.Hour, "maintenance"))
	rows, err := s.ListMessages(ctx, nil, ch.Name, outbox.MessageList{Limit: 10})
	require.NoError(t, err)
	_, err = s.Settle(ctx, ch, []outbox.Settlement{{Row: rows[1], Outcome: outbox.OutcomeUnknown, Error: "x"}})
	require.NoError(t, err)
	require.NoError(t, put("waiting", "g", 0))
	settle := func(outcome outbox.Outcome, keep bool) error {
		_, err := s.Settle(ctx, ch, []outbox.Settlement{{Row: rows[0], Outcome: outcome, Keep: keep}})
		return err
	}
	amend := func(action outbox.Action) error {
		_, err := s.AmendMessages(ctx, nil, ch.Name, outbox.Amendment{Action: action, Limit: 100})
		return err
	}
	body := func() string {
		st := *s.state
		st.number, st.token = 0, 0
		return fmt.Sprint(string(st.appendTo(nil)), len(st.byID), st.bytes)
	}
	for name, change := range map[string]func() error{
		"put":     func() error { return put("new", "", 0) },
		"begun":   func() error { return put("new", "h", time.Hour) },
		"claim":   func() error { _, err := claim(10); return err },
		"begin":   func() error { _, err := s.BeginMessage(ctx, nil, ch.Name, "waiting", time.Hour); return err },
		"done":    func() error { return settle(outbox.OutcomeDone, false) },
		"kept":    func() error { return settle(outbox.OutcomeDone, true) },
		"retry":   func() error { return settle(outbox.OutcomeRetry, true) },
		"dead":    func() error { return settle(outbox.OutcomeDead, true) },
		"extend":  func() error { _, err := s.Extend(ctx, ch, rows[:1], 2*time.Hour); return err },
		"discard": func() error { return amend(outbox.ActionDiscard) },
		"again":   func() error { return amend(outbox.ActionRetry) },
		"sent":    func() error { return amend(outbox.ActionSent) },
		"purge": func() error {
			_, err := s.PurgeMessages(ctx, ch.Name, outbox.Purge{States: []outbox.State{outbox.StateUnknown}, Before: time.Now().Add(time.Hour), Limit: 1})
			return err
		},
		"outage": func() error { return s.Outage(ctx, ch, true, "503") },
		"pause":  func() error { return s.Pause(ctx, ch.Name, time.Hour, "x") },
		"longer": func() error { return s.Pause(ctx, "other", 2*time.Hour, "y") },
		"resume": func() error { return s.Pause(ctx, "other", 0, "") },
	} {
		before := body()
		d.faults["rename"] = failBefore
		require.ErrorIs(t, change(), errDisk, name)
		require.Equal(t, before, body(), name)
		d.faults["rename"] = nil
	}
}

func TestChangeByAnotherProgramIsRefused(t *testing.T) {
	for name, interfere := range map[string]func(path string) error{
		"removed": os.Remove,
		"emptied": func(path string) error { return os.Truncate(path, 0) },
		"replaced": func(path string) error {
			return errors.Join(os.WriteFile(path+"2", []byte("x"), 0o600), os.Rename(path+"2", path))
		},
		"a link":    func(path string) error { return errors.Join(os.Rename(path, path+"2"), os.Symlink(path+"2", path)) },
		"a message": func(path string) error { return os.WriteFile(path, []byte(golden(nil)), 0o600) },
	} {
		t.Run(name, func(t *testing.T) {
			s := openTest(t, newPath(t), Options{}, direct)
			j := journalOn(t, s)
			add(t, j, "k")
			require.NoError(t, interfere(s.Path()))
			before, _ := os.ReadFile(s.Path())
			_, err := j.Add(t.Context(), outbox.Message{Key: "new"})
			require.ErrorIs(t, err, ErrUnsafe)
			after, _ := os.ReadFile(s.Path())
			require.Equal(t, before, after, "left as it was")
			require.Equal(t, []string{"k"}, inMemory(t, j))
		})
	}
}

func TestCallWhoseContextEndsInTheQueueHasDoneNothing(t *testing.T) {
	d := newDisk()
	s := openTest(t, newPath(t), Options{}, d.system)
	j := journalOn(t, s)
	d.faults["fsync"] = once(func(call func() error) error {
		ctx, cancel := newCancel(t)
		var wg sync.WaitGroup
		var err error
		wg.Go(func() { _, err = j.Add(ctx, outbox.Message{Key: "late"}) })
		s.queued(1)
		cancel()
		wg.Wait() // though the write under way has not ended
		require.ErrorIs(t, err, ctx.Err())
		return call()
	})
	add(t, j, "k")
	require.Equal(t, []string{"k"}, inMemory(t, j))
}
