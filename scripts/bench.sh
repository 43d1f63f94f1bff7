#!/usr/bin/env bash
# Measures the service against references on the same PostgreSQL, and writes docs/benchmarks.md and docs/benchmarks.json.
#
#   scripts/bench.sh                         everything, three rounds: about ten minutes on two cores
#   scripts/bench.sh --full                  ten rounds of longer measurements, 1,000,000 publishes: about an hour
#   scripts/bench.sh --only wake --rounds 1  the fabric's, which run where they are named, or with --full: they start brokers
#   scripts/bench.sh --only publish,deliver  a quick look at some; the table goes to standard output, docs/ stays
#   scripts/bench.sh --hold                  measure nothing: start the server and a service, print how to run the load
#                                            tool by hand against them, and stop them at Ctrl-C
#
#   --only LIST     of publish, publish-1, publish-100, deliver, e2e, fair, drain, pull, claim, memory, of live streams sse
#                   (10,000 of them: needs 12,000 open files), and of the fabric carriers, trouble-boot, trouble-load, wake
#   --rounds N      rounds, in each of which a reference and the figure measured against it run right after one another
#   --publishes N   publishes before the memory of the service is read
#   --out DIR       where the two files go; default docs
#   --built         build nothing, use what lies in target/release
#
# It builds the service and the load tool (CARGO_TARGET_DIR is respected), runs a PostgreSQL of its own with fsync and
# synchronous_commit on, and stops all that it started. Nothing else should run on the machine meanwhile.
#
# Reads OV_PG_BIN, OV_NATS_SERVER and OV_VALKEY_SERVER as scripts/services.sh does; pgbench and psql are taken from there or from PATH.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
. scripts/lib/common.sh
. scripts/lib/postgres.sh
. scripts/lib/packages.sh
. scripts/lib/brokers.sh
. scripts/lib/bench-fabric.sh

rounds=3 full='' only='' publishes='' out=docs hold='' built=''
known='publish publish-1 publish-100 deliver e2e fair drain pull claim memory sse carriers trouble-boot trouble-load wake'
of_the_fabric='carriers trouble-boot trouble-load wake'
while [ $# -gt 0 ]; do
  case $1 in
    -h | --help) usage; exit ;;
    --full) full=1 rounds=10 ;;
    --hold) hold=1 ;;
    --built) built=1 ;;
    --rounds | --publishes | --only | --out)
      [ $# -ge 2 ] || die "$1 needs a value"
      case $1 in
        --rounds) rounds=$2 ;;
        --publishes) publishes=$2 ;;
        --only) only=${2//,/ } ;;
        --out) out=$2 ;;
      esac
      shift
      ;;
    *) usage >&2; exit 2 ;;
  esac
  shift
done
case $rounds$publishes in *[!0-9]* | 0*) die "--rounds and --publishes take whole numbers from 1" ;; esac
for word in $only; do
  case " $known " in *" $word "*) ;; *) die "--only knows: $known" ;; esac
done
if [ -n "$full" ]; then
  seconds=15 deliver_seconds=60 e2e_seconds=30 publishes=${publishes:-1000000}
else
  seconds=7 deliver_seconds=20 e2e_seconds=12 publishes=${publishes:-200000}
fi
# The same for the references and the service; durability is as PostgreSQL ships it.
settings=("shared_buffers = '1GB'" "max_wal_size = '8GB'" "checkpoint_timeout = '30min'")

wanted() {
  case " $only " in
    "  ") [ -n "$full" ] || case " $of_the_fabric sse " in *" $1 "*) return 1 ;; esac ;;
    *" $1 "*) ;;
    *) return 1 ;;
  esac
}
with_brokers=''
for word in $of_the_fabric; do
  ! wanted "$word" || with_brokers=1
done

# program NAME: a client program of PostgreSQL, beside the server's or on PATH.
program() {
  local beside
  beside="$(dirname "$(readlink -f "$pg_bin/postgres")")/$1"
  if [ -x "$beside" ]; then
    printf '%s\n' "$beside"
  else
    command -v "$1" || die "$1 is missing: neither beside $pg_bin/postgres nor on PATH. The package fetched from PyPI has the server only; Debian: apt-get install postgresql"
  fi
}

need_rust
command -v curl >/dev/null 2>&1 || die "curl is missing"
pg_bin=$(pg_find_bin)
account=$(pg_account)
pgbench=$(program pgbench)
psql=$(program psql)

target=${CARGO_TARGET_DIR:-$root/target}
if [ -z "$built" ]; then
  say "building"
  cargo build --release --workspace --locked >&2
fi
service_bin="$target/release/openvibe-events" load="$target/release/load"

work=$(mktemp -d "${TMPDIR:-/tmp}/openvibe-events-bench.XXXXXX")
chmod 755 "$work" # the server's account passes through
results="$work/results.jsonl"
service_pid='' pg_home='' pg_pid=''
clean_up() {
  local code=$?
  trap - EXIT INT TERM
  stop_service
  brokers_down
  if [ -n "$pg_home" ]; then
    as_account "$account" "$pg_bin/pg_ctl" -D "$pg_home/data" -m immediate -w -t 30 stop >/dev/null 2>&1 || true
    rm -rf "$pg_home"
  fi
  rm -rf "$work"
  exit "$code"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

stop_service() {
  [ -n "$service_pid" ] || return 0
  kill "$service_pid" 2>/dev/null || true
  wait "$service_pid" 2>/dev/null || true
  service_pid=''
}

pg_home=$(pg_home "$work" "$account" postgres)
pg_port=$(pg_start "$pg_bin" "$account" "$pg_home")
sql() { "$psql" -X -q -A -t -v ON_ERROR_STOP=1 -h 127.0.0.1 -p "$pg_port" -U postgres "$@"; }
for setting in "${settings[@]}"; do sql -c "ALTER SYSTEM SET $setting"; done
as_account "$account" "$pg_bin/pg_ctl" -D "$pg_home/data" -m fast -w -t 60 -l "$pg_home/server.log" -o "-p $pg_port" restart >/dev/null
pg_pid=$(head -n 1 "$pg_home/data/postmaster.pid")
[ "$(sql -c 'SHOW fsync')$(sql -c 'SHOW synchronous_commit')" = onon ] || die "this server does not wait for the disk"
sql -c 'CREATE DATABASE reference' -c 'CREATE DATABASE events'
sql -d reference -f benches/load/reference.sql

service_port=$((10000 + RANDOM % 8000))
while port_answers 127.0.0.1 "$service_port" || port_answers 127.0.0.1 $((service_port + 1)) || port_answers 127.0.0.1 $((service_port + 2)); do
  service_port=$((service_port + 3))
done
line_port=$((service_port + 2))
url="http://127.0.0.1:$service_port"
# \n for line ends, as an environment variable may have them: a shell need not carry real ones.
pem=$("$load" key --key "$work/key" | awk '{ printf "%s\\n", $0 }')
# service_env PORT WORKER: what the service runs with, extra_env included, as words for `env -i`.
extra_env=()
service_env() {
  environment=(PATH="$PATH" PORT="$1" EVENTS_WORKER="$2" EVENTS_LIMITS=off EVENTS_LOG=warn OV_NETWORK_PUBLIC_KEY="$pem"
    DATABASE_URL="postgresql://postgres@127.0.0.1:$pg_port/events" ${extra_env[@]+"${extra_env[@]}"})
}
start_service() {
  local tries
  service_env "$service_port" "${1:-on}"
  env -i "${environment[@]}" "$service_bin" serve >>"$work/service.log" 2>&1 &
  service_pid=$!
  for ((tries = 0; tries < 150; tries++)); do
    curl -fsS -o /dev/null "$url/api/ready" 2>/dev/null && return
    kill -0 "$service_pid" 2>/dev/null || break
    sleep 0.1
  done
  cat "$work/service.log" >&2
  die "the service does not become ready"
}
service_env "$service_port" on
env -i "${environment[@]}" "$service_bin" migrate >/dev/null

if [ -n "$hold" ]; then
  start_service
  cat <<TEXT
service    $url, process $service_pid, log $work/service.log
database   postgresql://postgres@127.0.0.1:$pg_port/events, process $pg_pid

  T="--url $url --key $work/key --watch service=$service_pid --watch postgres=$pg_pid"
  $load publish \$T --seconds 10
  $load deliver \$T --seconds 10
  $load e2e \$T
  $load pull \$T

Ctrl-C stops both.
TEXT
  wait "$service_pid" || true
  exit
fi

# note MEASURE ROUND JSON: one line of the results.
note() { printf '{"measure":"%s","round":%s,"sheet":%s}\n' "$1" "$2" "$3" >>"$results"; }

# Both sides of a comparison begin with all pages written back.
settle() { sql -c CHECKPOINT; }

# `cut` reads to the end: a `head` that stops early would fail the pipeline now and then.
envelope=$(head -c 4000 /dev/urandom | base64 | tr -d '+/=\n' | cut -c 1-1300)
# reference MEASURE ROUND ROWS SCRIPT PGBENCH-ARGUMENT…: rows a second by pgbench; ROWS is what one commit holds.
reference() {
  local measure=$1 round=$2 rows=$3 script=$4 tps
  shift 4
  settle
  "$pgbench" -n -M prepared -h 127.0.0.1 -p "$pg_port" -U postgres -D envelope="$envelope" "$@" -f "benches/load/$script" reference \
    >"$work/pgbench.out" 2>&1 || { cat "$work/pgbench.out" >&2; die "pgbench failed"; }
  tps=$(sed -n 's/^tps = \([0-9.]*\).*/\1/p' "$work/pgbench.out")
  note "$measure" "$round" "{\"per_s\":$(awk "BEGIN { printf \"%.1f\", $tps * $rows }")}"
}

# measured MEASURE ROUND MODE ARGUMENT…: a run of the load tool.
measured() {
  local measure=$1 round=$2 sheet code=0
  shift 2
  settle
  sheet=$("$load" "$@" --json) || code=$?
  # 3: it was measured, and something was wrong; the table shows it.
  [ "$code" = 0 ] || [ "$code" = 3 ] || die "load $* failed"
  note "$measure" "$round" "$sheet"
}

measured_service() {
  local measure=$1 round=$2 mode=$3
  shift 3
  measured "$measure" "$round" "$mode" --url "$url" --key "$work/key" --watch "service=$service_pid" --watch "postgres=$pg_pid" "$@"
}

round_of() {
  local round=$1 worker
  if wanted publish || wanted deliver; then
    reference r1 "$round" 1 reference-1.sql -c 32 -j 2 -T "$seconds"
  fi
  if wanted publish; then
    measured_service publish "$round" publish --seconds "$seconds"
  fi
  if wanted publish-1 || wanted e2e; then
    reference r1_one_client "$round" 1 reference-1.sql -c 1 -T "$seconds"
  fi
  if wanted publish-1; then
    measured_service publish_one_connection "$round" publish --connections 1 --seconds "$seconds"
  fi
  if wanted e2e; then
    measured floor "$round" floor --seconds "$e2e_seconds"
    measured_service e2e "$round" e2e --seconds "$e2e_seconds"
  fi
  if wanted publish-100; then
    reference r100 "$round" 100 reference-100.sql -c 8 -j 2 -T "$seconds"
    measured_service publish_batches "$round" publish --connections 8 --batch 100 --seconds "$seconds"
  fi
  if wanted deliver; then
    measured_service deliver "$round" deliver --max-inflight 16 --seconds "$deliver_seconds"
  fi
  if wanted fair; then
    fair() { measured_service "$1" "$round" fair --rate "$2" --subscriptions "$3" --seconds "$e2e_seconds" "${@:4}"; }
    fair fair_alone 200 10
    fair fair 200 10 --beside hang,drip,fail
    fair beside_none 50 20
    fair beside_one 50 20 --beside hang
  fi
  if wanted drain; then
    sql -d reference -c 'TRUNCATE reference_deliveries' -c "INSERT INTO reference_deliveries (subscription, seq)
      SELECT 'sub_' || s, n FROM generate_series(1, 5000) n, generate_series(1, 20) s" -c 'VACUUM ANALYZE reference_deliveries'
    reference reference_drain "$round" 50 reference-drain.sql -c 8 -j 2 -t 250
    stop_service
    start_service off
    service_env $((service_port + 1)) on
    worker="$(printf '%q ' exec env -i "${environment[@]}" "$service_bin" serve) 2>>$(printf '%q' "$work/service.log")"
    measured_service drain "$round" drain --backlog 100000 --subscriptions 20 --max-inflight 16 --worker "$worker"
    stop_service
    start_service
  fi
  if wanted pull; then
    copy_rows "$round"
    measured_service pull "$round" pull
  fi
  if [ -n "$with_brokers" ]; then
    fabric_round "$round"
    extra_env=()
  fi
  if wanted sse; then
    streams "$round"
  fi
}

# Live streams, and a writer of the same frames that does nothing else.
streams() {
  local round=$1 writer_port=$((service_port + 1)) writer
  [ "$(ulimit -n)" = unlimited ] || [ "$(ulimit -n)" -ge 12000 ] || ulimit -n 12000 2>/dev/null || die "10,000 streams need more open files: ulimit -n 12000"
  extra_env=(REALTIME_MAX_CONNECTIONS=20000)
  stop_service
  start_service
  measured_service sse "$round" sse --seconds "$seconds"
  extra_env=()
  stop_service
  "$load" sse-writer --listen "127.0.0.1:$writer_port" 2>>"$work/service.log" &
  writer=$!
  until port_answers 127.0.0.1 "$writer_port"; do kill -0 "$writer" || die "the bare writer did not start"; done
  measured sse_writer "$round" sse --writer --seconds "$seconds" --url "http://127.0.0.1:$writer_port" --key "$work/key" --watch "service=$writer"
  kill "$writer"
  wait "$writer" 2>/dev/null || true
  start_service
}

# The columns that a page is made of, of every row, as text.
copy_rows() {
  local rows ms
  rows=$(sql -d events -c 'SELECT count(*) FROM events')
  if [ "$rows" -lt 20000 ]; then
    "$load" publish --url "$url" --key "$work/key" --connections 4 --batch 100 --events 100000 --seconds 120 --warm-up 0 --json >/dev/null
    rows=$(sql -d events -c 'SELECT count(*) FROM events')
  fi
  settle
  ms=$(sql -d events -c '\timing on' -c '\o /dev/null' -c "COPY (SELECT seq, id, event_type, version, source, actor, on_behalf_of,
    subject_type, subject_id, subject_revision, trace_id, priority, visibility, occurred_at, payload FROM events ORDER BY seq)
    TO STDOUT" | sed -n 's/^Time: \([0-9.]*\) ms.*/\1/p')
  note copy "$1" "{\"per_s\":$(awk "BEGIN { printf \"%.1f\", $rows * 1000 / $ms }"),\"rows\":$rows}"
}

quoted() { printf '"%s"' "$(printf '%s' "$1" | tr -d '"\\\n')"; }
note environment 0 "{$(
  printf '"date":%s,' "$(quoted "$(date -u +%Y-%m-%d)")"
  printf '"commit":%s,' "$(quoted "$(git rev-parse --short=12 HEAD 2>/dev/null || echo unknown)")"
  printf '"processor":%s,' "$(quoted "$(sed -n '/^model name/ { s/.*: //; p; q; }' /proc/cpuinfo)")"
  printf '"cores":%s,' "$(nproc)"
  printf '"memory_gb":%s,' "$(awk '/^MemTotal/ { printf "%.0f", $2 / 1048576 }' /proc/meminfo)"
  printf '"kernel":%s,' "$(quoted "$(uname -r)")"
  printf '"postgresql":%s,' "$(quoted "$(sql -c 'SHOW server_version')")"
  printf '"settings":%s,' "$(quoted "$(printf '%s; ' "${settings[@]}")fsync and synchronous_commit on")"
  printf '"rounds":%s,"publishes":%s,"seconds":%s,"deliver_seconds":%s' "$rounds" "$publishes" "$seconds" "$deliver_seconds"
)}"
say "PostgreSQL $(sql -c 'SHOW server_version') with $(printf '%s; ' "${settings[@]}")fsync and synchronous_commit on"

[ -z "$with_brokers" ] || brokers_up
start_service
if wanted memory; then
  sleep 2 # nothing to wait for: idle is what is measured
  note idle 0 "{\"rss_mb\":$(awk '/^VmRSS/ { printf "%.1f", $2 / 1024 }' "/proc/$service_pid/status")}"
fi
for ((round = 1; round <= rounds; round++)); do
  say "round $round of $rounds"
  round_of "$round"
done
if wanted claim; then
  say "one claim"
  settle
  note claim 0 "$("$target/release/claim" --server "postgresql://postgres@127.0.0.1:$pg_port")"
fi
if wanted memory; then
  say "$publishes publishes"
  stop_service
  start_service
  measured_service memory 0 publish --events "$publishes" --seconds 3600 --warm-up 0
fi
stop_service

if [ -n "$only" ]; then
  "$load" table --results "$results"
else
  "$load" table --results "$results" --markdown "$out/benchmarks.md" --json-file "$out/benchmarks.json"
  say "wrote $out/benchmarks.md and $out/benchmarks.json"
fi
