//go:build !race

package integration

const raceFactor = 1
