-- Start an attempt that waited to run alone: from now on a death of its worker counts.
--   KEYS  request hash
--   ARGV  prefix, id, attempt token, retention (s)
--   ->    1 | 0 (the attempt is over)
-- A request that was cancelled, or whose deadline passed while it waited, ends here and does not run. Repeatable.
local prefix, id, attempt, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local req = redis.pcall('HMGET', KEYS[1], 'state', 'attempt', 'cancel', 'deadline')
if req[1] ~= 'running' or req[2] ~= attempt then
    return 0
end
local deadline = whole(req[4])
if req[3] then
    finish_unowned(prefix, id, 'cancelled', '', retention)
    return 0
end
if deadline and deadline > 0 and now_ms() > deadline then
    finish_unowned(prefix, id, 'deadline', 'the deadline passed while the request was waiting', retention)
    return 0
end
redis.call('HDEL', KEYS[1], 'waits')
return 1
