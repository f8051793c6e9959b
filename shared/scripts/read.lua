-- Read new requests for a worker, from the first queue first, without blocking. Requests that wait in lines are moved to
-- the queue of their class in the order of the counters (_fair.lua).
--   KEYS  queues
--   ARGV  worker, how many at most, prefix, then the entries of the stream `wake` that the worker has read
--   ->    for each queue {{entry id, {field, value, ...}}, ...}
-- Not repeatable: entries that were read are pending for the worker, which looks there after a call that failed.
local prefix, left = ARGV[3], tonumber(ARGV[2])
local found = {}

local function add_new(entries, queue, count)
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, ARGV[1], 'COUNT', count, 'STREAMS', queue, '>')
    for _, entry in ipairs(reply and reply[1][2] or {}) do
        entries[#entries + 1] = entry
    end
end

for i = 4, #ARGV do
    redis.call('XACK', prefix .. 'wake', GROUP, ARGV[i])
end
for i, queue in ipairs(KEYS) do
    local entries = {}
    if left > 0 then
        add_new(entries, queue, left)
        local class, moved = string.sub(queue, #prefix + #'queue:' + 1), 0
        while is_class(class) and moved < left - #entries and move_next(prefix, class) do
            moved = moved + 1
        end
        if moved > 0 then
            add_new(entries, queue, moved)
        end
    end
    left = left - #entries
    found[i] = entries
end
for _, class in ipairs(PRIORITY_CLASSES) do
    if redis.call('EXISTS', prefix .. 'tenants:' .. class) == 1 then
        wake(prefix)
        break
    end
end
return found
