#!/usr/bin/env bash
# A private NATS server with JetStream, for tests.
#
#   eval "$(scripts/test-nats.sh up)"     start it where it does not run; sets OV_TEST_NATS_URL
#   eval "$(scripts/test-nats.sh down)"   stop it and delete its data
#
# It is the service `nats` of scripts/services.sh.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
. "$here/lib/common.sh"
case ${1:-} in
  up | down) exec "$here/services.sh" "$1" nats ;;
  -h | --help) usage ;;
  *)
    usage >&2
    exit 2
    ;;
esac
