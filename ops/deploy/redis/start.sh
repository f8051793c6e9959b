#!/bin/sh
# Starts Redis with a password, which is REDIS_PASSWORD, or drawn once: gateways and workers read it from /run/quire.
# `start.sh health` is the container's health check: Redis answers, and its append-only file can be written.
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
  echo "REDIS_PASSWORD: it has ${#password} characters; give 16 or more, or leave it out and one is drawn" >&2
  exit 1
fi
printf %s "$password" >"$password_file.new"
mv "$password_file.new" "$password_file"

{
  cat /etc/quire/redis.conf
  printf 'requirepass %s\nmaxmemory %s\n' "$password" "${REDIS_MAXMEMORY:-1gb}"
} >/tmp/redis.conf
# Where the end of the append-only file was torn Redis keeps the beginning of the transaction that it was in, and would
# drop what is written behind it at the next start. So the file is written anew, as soon as it is loaded.
(
  REDISCLI_AUTH=$password
  export REDISCLI_AUTH
  while kill -0 $$ && ! redis-cli bgrewriteaof | grep '^Background'; do sleep 1; done
) >/dev/null 2>&1 &
exec redis-server /tmp/redis.conf
