#!/usr/bin/env bash
# Keeps .sqlx/ in step with the queries and the migrations. The build checks each SQL statement against these files,
# so that compiling needs no database; this script makes them from a real one.
#
#   scripts/sqlx.sh prepare   write .sqlx/ anew; commit the result
#   scripts/sqlx.sh check     fail where .sqlx/ is not what `prepare` would write
#
# Reads OV_TEST_PG_URL as `scripts/services.sh` does.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/lib/common.sh
. scripts/lib/postgres.sh
case ${1:-} in
  prepare | check) mode=$1 ;;
  -h | --help) usage; exit ;;
  *) usage >&2; exit 2 ;;
esac
need_rust

export OV_STATE_DIR="$root/.dev/sqlx-$$"
database="sqlx_$$" server=''
run_sql() { "$psql" --no-psqlrc --quiet --set ON_ERROR_STOP=1 --dbname "$@" >/dev/null; }
clean_up() {
  [ -z "$server" ] || run_sql "$server" --command "DROP DATABASE IF EXISTS $database WITH (FORCE)" || true
  scripts/services.sh down >/dev/null
  rm -rf "$OV_STATE_DIR"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
lines=$(scripts/services.sh up postgres)
eval "$lines"
psql=psql
psql --version >/dev/null 2>&1 || psql="$(pg_find_bin)/psql"

server=$OV_TEST_PG_URL
run_sql "$server" --command "CREATE DATABASE $database TEMPLATE template0"
query=''
case $server in *\?*) query="?${server#*\?}" ;; esac
address=${server%%\?*}
scratch="${address%/*}/$database$query"
for migration in migrations/*.sql; do
  [ -f "$migration" ] || continue
  if head -n 1 "$migration" | grep -q '^-- no-transaction'; then
    run_sql "$scratch" --file "$migration"
  else
    run_sql "$scratch" --single-transaction --file "$migration"
  fi
done

# The macros write one file per query when they see both variables; they only run when the crate is compiled again.
found="$OV_STATE_DIR/queries"
mkdir -p "$found"
git ls-files -z -- '*src/lib.rs' '*src/main.rs' 'tests/*/main.rs' 'tests/*.rs' | xargs -0 touch -c
say "compiling every target against a migrated database"
DATABASE_URL=$scratch SQLX_OFFLINE=false SQLX_OFFLINE_DIR=$found cargo check --quiet --workspace --all-targets --locked

count=$(find "$found" -name 'query-*.json' | wc -l | tr -d ' ')
if [ "$mode" = prepare ]; then
  rm -rf .sqlx
  mkdir .sqlx
  find "$found" -name 'query-*.json' -exec cp {} .sqlx/ \;
  say "wrote .sqlx/ ($count queries)"
else
  mkdir -p .sqlx
  diff -r .sqlx "$found" >&2 || die ".sqlx/ is out of date: run 'scripts/sqlx.sh prepare' and commit the result"
  rmdir .sqlx 2>/dev/null || true
  say ".sqlx/ is up to date ($count queries)"
fi
