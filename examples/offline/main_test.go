package main

import (
	"os"
	"testing"
)

// TestMain lets the example start this binary as its sensor.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "sensor" {
		main()
		return
	}
	os.Exit(m.Run())
}

func Example() {
	main()
	// Output:
	// the server is down
	// sensor: 2030-01-01T06 is on the disk
	// sensor: 2030-01-01T07 is on the disk
	// sensor: 2030-01-01T08 is on the disk
	// the sensor is killed; the server comes back; the sensor starts again
	// server has taken 2030-01-01T06
	// server has taken 2030-01-01T07
	// server has taken 2030-01-01T08
}
