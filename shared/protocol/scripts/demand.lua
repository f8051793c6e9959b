-- Count the open requests and the live workers of lanes. Nothing is written.
--   KEYS  any key of the first lane (a cluster finds the node by it; there each call has one lane)
--   ARGV  worker that does not count, then the prefix of each lane
--   ->    for each lane {requests that are queued or running, other live workers}
-- A request stays in its queue until it ends, so the lengths of the queues count what a dead worker has left, too.
local replies = {}
for i = 2, #ARGV do
    local prefix, open, live = ARGV[i], 0, 0
    for _, name in ipairs(QUEUES) do
        local length = try('XLEN', prefix .. 'queue:' .. name)
        open = open + (type(length) == 'number' and length or 0)
    end
    for _, class in ipairs(PRIORITY_CLASSES) do
        local length = try('XLEN', prefix .. 'queue:' .. WAITING .. class)
        open = open + (type(length) == 'number' and length or 0)
    end
    if open > 0 then
        local workers = try('ZRANGE', prefix .. 'workers', 0, -1)
        for _, worker in ipairs(workers.err and {} or workers) do
            if worker ~= ARGV[1] and redis.call('EXISTS', prefix .. 'worker:' .. worker) == 1 then
                live = live + 1
            end
        end
    end
    replies[#replies + 1] = {open, live}
end
return replies
