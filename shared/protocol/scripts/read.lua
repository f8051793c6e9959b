-- Read new requests for a worker, from the first queue first, without blocking. Requests that wait in lines are moved to
-- the queue of their class in the order of the counters (_fair.lua).
--   KEYS  queues
--   ARGV  worker, rows of the requests at most, prefix, rows of the first request at most, number of the entries of the
--         stream `wake` that the worker has read, these entries, and the entries of its stream `left` that it has read
--   ->    for each queue {{entry id, {field, value, ...}}, ...}, then the id of the next request if it has more rows
--         than are left ('' = no request waits, or no row is left): no request after it was read
-- A request that was handed back is read whatever its rows, as long as a row is left.
-- Not repeatable: entries that were read are pending for the worker, which looks there after a call that failed.
local prefix, left, widest = ARGV[3], tonumber(ARGV[2]), tonumber(ARGV[4])
local replies, is_first, too_wide = {}, true, ''

-- Read at most `count` entries of a queue. Return their number, and the rows of the last entry.
local function add_new(entries, queue, count)
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, ARGV[1], 'COUNT', count, 'STREAMS', queue, '>')
    local new = reply and reply[1][2] or {}
    for _, entry in ipairs(new) do
        entries[#entries + 1] = entry
    end
    return #new, #new > 0 and rows_of(new[#new][2]) or 0
end

-- Read a queue of requests that were handed back, one by one: any of them may have several rows.
local function read_handed(entries, queue)
    while left > 0 do
        local count, rows = add_new(entries, queue, 1)
        if count == 0 then
            return
        end
        is_first, left = false, left - rows
    end
end

-- Read the queue of a class. Its unread requests have one row each; others wait in lines.
local function read_class(entries, queue, class)
    local count, moved = add_new(entries, queue, left), 0
    is_first, left = is_first and count == 0, left - count
    while left > 0 do
        local rows, id = move_next(prefix, class, is_first and widest or left)
        too_wide = id or ''
        if rows == 0 then
            break
        end
        is_first, left, moved = false, left - rows, moved + 1
    end
    if moved > 0 then
        add_new(entries, queue, moved)
    end
end

local last_wake = 5 + ARGV[5]
for i = 6, last_wake do
    redis.call('XACK', prefix .. 'wake', GROUP, ARGV[i])
end
forget_left(prefix, ARGV[1], {unpack(ARGV, last_wake + 1)})
for i, queue in ipairs(KEYS) do
    local entries, class = {}, string.sub(queue, #prefix + #'queue:' + 1)
    if left > 0 and too_wide == '' then
        if is_class(class) then
            read_class(entries, queue, class)
        else
            read_handed(entries, queue)
        end
    end
    replies[i] = entries
end
for _, class in ipairs(PRIORITY_CLASSES) do
    if redis.call('EXISTS', prefix .. 'tenants:' .. class) == 1 then
        wake(prefix)
        break
    end
end
replies[#replies + 1] = too_wide
return replies
