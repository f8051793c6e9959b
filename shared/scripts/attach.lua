-- Have the output of a request published to another gateway from now on.
--   KEYS  request hash
--   ARGV  gateway
--   ->    {} | {state, about}
-- What was published before is in the log. Repeatable.
local req = redis.call('HMGET', KEYS[1], 'state', 'about')
if not req[1] then
    return {}
end
if req[1] ~= 'done' then
    redis.call('HSET', KEYS[1], 'gateway', ARGV[1])
end
return {req[1], req[2] or ''}
