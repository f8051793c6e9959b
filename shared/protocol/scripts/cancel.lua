-- Cancel a request. A waiting or parked request ends at once; the worker of a running request is told with its next commit.
--   KEYS  request hash
--   ARGV  prefix, id, retention (s), '1' to keep it if another gateway listens or if it is parked ('' = cancel in any
--         case), gateways that do not count as listeners
--   ->    'cancelled' (it waited or was parked, and is now done) | 'flagged' (it runs) | 'wanted' (another gateway
--         listens, or it is parked: nothing was done) | 'done' | 'unknown'
-- Repeatable.
local prefix, id, retention = ARGV[1], ARGV[2], ARGV[3]
local req = redis.pcall('HMGET', KEYS[1], 'state', 'owner', 'class', 'cost', 'gateways', 'gateway', 'queue', 'entry')
local state = req[1]
if not state then
    return 'unknown'
end
if state == 'done' then
    return 'done'
end
if ARGV[4] == '1' then
    local others = listeners(req[5], req[6])
    for i = 5, #ARGV do
        others = without(others, ARGV[i])
    end
    if #others > 0 or state == 'parked' then
        return 'wanted'
    end
end
if state == 'queued' or state == 'parked' then
    if state == 'queued' then
        local class, cost = load_of(prefix, req[3], req[4], req[7], req[8])
        add_load(prefix, class, -1, -cost)
    end
    finish_unowned(prefix, id, 'cancelled', '', retention)
    return 'cancelled'
end
redis.call('HSET', KEYS[1], 'cancel', 1)
if req[2] then
    notify(prefix, req[2], id, 'cancel', retention)
end
return 'flagged'
