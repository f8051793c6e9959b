-- An attempt that waited to run alone begins: from now on a death of its worker counts.
--   KEYS  request hash
--   ARGV  attempt token
--   ->    1 | 0 (the attempt is over: nothing was done)
-- Repeatable.
local req = redis.call('HMGET', KEYS[1], 'state', 'attempt')
if req[1] ~= 'running' or req[2] ~= ARGV[1] then
    return 0
end
redis.call('HDEL', KEYS[1], 'waits')
return 1
