#!/bin/sh
# Starts Redis with the password REDIS_PASSWORD, or with a random password that is generated once. Gateways and workers
# read it from /run/quire. `start.sh health` is the container's health check: Redis answers and can write its
# append-only file.
set -eu
password_file=/run/quire/redis-password

if [ "${1:-}" = health ]; then
  REDISCLI_AUTH=$(cat "$password_file")
  export REDISCLI_AUTH
  [ "$(redis-cli ping)" = PONG ]
  redis-cli info persistence | grep -q '^aof_last_write_status:ok'
  exit
fi

umask 077
password=${REDIS_PASSWORD:-}
if [ -z "$password" ] && [ -s "$password_file" ]; then
  password=$(cat "$password_file")
fi
if [ -z "$password" ]; then
  password=$(head -c 32 /dev/urandom | od -An -v -t x1 | tr -d ' \n')
fi
case $password in
  *[!A-Za-z0-9_-]*)
    echo "REDIS_PASSWORD: it becomes part of a URL; give letters, digits, - and _ only, or leave it out" >&2
    exit 1 ;;
esac
if [ ${#password} -lt 16 ]; then
  echo "REDIS_PASSWORD: it has ${#password} characters; give 16 or more, or leave it out to generate one" >&2
  exit 1
fi
printf %s "$password" >"$password_file.new"
mv "$password_file.new" "$password_file"

{
  cat /etc/quire/redis.conf
  printf 'requirepass %s\nmaxmemory %s\n' "$password" "${REDIS_MAXMEMORY:-1gb}"
} >/tmp/redis.conf
# If the end of the append-only file is torn, Redis keeps the beginning of the incomplete transaction, and would drop all
# later writes at the next start. Rewriting the file as soon as it is loaded avoids that.
(
  REDISCLI_AUTH=$password
  export REDISCLI_AUTH
  while kill -0 $$ && ! redis-cli bgrewriteaof | grep '^Background'; do sleep 1; done
) >/dev/null 2>&1 &
exec redis-server /tmp/redis.conf
