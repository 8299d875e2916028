package sink

import (
	"bytes"
	"testing"

	"github.com/stretchr/testify/require"
)

func TestChunksAreBoundedByRowsAndBytes(t *testing.T) {
	rows := make([]numbered, 10)
	for i := range rows {
		rows[i] = numbered{Row{Key: "k", Payload: bytes.Repeat([]byte("x"), 9)}, i}
	}
	rows[4].Payload = make([]byte, 500)
	sizes := func(cut [][]numbered) (n []int) {
		for _, c := range cut {
			n = append(n, len(c))
		}
		return n
	}
	require.Empty(t, chunks(nil, 3, 100))
	require.Equal(t, []int{3, 3, 3, 1}, sizes(chunks(rows, 3, 1<<20)))
	require.Equal(t, []int{4, 1, 5}, sizes(chunks(rows, 100, 100)))
	require.Equal(t, []int{2, 2, 1, 2, 2, 1}, sizes(chunks(rows, 100, 20)))
	require.Equal(t, []int{10}, sizes(chunks(rows, 10, 1<<20)))
}

// The parameters of the largest statement stay within what SQLite takes.
func TestSQLiteStatementsStayWithinTheParameterLimit(t *testing.T) {
	rows, _ := (&sqlite{}).limits()
	_, args := (&sqlite{}).upsert(make([]numbered, rows))
	require.LessOrEqual(t, len(args), 32_766)
}
