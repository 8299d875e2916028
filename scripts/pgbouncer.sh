#!/usr/bin/env bash
# Runs a command where tests can have a PgBouncer: scripts/pgbouncer.sh go test -tags pgbouncer ./integration
#
# They need its program only and start it themselves. Where it is missing it is
# installed (Debian or Ubuntu, as root), or this says what to do.
set -euo pipefail
PATH=$PATH:/usr/sbin
if ! command -v pgbouncer >/dev/null; then
	if command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
		echo "installing pgbouncer for the tests" >&2
		apt-get update -qq >&2
		DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pgbouncer >&2
	else
		echo "these tests need PgBouncer: apt-get install pgbouncer, or brew install pgbouncer; nothing needs to be started" >&2
		exit 1
	fi
fi
exec "$@"
