# shellcheck shell=bash
# shellcheck disable=SC2154 # what bench.sh sets
# The carrier fabric's part of scripts/bench.sh: the same load with brokers beside PostgreSQL, with each of them in trouble,
# and from one process to another. Sourced by it, never run.

# Beside each other at 200/s; the middle third is where a broker gets into trouble.
trouble_seconds=10
broker_pids='' line_pid='' watch_brokers=() cards=free
valkey_at='' nats_at='' sqs_url=''

# brokers_up: private brokers, and rate cards under which a cloud queue may be chosen.
brokers_up() {
  local name started access_key secret_key
  for name in valkey nats sqs; do
    mkdir -p "$work/$name"
    started=$(broker_start "$name" "$work/$name") || die "the runs with carriers need $name"
    broker_pids="$broker_pids ${started% *}" watch_brokers+=(--watch "$name=${started% *}")
    case $name in
      valkey) valkey_at="127.0.0.1:${started#* }" ;;
      nats) nats_at="127.0.0.1:${started#* }" ;;
      sqs)
        sqs_at="127.0.0.1:${started#* }"
        { read -r access_key && read -r secret_key && read -r sqs_url; } <"$work/sqs/ready"
        sqs_keys=("CLOUD_QUEUE_ACCESS_KEY=$access_key" "CLOUD_QUEUE_SECRET_KEY=$secret_key")
        ;;
    esac
  done
  # One that costs is beside the others; one that is free is chosen before `pg-v1`.
  cloud_card 0 >"$work/paid.json"
  cloud_card 1000000000 >"$work/free.json"
}

# cloud_card ALLOWANCE: the shipped rate cards and one of the cloud queue.
cloud_card() {
  sed '$d' rate-cards/rate-cards.json
  printf ',{"id":"rc-cloud-queue-v1","provider":"cloud","adapter":"cloud-v1","metric":"queue-operation","unit_size":1,'
  printf '"unit_price_usd":0.0000004,"free_allowance":%s,"reset_period":"month","region":"cloud",' "$1"
  printf '"effective_from":"2026-09-01","source":"https://openvibe.network/pricing/events","verified_at":"2026-09-01"}]\n'
}

brokers_down() {
  line_down
  # shellcheck disable=SC2086 # a list of words
  [ -z "$broker_pids" ] || kill -KILL $broker_pids 2>/dev/null || true
}

# carriers LIST [BROKER ADDRESS]: sets extra_env so that the service uses these carriers; BROKER is at ADDRESS instead.
carriers() {
  local valkey=$valkey_at nats=$nats_at sqs=$sqs_at
  [ $# -eq 1 ] || printf -v "$2" '%s' "$3"
  extra_env=("EVENTS_CARRIERS=$1" "EVENTS_RATE_CARDS=$work/$cards.json" "VALKEY_URL=redis://$valkey" "NATS_URL=nats://$nats"
    "CLOUD_QUEUE_URL=${sqs_url/"$sqs_at"/"$sqs"}" "${sqs_keys[@]}")
}

# service_with CARRIERS…: as `carriers`, and the service begins anew.
service_with() {
  carriers "$@"
  stop_service
  start_service
}

# line_up BROKER ARGUMENT…: a line in front of a broker, at a port that is the same each time.
line_up() {
  local at
  case $1 in valkey) at=$valkey_at ;; nats) at=$nats_at ;; sqs) at=$sqs_at ;; esac
  rm -f "$work/line.out"
  "$load" line --to "$at" --port "$line_port" "${@:2}" >"$work/line.out" &
  line_pid=$!
  until [ -s "$work/line.out" ]; do sleep 0.02; done
}

line_down() {
  [ -n "$line_pid" ] || return 0
  kill -KILL "$line_pid" 2>/dev/null || true
  wait "$line_pid" 2>/dev/null || true
  line_pid=''
}

# trouble ROUND WHEN BROKER CARRIERS KINDS: the publishers' latency with `pg-v1` alone, and with those carriers while
# their broker refuses, hangs and is slow; WHEN is boot or load. KINDS name the carriers that a healthy start has to choose.
trouble() {
  local round=$1 when=$2 broker=$3 list=$4 kinds=$5 name fault plain
  name=${broker/sqs/cloud}
  # As if on a machine of its own: what a healthy one computes is not what is measured. Above all the server that stands in
  # for a cloud queue takes much of a core.
  # shellcheck disable=SC2086 # a list of words
  renice -n 19 -p $broker_pids >/dev/null
  plain=$(printf '%s' "$kinds" | sed 's/=[^,]*//g')
  troubled() { measured_service "$1" "$round" e2e --seconds "$trouble_seconds" --subscriptions 2 --kinds "$2"; }
  service_with pg-v1
  troubled "${name}_alone_$when" "$plain"
  for fault in dead stalled slow; do
    if [ "$when" = boot ]; then
      case $fault in
        dead) ;;
        stalled) line_up "$broker" && kill -STOP "$line_pid" ;;
        slow) line_up "$broker" --slow ;;
      esac
      service_with "pg-v1,$list" "$broker" "127.0.0.1:$line_port"
      troubled "${name}_${fault}_$when" "$plain"
    else
      line_up "$broker"
      service_with "pg-v1,$list" "$broker" "127.0.0.1:$line_port"
      (
        sleep $((trouble_seconds / 3 + 1)) # the run begins about a second after the tool
        case $fault in
          dead) kill -KILL "$line_pid" ;;
          stalled) kill -STOP "$line_pid" ;;
          slow) kill -USR1 "$line_pid" ;;
        esac
      ) &
      troubled "${name}_${fault}_$when" "$kinds"
    fi
    line_down
  done
}

# wake ROUND MEASURE CARRIERS KIND: published to a process that sends nothing, delivered by another one.
wake() {
  local round=$1 measure=$2 list=$3 kind=$4 other tries
  carriers "$list"
  extra_env+=(EVENTS_WORKER_INTERVAL_MS=5000)
  stop_service
  service_env $((service_port + 1)) on
  env -i "${environment[@]}" "$service_bin" serve >>"$work/service.log" 2>&1 &
  other=$!
  broker_pids="$broker_pids $other"
  for ((tries = 0; tries < 150; tries++)); do
    curl -fsS -o /dev/null "http://127.0.0.1:$((service_port + 1))/api/ready" 2>/dev/null && break
    sleep 0.1
  done
  start_service off
  measured_service "$measure" "$round" e2e --rate 50 --seconds "$trouble_seconds" --kinds "$kind"
  kill "$other" && wait "$other" 2>/dev/null || true
}

fabric_round() {
  local round=$1 when
  if wanted carriers; then
    carriers_alone() {
      service_with pg-v1
      measured_service carriers_alone "$round" deliver --seconds "$seconds" --kinds queue,topic,stream
    }
    # Whoever comes second finds larger tables: they take turns.
    ((round % 2 == 0)) || carriers_alone
    cards=paid
    service_with pg-v1,valkey-v1,nats-v1,nats-js-v1,cloud-v1
    cards=free
    measured_service carriers_all "$round" deliver --seconds "$seconds" --kinds queue=valkey-v1,topic=nats-v1,stream=nats-js-v1 \
      "${watch_brokers[@]}"
    ((round % 2 == 1)) || carriers_alone
  fi
  for when in boot load; do
    if wanted "trouble-$when"; then
      trouble "$round" "$when" valkey valkey-v1 queue=valkey-v1,topic=valkey-v1
      trouble "$round" "$when" nats nats-v1,nats-js-v1 topic=nats-v1,stream=nats-js-v1
      trouble "$round" "$when" sqs cloud-v1 queue=cloud-v1
    fi
  done
  if wanted wake; then
    wake "$round" wake_valkey pg-v1,valkey-v1 queue=valkey-v1
    wake "$round" wake_nats pg-v1,nats-v1 topic=nats-v1
    wake "$round" wake_jetstream pg-v1,nats-js-v1 stream=nats-js-v1
    wake "$round" wake_doorbell pg-v1 queue=pg-v1
  fi
}
