#!/usr/bin/env bash
# Runs a command where tests can have a Postgres: scripts/postgres.sh go test ./...
#
# They need its programs only and start servers themselves. Where these are
# missing they are installed (Debian or Ubuntu, as root), or the command runs in
# a container that has them (docker compose), or this says what to do.
set -euo pipefail
cd "$(dirname "$0")/.."

present() {
	[ -n "${OUTBOX_TEST_POSTGRES:-}" ] || command -v initdb >/dev/null && return
	local dirs="/usr/lib/postgresql/*/bin /usr/pgsql-*/bin /usr/local/pgsql/bin /opt/homebrew/opt/postgresql*/bin
		/usr/local/opt/postgresql*/bin /Applications/Postgres.app/Contents/Versions/*/bin"
	local dir
	for dir in $dirs; do
		[ -x "$dir/initdb" ] && return
	done
	return 1
}

if ! present; then
	if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
		echo "installing postgresql for the tests" >&2
		apt-get update -qq >&2
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends postgresql >&2
	elif docker compose version >/dev/null 2>&1 && docker info >/dev/null 2>&1; then
		exec docker compose run --rm test "$@"
	else
		cat >&2 <<-'END'
			Tests need PostgreSQL 12 or later. One of these gives it to them:
			  apt-get install postgresql           (Debian, Ubuntu; nothing needs to be started)
			  brew install postgresql              (macOS; nothing needs to be started)
			  start Docker                         (the tests then run in a container)
			  export OUTBOX_TEST_POSTGRES=postgres://user:password@host:5432/postgres
			or run what needs no Postgres: make test-short
		END
		exit 1
	fi
fi
exec "$@"
