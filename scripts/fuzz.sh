#!/usr/bin/env bash
# Fuzzes what reads hostile input, with coverage. It takes a nightly compiler, a C++ compiler and `cargo fuzz`.
#
#   scripts/fuzz.sh                     every target for a minute
#   scripts/fuzz.sh 600 app_endpoint    one target for ten minutes
#
# What it finds lies in fuzz/artifacts; new inputs worth keeping go to fuzz/corpus (`cargo +nightly fuzz cmin TARGET` thins them).
# Without any of this, `scripts/test.sh fuzz::` replays the corpus and mutations of it.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/lib/common.sh
case ${1:-} in -h | --help) usage; exit ;; esac

need_rust
rustc +nightly --version >/dev/null 2>&1 || die "a nightly compiler is missing: rustup toolchain install nightly"
cargo fuzz --version >/dev/null 2>&1 || die "cargo fuzz is missing: cargo install cargo-fuzz"
seconds=${1:-60}
[ $# -eq 0 ] || shift
[ $# -gt 0 ] || set -- $(cargo +nightly fuzz list)
for target; do
  say "$target for $seconds s"
  cargo +nightly fuzz run "$target" -- -max_total_time="$seconds" -max_len=4096
done
