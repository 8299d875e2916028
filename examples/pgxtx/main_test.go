package main

import (
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/internal/pgtest"
)

func TestStagesInAPgxTransaction(t *testing.T) {
	if testing.Short() {
		t.Skip("-short leaves Postgres out")
	}
	require.NoError(t, run(t.Context(), pgtest.DSN(t)))
}
