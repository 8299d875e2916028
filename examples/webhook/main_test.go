package main

import (
	"fmt"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

func Example() {
	main()
	// Output:
	// placed/fine sent
	// placed/answer-lost sent
	// placed/throttled sent
	// placed/malformed dead
	// events that the receiver acted on: 3
}

func TestAnswersAreClassified(t *testing.T) {
	for _, c := range []struct {
		status     int
		retryAfter string
		class      outbox.Class
		delay      time.Duration
	}{
		{http.StatusTooManyRequests, "7", outbox.ClassRetryAfter, 7 * time.Second},
		{http.StatusTooManyRequests, "", outbox.ClassRetryAfter, 0},
		{http.StatusTooManyRequests, "-1", outbox.ClassRetryAfter, 0},
		{http.StatusTooManyRequests, "99999999", outbox.ClassRetryAfter, time.Hour},
		{http.StatusServiceUnavailable, "", outbox.ClassUnavailable, 0},
		{http.StatusBadRequest, "", outbox.ClassPermanent, 0},
		{http.StatusGone, "", outbox.ClassPermanent, 0},
		{http.StatusConflict, "", outbox.ClassPlain, 0},
		{http.StatusRequestTimeout, "", outbox.ClassPlain, 0},
		{http.StatusInternalServerError, "", outbox.ClassPlain, 0},
		{http.StatusFound, "", outbox.ClassPlain, 0},
	} {
		err := classify(&http.Response{StatusCode: c.status, Header: http.Header{"Retry-After": {c.retryAfter}}})
		class, delay := outbox.Classify(err)
		require.Equal(t, c.class, class, c.status)
		require.Equal(t, c.delay, delay, c.status)
		require.Equal(t, fmt.Sprintf("http-%d", c.status), outbox.Code(err))
	}
	for _, status := range []int{200, 202, 204} {
		require.NoError(t, classify(&http.Response{StatusCode: status}))
	}
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	require.Equal(t, time.Minute, retryAfter(now.Add(time.Minute).Format(http.TimeFormat), now))
	require.Zero(t, retryAfter(now.Add(-time.Minute).Format(http.TimeFormat), now))
}

func TestNobodyListeningPausesTheChannel(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	require.NoError(t, l.Close())
	_, err = hook("http://"+l.Addr().String()).send(t.Context(), &outbox.Record{Channel: "events", Key: "a"})
	class, _ := outbox.Classify(err)
	require.Equal(t, outbox.ClassUnavailable, class)
}
