package dialect

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestPutOfNewMessagesIsOneQuery(t *testing.T) {
	b := newBench(t)
	names := make([]string, 1000)
	for i := range names {
		names[i] = fmt.Sprintf("k%d", i)
		if i%2 == 0 {
			names[i] = fmt.Sprintf("g%d/k%d", i%10, i)
		}
	}
	queries := 0
	p := PutMessages{Channel: "c"}
	for _, name := range names {
		group, key, ok := strings.Cut(name, "/")
		if !ok {
			group, key = "", name
		}
		p.Keys, p.Groups, p.Delays = append(p.Keys, key), append(p.Groups, group), append(p.Delays, 0)
		p.Payloads, p.Headers = append(p.Payloads, []byte{}), append(p.Headers, "")
	}
	b.own(func(run Runner) error {
		answers, err := sqlite{}.put(t.Context(), func(ctx context.Context, st Statement, scan func(Scanner) error) error {
			queries++
			return run(ctx, st, scan)
		}, b.d, p, b.now, nil)
		for i, a := range answers {
			require.True(t, a.Created)
			require.Equal(t, answers[0].Seq+int64(i), a.Seq)
		}
		return err
	})
	require.Equal(t, 1, queries)
	require.Equal(t, 1000, b.count(`SELECT count(*) FROM {t:messages}`))
	require.Equal(t, 5, b.count(`SELECT count(*) FROM {t:groups}`))
	for i, r := range b.list(MessageFilter{Limit: 1000}) {
		require.Equal(t, fmt.Sprintf("k%d", i), r.key)
	}
}

func TestPutAnswersWithWhatExists(t *testing.T) {
	b := newBench(t)
	require.Equal(t, []bool{true, true}, b.put("a", "g/b"))
	p := PutMessages{
		Channel: "c", Keys: []string{"new", "b", "a", "also"}, Groups: []string{"", "g", "", ""}, Delays: make([]int64, 4),
		Payloads: [][]byte{{}, []byte("p"), []byte("other"), []byte("x")}, Headers: make([]string, 4),
	}
	b.own(func(run Runner) error {
		found := map[int]string{}
		answers, err := sqlite{}.put(t.Context(), run, b.d, p, b.now, func(i int, s Scanner) error {
			var r row
			err := r.scan(s)
			found[i] = r.key + string(r.payload)
			return err
		})
		require.Equal(t, map[int]string{1: "bp", 2: "ap"}, found)
		require.Equal(t, []bool{true, false, false, true}, []bool{answers[0].Created, answers[1].Created, answers[2].Created, answers[3].Created})
		require.Equal(t, []bool{false, false, true, false}, []bool{answers[0].Differs, answers[1].Differs, answers[2].Differs, answers[3].Differs})
		return err
	})
	require.Equal(t, "a b new also", keys(b.list(MessageFilter{})))
}

func TestPutBegunObeysItsGroup(t *testing.T) {
	b := newBench(t)
	begun := PutMessages{Begin: lease}
	answers, err := b.putWith(begun, "g/a", "x")
	require.NoError(t, err)
	require.NotZero(t, answers[0].Token)
	_, err = b.putWith(begun, "y", "g/b")
	require.ErrorIs(t, err, ErrBlocked)
	_, err = b.putWith(begun, "h/c", "h/d")
	require.ErrorIs(t, err, ErrBlocked)
	answers, err = b.putWith(begun, "g/a", "z")
	require.NoError(t, err, "what exists is not begun")
	require.False(t, answers[0].Created)
	require.Equal(t, "a x z", keys(b.list(MessageFilter{})))
	require.Empty(t, b.claim(10))
	b.now += lease
	rows := b.claim(10)
	require.Equal(t, "a x z", keys(rows))
	require.Positive(t, rows[0].lapses)
}
