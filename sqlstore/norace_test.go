//go:build !race

package sqlstore_test

const underRace = false
