package outbox

import (
	"strings"
	"time"
)

const (
	maxHeaderBytes    = 8 << 10
	defaultMaxPayload = 1 << 20
	maxBatchDelay     = 365 * 24 * time.Hour
	maxPutDelay       = 10 * 365 * 24 * time.Hour
	maxRetention      = maxPutDelay

	minLease = 100 * time.Millisecond
	maxLease = time.Hour
)

// reservedHeader starts the header names that are kept for this library.
const reservedHeader = "outbox-"

func checkKey(key string) error { return validText("key", key, maxKeyBytes) }

func checkGroup(group string) error { return validText("group", group, maxKeyBytes) }

func checkHeader(h Header) error {
	size := 0
	for name, value := range h {
		size += len(name) + len(value)
		if size > maxHeaderBytes {
			return invalid("header names and values have more than %d bytes", maxHeaderBytes)
		}
		if err := validText("header name", name, maxHeaderBytes); err != nil {
			return err
		}
		if strings.HasPrefix(name, reservedHeader) {
			return invalid("header name %q starts with %q, which is reserved", name, reservedHeader)
		}
		if value == "" {
			continue
		}
		if err := validText("value of header "+name, value, maxHeaderBytes); err != nil {
			return err
		}
	}
	return nil
}

// checkRange refuses a duration outside [low, high].
func checkRange(what string, d, low, high time.Duration) error {
	if d < low || d > high {
		return invalid("%s is %s, it must be between %s and %s", what, d, low, high)
	}
	return nil
}

// checkCount refuses a count outside [1, high].
func checkCount(what string, n, high int) error {
	if n < 1 || n > high {
		return invalid("%s is %d, it must be between 1 and %d", what, n, high)
	}
	return nil
}

func firstError(errs ...error) error {
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
