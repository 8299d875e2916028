//go:build race

package integration

// raceFactor divides the loops of tests that the race detector slows most:
// SQLite is Go code too.
const raceFactor = 4
