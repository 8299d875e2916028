# The modules of this repository: its own, and those kept apart from it.
MODULES = $(shell find . -name go.mod -not -path '*/.*' -exec dirname {} \; | sort)

STATICCHECK = honnef.co/go/tools/cmd/staticcheck@v0.8.2
GOVULNCHECK = golang.org/x/vuln/cmd/govulncheck@v1.1.4

# With the race detector, but not inside the C of SQLite: it costs fifteen times there, and tells nothing.
RACE = -race -gcflags=modernc.org/sqlite/lib=-race=false -gcflags=modernc.org/libc=-race=false

# How long one package's tests may take; how often stress runs which tests, and how many seconds
# it gives to the nemesis of the convergence checker on each database.
TIMEOUT = 15m
COUNT   = 3
RUN     = .
NEMESIS = 600

# How long make fuzz runs each target.
FUZZTIME = 1m

.DEFAULT_GOAL = help
.PHONY: help demo test test-short test-bouncer lint vuln fuzz stress bench bench-quick

help: ## list what can be made
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## see the outbox at work, in a moment and without any set-up
	go run ./cmd/outbox demo

test: ## vet and run all tests; sees to it that they have a Postgres
	@for m in $(MODULES); do go -C $$m vet ./... || exit; done
	@for m in $(MODULES); do scripts/postgres.sh go -C $$m test $(RACE) -timeout $(TIMEOUT) ./... || exit; done
	scripts/fuzz.sh 100x $(RACE)

test-short: ## run the tests that need no Postgres
	@for m in $(MODULES); do go -C $$m test -short -timeout $(TIMEOUT) ./... || exit; done

test-bouncer: ## run the tests of poolers through a real PgBouncer; installs it where it is missing
	scripts/pgbouncer.sh scripts/postgres.sh go test $(RACE) -count=1 -tags pgbouncer -run PgBouncer -timeout $(TIMEOUT) ./integration

lint: ## gofmt, go vet and staticcheck
	@files=$$(gofmt -l .); [ -z "$$files" ] || { echo "gofmt would change:"; echo "$$files"; exit 1; }
	@for m in $(MODULES); do go -C $$m vet ./... || exit; done
	@for m in $(MODULES); do (cd $$m && go run $(STATICCHECK) ./...) || exit; done

vuln: ## look the dependencies up in Go's vulnerability database (needs the internet)
	@for m in $(MODULES); do (cd $$m && go run $(GOVULNCHECK) -test ./...) || exit; done

fuzz: ## run every fuzz target, each for FUZZTIME=1m
	scripts/fuzz.sh $(FUZZTIME)

stress: ## run tests again and again under the race detector (COUNT=3 RUN=.), with longer kill tests (NEMESIS=600)
	OUTBOX_STRESS_SECONDS=$(NEMESIS) scripts/postgres.sh go test $(RACE) -v -count=1 -run '^TestConvergence$$' -timeout $$(($(NEMESIS) + 600))s ./integration
	OUTBOX_STRESS_SECONDS=60 scripts/postgres.sh go test $(RACE) -count=$(COUNT) -run '$(RUN)' -timeout 60m ./...

bench: ## measure against other libraries and bare SQL, on a server with fsync on (SUITES="stage drain", all without it)
	scripts/postgres.sh go -C bench run . $(BENCH) $(SUITES)

bench-quick: ## the same in under two minutes: a first idea only
	scripts/postgres.sh go -C bench run . -quick $(BENCH) $(SUITES)
