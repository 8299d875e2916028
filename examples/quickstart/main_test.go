package main

import (
	"context"
	"log"
	"os"
	"path/filepath"
)

func Example() {
	dir, err := os.MkdirTemp("", "quickstart")
	if err != nil {
		log.Fatal(err)
	}
	defer os.RemoveAll(dir)
	if err := run(context.Background(), filepath.Join(dir, "shop.db")); err != nil {
		log.Fatal(err)
	}
	// Output:
	// tea now costs 475
	// milk now costs 120
}
