-- Stop a request: at once while it waits; while it runs its worker is told with its next commit.
--   KEYS  request hash
--   ARGV  prefix, id, retention (s)
--   ->    'cancelled' (it waited and is now done) | 'flagged' (it runs) | 'done' | 'unknown'
-- Repeatable.
local prefix, id, retention = ARGV[1], ARGV[2], ARGV[3]
local req = redis.call('HMGET', KEYS[1], 'state', 'owner', 'class', 'cost')
local state = req[1]
if not state then
    return 'unknown'
end
if state == 'queued' then
    add_load(prefix, req[3], -1, -tonumber(req[4]))
    finish_unowned(prefix, id, 'cancelled', '', retention)
    return 'cancelled'
end
if state == 'running' then
    redis.call('HSET', KEYS[1], 'cancel', 1)
    notify(prefix, req[2], id, 'cancel', retention)
    return 'flagged'
end
return state
