-- Return running requests to the queue with all their tokens: any worker may resume them at once. A release does not
-- count as a death.
--   KEYS  any key of the lane (a cluster finds the node by it)
--   ARGV  prefix, then for each request: id, attempt token
--   ->    number of requests that were returned
-- Released requests go to a queue that is read first, because their clients wait in the middle of an answer. Repeatable.
local prefix = ARGV[1]
local released = 0
for i = 2, #ARGV, 2 do
    local id = ARGV[i]
    local key = prefix .. 'req:' .. id
    local req = redis.pcall('HMGET', key, 'attempt', 'state', 'queue', 'entry', 'class', 'cost', 'rows', 'owner',
        'emitted', 'history')
    if req[1] == ARGV[i + 1] and req[2] == 'running' then
        local class, cost = load_of(prefix, req[5], req[6], req[3], req[4])
        take_off_queue(prefix, req[3], req[4])
        local entry = redis.call('XADD', prefix .. 'queue:' .. HANDED, '*', fields_of(id, cost, whole(req[7]) or 1))
        redis.call('HSET', key, 'state', 'queued', 'queue', HANDED, 'entry', entry, 'before', req[1],
            'history', noted(req[10], 'released', req[9], req[8]))
        redis.call('HDEL', key, 'attempt', 'owner', 'incarnation')
        add_load(prefix, class, 1, cost)
        released = released + 1
    end
end
return released
