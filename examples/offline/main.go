// Offline is a sensor without a database: its readings wait in one file until
// the server can be reached: go run ./examples/offline
//
// The program starts a sensor while the server is down, kills it, lets the
// server come back and starts the sensor again: what the first one had added
// is delivered, in its order, and once.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"time"

	"github.com/seed-2b36b211/sqloutbox/filestore"
	"github.com/seed-2b36b211/sqloutbox/outbox"
)

const readingsTaken = 3

func main() {
	err := error(nil)
	if len(os.Args) == 4 && os.Args[1] == "sensor" {
		err = sensor(os.Args[2], os.Args[3])
	} else {
		err = run()
	}
	if err != nil {
		log.Fatal(err)
	}
}

// sensor is the program that must not lose a reading.
func sensor(path, server string) error {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	store, err := filestore.Open(path, filestore.Options{})
	if err != nil {
		return err // of a second sensor, for example: one process uses a file
	}
	defer store.Close()
	readings, err := outbox.NewJournal(store, outbox.JournalOptions{Channel: "readings"})
	if err != nil {
		return err
	}
	if err := measure(ctx, readings); err != nil {
		return err
	}
	u := &upload{server}
	relay, err := outbox.NewRelay(outbox.RelayOptions{}, readings.Sender(u.send, outbox.SendOptions{
		Backoff: func(int) time.Duration { return 100 * time.Millisecond }, // for the example; the default is kinder
	}))
	if err != nil {
		return err
	}
	return relay.Run(ctx) // what an earlier process has left goes out first
}

// measure adds the readings of a day, once: they have the day in their keys.
func measure(ctx context.Context, readings *outbox.Journal) error {
	for hour := range readingsTaken {
		key := fmt.Sprintf("2030-01-01T%02d", 6+hour)
		payload := fmt.Appendf(nil, `{"celsius": %d}`, 10+hour)
		// A Group keeps the order.
		put, err := readings.Add(ctx, outbox.Message{Key: key, Group: "thermometer", Payload: payload})
		if err != nil {
			return err
		}
		if put.Created {
			fmt.Println(key, "is on the disk") // and survives a crash from here on
		}
	}
	return nil
}

// upload sends readings to a server, which takes one of a key once.
type upload struct{ server string }

func (u *upload) send(ctx context.Context, r *outbox.Record) (ref string, err error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodPut, u.server+"/"+r.Key, bytes.NewReader(r.Payload))
	if err != nil {
		return "", outbox.Permanent(err)
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return "", outbox.Unknown(err)
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusNoContent {
		return "", fmt.Errorf("the server answers %d", response.StatusCode)
	}
	return "", nil
}

// run is what happens to the sensor.
func run() error {
	dir, err := os.MkdirTemp("", "offline")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "state", "outbox.json") // the directory is made, with mode 0700
	server := newServer(readingsTaken)
	defer server.Close()

	fmt.Println("the server is down")
	first, err := start(path, server.URL)
	if err != nil {
		return err
	}
	for range readingsTaken {
		if !first.lines.Scan() {
			return fmt.Errorf("the sensor ended: %w", first.Wait())
		}
		fmt.Println("sensor:", first.lines.Text())
	}
	if err := first.Process.Kill(); err != nil {
		return err
	}
	_ = first.Wait()
	fmt.Println("the sensor is killed; the server comes back; the sensor starts again")
	server.up()

	second, err := start(path, server.URL)
	if err != nil {
		return err
	}
	defer second.Wait()
	defer second.Process.Kill()
	select {
	case <-server.all:
		return nil
	case <-time.After(time.Minute):
		return errors.New("after a minute the server still lacks readings")
	}
}

// process is a sensor that runs.
type process struct {
	*exec.Cmd
	lines *bufio.Scanner // of its output
}

func start(path, server string) (*process, error) {
	program, err := os.Executable()
	if err != nil {
		return nil, err
	}
	p := &process{Cmd: exec.Command(program, "sensor", path, server)}
	p.Stderr = os.Stderr
	out, err := p.StdoutPipe()
	if err != nil {
		return nil, err
	}
	p.lines = bufio.NewScanner(out)
	return p, p.Start()
}
