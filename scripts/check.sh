#!/usr/bin/env bash
# Everything a change must pass before it is proposed: format, lints, docs and their examples, dependencies, queries, tests.
#
#   scripts/check.sh
#
# The first run builds a pinned cargo-deny (several minutes) unless one is on PATH; it is kept in the user's cache.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/lib/common.sh
case ${1:-} in
  '') ;;
  -h | --help) usage; exit ;;
  *) usage >&2; exit 2 ;;
esac
need_rust
CARGO_DENY_VERSION=0.20.2

cargo_deny() {
  local home
  if command -v cargo-deny >/dev/null 2>&1; then
    printf 'cargo-deny\n'
    return
  fi
  home="$(cache_dir)/cargo-deny-$CARGO_DENY_VERSION"
  if [ ! -x "$home/bin/cargo-deny" ]; then
    say "building cargo-deny $CARGO_DENY_VERSION into $home: several minutes, once"
    env -u CARGO_TARGET_DIR cargo install --quiet --locked --root "$home" "cargo-deny@$CARGO_DENY_VERSION" >&2
  fi
  printf '%s/bin/cargo-deny\n' "$home"
}

# One database server for the queries and the tests.
export OV_STATE_DIR="$root/.dev/check-$$"
clean_up() {
  OV_STATE_DIR="$root/.dev/check-$$" scripts/services.sh down >/dev/null
  rm -rf "$root/.dev/check-$$"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

say "format"
scripts/fmt.sh --check
say "lints"
cargo clippy --workspace --all-targets --locked -- -D warnings
say "docs"
RUSTDOCFLAGS=-Dwarnings cargo doc --workspace --no-deps --locked
say "examples"
scripts/docs.sh
say "secrets in the tree"
# Keys, tokens and signing secrets as they look; what tests and fixtures are signed with says that it is none, or lies with the tests' own authority.
looks='-----BEGIN ([A-Z]+ )?PRIVATE KEY-----|whsec_[A-Za-z0-9+/_-]{20,}|eyJ[A-Za-z0-9_-]{16,}\.eyJ|AKIA[0-9A-Z]{16}|gh[pousr]_[A-Za-z0-9]{36}'
if git grep -nIE -e "$looks" -- ':!tests/it/support/tls' ':!scripts/check.sh' | grep -vE '0123456789abcdef|whsec_for_tests|PRIVATE KEY-----[\\]+n\{PASSWORD'; then
  die "these lines look like secrets"
fi
say "dependencies: bans, licences, sources"
deny=$(cargo_deny)
"$deny" --locked check bans licenses sources
say "dependencies: advisories"
# Fetching comes first and by itself: without a network there is nothing to judge by, which is no fault of the change.
if "$deny" --locked fetch db 2>/dev/null; then
  "$deny" --frozen check advisories
else
  say "advisories: skipped, the advisory database cannot be fetched"
fi
lines=$(scripts/services.sh up)
eval "$lines"
say "queries"
scripts/sqlx.sh check
say "tests"
scripts/test.sh
say "all passed"
