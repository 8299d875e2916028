# The modules of this repository: its own, and those kept apart from it.
MODULES = $(shell find . -name go.mod -not -path '*/.*' -exec dirname {} \; | sort)

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2

# With the race detector, but not inside the C of SQLite: it costs fifteen times there, and tells nothing.
RACE = -race -gcflags=modernc.org/sqlite/lib=-race=false -gcflags=modernc.org/libc=-race=false

# How long one package's tests may take; how often stress runs which tests.
TIMEOUT = 15m
COUNT   = 3
RUN     = .

.DEFAULT_GOAL = help
.PHONY: help demo test test-short lint stress bench bench-quick

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## see the outbox at work, in a moment and without any set-up
	go run ./cmd/outbox demo

test: ## vet and run all tests; sees to it that they have a Postgres
	@for m in $(MODULES); do go -C $$m vet ./... || exit; done
	@for m in $(MODULES); do scripts/postgres.sh go -C $$m test $(RACE) -timeout $(TIMEOUT) ./... || exit; done

test-short: ## run the tests that need no Postgres
	@for m in $(MODULES); do go -C $$m test -short -timeout $(TIMEOUT) ./... || exit; done

lint: ## gofmt, go vet and staticcheck
	@files=$$(gofmt -l .); [ -z "$$files" ] || { echo "gofmt would change:"; echo "$$files"; exit 1; }
	@for m in $(MODULES); do go -C $$m vet ./... || exit; done
	@for m in $(MODULES); do (cd $$m && go run $(STATICCHECK) ./...) || exit; done

stress: ## run tests again and again under the race detector (COUNT=3 RUN=.), with longer kill tests
	OUTBOX_STRESS_SECONDS=60 scripts/postgres.sh go test $(RACE) -count=$(COUNT) -run '$(RUN)' -timeout 60m ./...

bench: ## measure against other libraries and bare SQL, on a server with fsync on (SUITES="stage drain", all without it)
	scripts/postgres.sh go -C bench run . $(BENCH) $(SUITES)

bench-quick: ## the same in under two minutes: a first idea only
	scripts/postgres.sh go -C bench run . -quick $(BENCH) $(SUITES)
