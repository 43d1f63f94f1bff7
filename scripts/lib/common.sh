# shellcheck shell=bash
# What every script here shares. Sourced, never run.

# Standard output is for results that another program reads; people read standard error.
say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }
die() {
  say "$@"
  exit 1
}

# Prints the comment block that opens the calling script, without its marks: the help text and the file never disagree.
usage() { awk 'NR > 1 && !/^#/ { exit } NR > 1 { sub(/^# ?/, ""); print }' "$0"; }

# Where programs that this repository fetches for itself are kept between runs.
# Root's own cache is closed to the account that a server must run as, so root uses a directory that all can read.
cache_dir() {
  if [ "$(id -u)" -eq 0 ] && [ -z "${XDG_CACHE_HOME:-}" ]; then
    printf '/var/cache/openvibe-events\n'
  else
    printf '%s/openvibe-events\n' "${XDG_CACHE_HOME:-${HOME:?HOME is not set}/.cache}"
  fi
}

# Puts cargo on PATH and makes sure that the toolchain of rust-toolchain.toml is there, or says what to install.
need_rust() {
  if ! command -v cargo >/dev/null 2>&1 && [ -x "${CARGO_HOME:-$HOME/.cargo}/bin/cargo" ]; then
    PATH="${CARGO_HOME:-$HOME/.cargo}/bin:$PATH"
    export PATH
  fi
  command -v cargo >/dev/null 2>&1 || die "Rust is missing. Install rustup (https://rustup.rs; Debian 13: apt-get install rustup; macOS: brew install rustup) and run this again."
  command -v cc >/dev/null 2>&1 || die "a C compiler is missing. Debian: apt-get install gcc libc6-dev; macOS: xcode-select --install"
  if ! cargo --version >/dev/null 2>&1; then
    command -v rustup >/dev/null 2>&1 || die "cargo does not run, and there is no rustup to install the toolchain of rust-toolchain.toml."
    say "installing the toolchain that rust-toolchain.toml names"
    rustup toolchain install >&2 || die "the toolchain of rust-toolchain.toml could not be installed"
  fi
}
