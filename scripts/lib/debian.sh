# shellcheck shell=bash
# Finds PgBouncer, or installs it where that is ours to do. Sourced after common.sh, never run.

# pgbouncer_runs PROGRAM: it is there and starts.
pgbouncer_runs() { [ -x "$1" ] && "$1" --version >/dev/null 2>&1; }

# pgbouncer_find: prints the path of the program. Debian's package starts a server of its own, which is not wanted.
pgbouncer_find() {
  local program
  if [ -n "${OV_TEST_PGBOUNCER:-}" ]; then
    pgbouncer_runs "$OV_TEST_PGBOUNCER" || { say "OV_TEST_PGBOUNCER=$OV_TEST_PGBOUNCER is no PgBouncer that runs here"; return 1; }
    printf '%s\n' "$OV_TEST_PGBOUNCER"
    return
  fi
  for program in "$(command -v pgbouncer 2>/dev/null || true)" /usr/sbin/pgbouncer /opt/homebrew/bin/pgbouncer; do
    if [ -n "$program" ] && pgbouncer_runs "$program"; then
      printf '%s\n' "$program"
      return
    fi
  done
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing Debian's package pgbouncer"
    { pgbouncer_install || { apt-get update -qq && pgbouncer_install; }; } >&2
    if pgbouncer_runs /usr/sbin/pgbouncer; then
      printf '/usr/sbin/pgbouncer\n'
      return
    fi
  fi
  cat >&2 <<TEXT
${0##*/}: no PgBouncer, which tests of the service behind a pooler need. Any one of these helps:
  Debian, Ubuntu   apt-get install pgbouncer
  macOS            brew install pgbouncer
  elsewhere        export OV_TEST_PGBOUNCER=the path of the program
TEXT
  return 1
}

pgbouncer_install() {
  # 101: Debian's way to say that no service is to be started now.
  local rules=/usr/sbin/policy-rc.d made='' status=0
  if [ ! -e "$rules" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$rules" && chmod 755 "$rules" && made=yes
  fi
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends pgbouncer || status=$?
  [ -z "$made" ] || rm -f "$rules"
  return "$status"
}
