package main

import (
	"errors"
	"regexp"
	"strconv"
	"time"

	"github.com/urfave/cli/v3"
)

// durationFlag is a flag for a duration, which may be given in days too.
type durationFlag = cli.FlagBase[time.Duration, cli.NoConfig, durationValue]

type durationValue time.Duration

func (durationValue) Create(v time.Duration, p *time.Duration, _ cli.NoConfig) cli.Value {
	*p = v
	return (*durationValue)(p)
}

func (durationValue) ToString(v time.Duration) string { return v.String() }

func (d *durationValue) Set(s string) (err error) {
	*(*time.Duration)(d), err = parseDuration(s)
	return err
}

func (d *durationValue) Get() any       { return time.Duration(*d) }
func (d *durationValue) String() string { return time.Duration(*d).String() }

var inDays = regexp.MustCompile(`^([+-]?)(\d+(?:\.\d+)?)d(.*)$`)

// parseDuration reads what time.ParseDuration does, and days of 24 hours
// before it: 90s, 36h, 1d, 1d12h.
func parseDuration(s string) (time.Duration, error) {
	if m := inDays.FindStringSubmatch(s); m != nil {
		days, err := strconv.ParseFloat(m[2], 64)
		if err != nil {
			return 0, err
		}
		s = m[1] + strconv.FormatFloat(days*24, 'f', -1, 64) + "h" + m[3]
	}
	d, err := time.ParseDuration(s)
	if err != nil {
		return 0, errors.New("not a duration such as 90s, 36h or 1d12h")
	}
	return d, nil
}
