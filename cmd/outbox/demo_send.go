package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"

	"github.com/seed-2b36b211/sqloutbox/outbox"
)

// send gives a mail to the mailer.
func (spec relaySpec) send(ctx context.Context, r *outbox.Record) (ref string, err error) {
	status, ref, err := spec.callMailer(ctx, http.MethodPost, r)
	switch {
	case err != nil: // it may have taken the mail before the line broke
		return "", outbox.Unknown(err)
	case status == http.StatusTooManyRequests:
		return "", outbox.RetryAfter(busyFor, errors.New("the mailer answers 429"))
	case status >= 400 && status < 500:
		return "", outbox.WithCode("no-mailbox", outbox.Permanent(fmt.Errorf("the mailer answers %d", status)))
	case status != http.StatusOK:
		return "", outbox.Unknown(fmt.Errorf("the mailer answers %d", status))
	}
	return ref, nil
}

// ask finds out what became of a mail whose relay died or got no answer.
func (spec relaySpec) ask(ctx context.Context, r *outbox.Record) (outbox.Verdict, string, error) {
	switch status, ref, err := spec.callMailer(ctx, http.MethodGet, r); {
	case err != nil:
		return outbox.VerdictUnknown, "", err
	case status == http.StatusOK:
		return outbox.VerdictSent, ref, nil
	case status == http.StatusNotFound:
		return outbox.VerdictNotSent, "", nil
	default:
		return outbox.VerdictUnknown, "", fmt.Errorf("the mailer answers %d", status)
	}
}

func (spec relaySpec) callMailer(ctx context.Context, method string, r *outbox.Record) (status int, ref string, err error) {
	var body io.Reader
	if method == http.MethodPost {
		body = bytes.NewReader(r.Payload)
	}
	request, err := http.NewRequestWithContext(ctx, method, spec.Mailer+"?id="+url.QueryEscape(r.Key), body)
	if err != nil {
		return 0, "", err
	}
	response, err := http.DefaultClient.Do(request)
	if err != nil {
		return 0, "", fmt.Errorf("call the mailer: %w", err)
	}
	defer response.Body.Close()
	var answer mailRef
	if response.StatusCode == http.StatusOK {
		if err := json.NewDecoder(response.Body).Decode(&answer); err != nil {
			return 0, "", fmt.Errorf("read the mailer's answer: %w", err)
		}
	}
	return response.StatusCode, answer.Ref, nil
}
