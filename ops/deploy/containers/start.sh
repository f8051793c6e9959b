#!/bin/sh
# Runs `quire-start COMMAND ARGUMENTS` in a container: the gateway's image has the commands gateway, dead, keys and
# parking, the worker's has worker. Without QUIRE_REDIS_URL the command uses the Redis of the same stack; the container of Redis keeps its
# password in a file on a volume that both mount.
set -eu
password_file=/run/quire/redis-password
if [ -z "${QUIRE_REDIS_URL:-}" ] && [ -r "$password_file" ]; then
  QUIRE_REDIS_URL="redis://:$(cat "$password_file")@redis:6379/0"
  export QUIRE_REDIS_URL
fi
command=${1:-}
case $command in
  gateway | worker | dead | keys | parking) ;;
  *)
    echo "quire-start: there is no command '$command': give gateway, dead, keys, parking or worker, then their arguments" >&2
    exit 2
    ;;
esac
if ! command -v "quire-$command" >/dev/null; then
  echo "quire-start: this image has no command $command; use the image of the other service" >&2
  exit 2
fi
shift
exec "quire-$command" "$@"
