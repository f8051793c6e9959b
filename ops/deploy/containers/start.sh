#!/bin/sh
# Starts `quire ARGUMENTS` in a container. Without QUIRE_REDIS_URL it is the Redis of the same stack, with the password
# that the container of Redis keeps in a file that both mount.
set -eu
password_file=/run/quire/redis-password
if [ -z "${QUIRE_REDIS_URL:-}" ] && [ -r "$password_file" ]; then
  QUIRE_REDIS_URL="redis://:$(cat "$password_file")@redis:6379/0"
  export QUIRE_REDIS_URL
fi
exec quire "$@"
