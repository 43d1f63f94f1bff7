#!/usr/bin/env bash
# Runs every test. The databases and brokers they need are started here on free ports and stopped at the end, whatever happens.
#
#   scripts/test.sh                       everything
#   scripts/test.sh publish               tests whose names contain "publish"
#   scripts/test.sh --lib -- --nocapture  any other arguments of `cargo test`
#
# OV_TEST_PG_URL names a PostgreSQL of yours to use instead; `scripts/services.sh --help` tells the rest.
#
# OV_STORM_EVENTS and OV_STORM_SEEDS=1,2,3 make the test of crashes longer: events published, and one run for each seed.
# OV_PLANS_ROWS makes the test of plans run with as many waiting deliveries, OV_KEYS that of ordering keys with as many.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/lib/common.sh
case ${1:-} in -h | --help) usage; exit ;; esac

need_rust
# A name that is misspelt would otherwise run nothing and pass.
if [ $# -eq 1 ] && [ "${1#-}" = "$1" ] && listed=$(cargo test --workspace --locked "$1" -- --list); then
  case $listed in *': test'*) ;; *) die "no test has '$1' in its name: cargo test --workspace -- --list shows the names" ;; esac
fi
# Servers of this run only: two runs at once, or one beside `services.sh up`, do not meet.
export OV_STATE_DIR="$root/.dev/test-$$"
clean_up() {
  scripts/services.sh down >/dev/null
  rm -rf "$OV_STATE_DIR"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
lines=$(scripts/services.sh up)
eval "$lines"
export OV_TEST_LOGS="$OV_STATE_DIR/logs"
mkdir -p "$OV_TEST_LOGS"

say "cargo test --workspace --locked $*"
cargo test --workspace --locked "$@"

touch "$OV_TEST_LOGS/secrets"
say "looking for $(wc -l <"$OV_TEST_LOGS/secrets") tokens, tickets and secrets in what the servers logged"
if grep -rFf "$OV_TEST_LOGS/secrets" --include='*.log' "$OV_STATE_DIR" >&2; then
  die "these lines hold secrets that the tests used"
fi
