# shellcheck shell=bash
# Finds programs that Debian packages, or installs the package where that is ours to do. Sourced after common.sh, never run.

# debian_known NAME: sets what there is to know of a program: the variable that names one, its title and what needs it, the
# word that makes it tell its version, and where it may lie.
debian_known() {
  case $1 in
    pgbouncer)
      deb_variable=OV_TEST_PGBOUNCER deb_title=PgBouncer deb_for='the service behind a pooler' deb_version=--version
      deb_places=(pgbouncer /usr/sbin/pgbouncer /opt/homebrew/bin/pgbouncer)
      ;;
    nginx)
      deb_variable=OV_TEST_NGINX deb_title=nginx deb_for='the shipped nginx configuration' deb_version=-v
      deb_places=(nginx /usr/sbin/nginx /opt/homebrew/bin/nginx)
      ;;
    chromium)
      deb_variable=OV_TEST_CHROMIUM deb_title=Chromium deb_for='streams in a browser' deb_version=--version
      deb_places=(chromium chromium-browser google-chrome-stable google-chrome
        '/Applications/Chromium.app/Contents/MacOS/Chromium' '/Applications/Google Chrome.app/Contents/MacOS/Google Chrome')
      ;;
  esac
}

# debian_runs PROGRAM: it is there and starts.
debian_runs() { [ -x "$1" ] && "$1" "$deb_version" >/dev/null 2>&1; }

# debian_here: prints the path of the program that debian_known told of, if this machine has it.
debian_here() {
  local place program
  for place in "${deb_places[@]}"; do
    program=$(command -v "$place" 2>/dev/null) || continue
    if debian_runs "$program"; then
      printf '%s\n' "$program"
      return
    fi
  done
  return 1
}

# debian_find NAME: prints the path of the program. Debian's packages start servers of their own, which are not wanted.
debian_find() {
  local name=$1 deb_variable deb_title deb_for deb_version deb_places
  debian_known "$name"
  if [ -n "${!deb_variable:-}" ]; then
    debian_runs "${!deb_variable}" || { say "$deb_variable=${!deb_variable} is no $deb_title that runs here"; return 1; }
    printf '%s\n' "${!deb_variable}"
    return
  fi
  debian_here && return
  if [ "$(id -u)" -eq 0 ] && command -v apt-get >/dev/null 2>&1; then
    say "installing Debian's package $name"
    { debian_install "$name" || { apt-get update -qq && debian_install "$name"; }; } >&2
    debian_here && return
  fi
  cat >&2 <<TEXT
${0##*/}: no $deb_title, which tests of $deb_for need. Any one of these helps:
  Debian, Ubuntu   apt-get install $name
  macOS            brew install $name
  elsewhere        export $deb_variable=the path of the program
TEXT
  return 1
}

debian_install() {
  # 101: Debian's way to say that no service is to be started now.
  local rules=/usr/sbin/policy-rc.d made='' status=0
  if [ ! -e "$rules" ]; then
    printf '#!/bin/sh\nexit 101\n' >"$rules" && chmod 755 "$rules" && made=yes
  fi
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$1" || status=$?
  [ -z "$made" ] || rm -f "$rules"
  return "$status"
}
