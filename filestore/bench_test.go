package filestore

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func benchJournal(b *testing.B, n int) (*Store, *outbox.Journal) {
	b.Helper()
	s := openTest(b, newPath(b), Options{MaxEntries: 1 << 20, MaxBytes: 1 << 40}, direct)
	j, err := outbox.NewJournal(s, outbox.JournalOptions{})
	require.NoError(b, err)
	fill(b, s, n)
	return s, j
}

// fill puts n messages of about 300 bytes in one write.
func fill(t testing.TB, s *Store, n int) {
	t.Helper()
	var rows []outbox.PutRow
	for i := range n {
		rows = append(rows, outbox.PutRow{Key: fmt.Sprintf("order-%06d", i), Payload: []byte(fmt.Sprintf(`{"order":%d,"note":"%0100d"}`, i, i))})
	}
	if n == 0 {
		return
	}
	_, err := s.PutRows(t.Context(), nil, outbox.DefaultChannel, rows, 0)
	require.NoError(t, err)
}

func addOne(b *testing.B, j *outbox.Journal, key string) {
	_, err := j.Add(b.Context(), outbox.Message{Key: key, Payload: []byte(`{"order":1}`)})
	if err != nil {
		b.Error(err)
	}
}

// BenchmarkAdd adds one message after another to a file of n, beside a bare
// write of as many bytes: "x-raw" is how much longer the add takes.
func BenchmarkAdd(b *testing.B) {
	for _, n := range []int{0, 1_000, 10_000} {
		b.Run(fmt.Sprint(n, " messages"), func(b *testing.B) {
			s, j := benchJournal(b, n)
			for i := 0; b.Loop(); i++ {
				addOne(b, j, fmt.Sprint("new-", i))
			}
			add := b.Elapsed() / time.Duration(b.N)
			b.StopTimer()
			content, err := os.ReadFile(s.Path())
			require.NoError(b, err)
			const rounds = 100
			start := time.Now()
			for range rounds {
				rawWrite(b, filepath.Join(filepath.Dir(s.Path()), "raw"), content)
			}
			raw := time.Since(start) / rounds
			b.ReportMetric(float64(len(content)), "file-bytes")
			b.ReportMetric(float64(add)/float64(raw), "x-raw")
		})
	}
}

// rawWrite is the least that makes content durable.
func rawWrite(b *testing.B, path string, content []byte) {
	f, err := os.OpenFile(path+".tmp", os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	require.NoError(b, err)
	_, err = f.Write(content)
	require.NoError(b, err)
	require.NoError(b, f.Sync())
	require.NoError(b, f.Close())
	require.NoError(b, os.Rename(path+".tmp", path))
	require.NoError(b, syncDir(filepath.Dir(path)))
}

// BenchmarkAddTogether adds 512 messages to an empty file, 64 callers at once,
// and then as many one after another, one write each. "x-alone" is how many
// times the rate that is, "adds/write" how many shared a write.
func BenchmarkAddTogether(b *testing.B) {
	const callers, each = 64, 8
	var together, alone time.Duration
	writes := 0
	for i := 0; b.Loop(); i++ {
		together += addAll(b, callers, each, &writes)
		alone += addAll(b, 1, callers*each, new(int))
	}
	b.ReportMetric(float64(alone)/float64(together), "x-alone")
	b.ReportMetric(float64(b.N*callers*each)/float64(writes), "adds/write")
	b.ReportMetric(float64(b.N*callers*each)/together.Seconds(), "adds/s")
}

// addAll lets callers add messages to a file of their own at the same time.
func addAll(b *testing.B, callers, each int, writes *int) time.Duration {
	s, j := benchJournal(b, 0)
	s.file.sys = func(name string, call func() error) error {
		if name == "rename" {
			*writes++
		}
		return call()
	}
	start := time.Now()
	var wg sync.WaitGroup
	for c := range callers {
		wg.Go(func() {
			for i := range each {
				addOne(b, j, fmt.Sprint(c, "-", i))
			}
		})
	}
	wg.Wait()
	return time.Since(start)
}

// BenchmarkRelay drains a file of n messages, deleted as they are sent.
func BenchmarkRelay(b *testing.B) {
	for _, n := range []int{1_000, 10_000} {
		b.Run(fmt.Sprint(n, " messages"), func(b *testing.B) {
			for b.Loop() {
				b.StopTimer()
				s, j := benchJournal(b, n)
				send := j.Sender(func(context.Context, *outbox.Record) (string, error) { return "", nil }, outbox.SendOptions{Retention: outbox.DeleteOnSent})
				r, err := outbox.NewRelay(outbox.RelayOptions{}, send)
				require.NoError(b, err)
				b.StartTimer()
				_, err = r.Flush(b.Context())
				require.NoError(b, err)
				b.StopTimer()
				require.NoError(b, s.Close())
				b.StartTimer()
			}
			b.ReportMetric(float64(n)*float64(b.N)/b.Elapsed().Seconds(), "messages/s")
		})
	}
}
