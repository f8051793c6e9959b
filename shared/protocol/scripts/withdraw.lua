-- Queue requests for all workers that were left to one worker, which has not claimed them in time.
--   KEYS  any key of the lane (a cluster finds the node by it)
--   ARGV  prefix, ids
--   ->    number of requests that were withdrawn
-- Repeatable. A request that was claimed, has ended or is parked stays as it is.
local prefix = ARGV[1]
local withdrawn = 0
for i = 2, #ARGV do
    local key = prefix .. 'req:' .. ARGV[i]
    local req = redis.pcall('HMGET', key, 'state', 'queue', 'entry', 'affinity', 'tenant', 'user', 'cost', 'arrival', 'rows')
    local what, entry, worker = string.match(req[4] or '', '^(%l+) (%S+) (.+)$')
    local share, cost, arrival = share_of(req[5], req[6]), whole(req[7]), whole(req[8])
    if req[1] == 'queued' and what == 'left' and entry == req[3] and share and cost and arrival then
        take_off_queue(prefix, req[2], entry)
        refund_prompt(prefix, share)
        local queue, moved = enqueue(prefix, ARGV[i], cost, whole(req[9]) or 1, arrival, share)
        redis.call('HSET', key, 'queue', queue, 'entry', moved, 'affinity', 'waited ' .. moved .. ' ' .. worker)
        withdrawn = withdrawn + 1
    end
end
return withdrawn
