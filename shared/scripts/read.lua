-- Read new requests for a worker, from the first queue first, without blocking.
--   KEYS  queues
--   ARGV  worker, how many at most
--   ->    for each queue {{entry id, {field, value, ...}}, ...}
-- Not repeatable: entries that were read are pending for the worker, which looks there after a call that failed.
local left = tonumber(ARGV[2])
local found = {}
for i, queue in ipairs(KEYS) do
    local entries = {}
    if left > 0 then
        local reply = redis.call('XREADGROUP', 'GROUP', GROUP, ARGV[1], 'COUNT', left, 'STREAMS', queue, '>')
        entries = reply and reply[1][2] or {}
    end
    left = left - #entries
    found[i] = entries
end
return found
