//go:build race

package sqlstore_test

// underRace: the race detector slows SQLite, which is Go code too, twentyfold.
const underRace = true
