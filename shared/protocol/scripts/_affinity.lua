-- Prefix affinity: a request is left to the worker that holds the longest prefix of its prompt (docs/prefix-affinity.md).
--
-- A request may carry prefixes: hashes of beginnings of its conversation, the most specific first. The claim of a request
-- notes its prefixes as held by the claiming process. A later request with one of them is delivered to that worker at
-- once, as if the worker had read it, if the worker lives and is not busy. If the worker has not claimed it after a
-- while, `withdraw` queues it for all workers.
--
-- A fork has the prefixes of the request that it forks, its origin. The owner of the origin holds more than any of them.
--
-- `prefixes`, `prefixes:before`: hashes of the holder of each prefix, '<beginning of its incarnation> <worker>'. A full
-- hash takes the place of the one before, so both are bounded. They expire with the heartbeats of the lane's workers.
-- `worker:<id>:left`: stream of the requests that are left to a worker. The worker removes an entry with the read after
-- the one that returned it.
-- The field `affinity` of a request is 'left <entry> <worker>', 'waited <entry> <worker>' after it was withdrawn, or
-- 'busy <entry> <worker>'. It counts as long as the request has that entry.

-- Prefixes whose holders are known, in each of the two hashes; about 150 bytes each.
local MAX_PREFIXES = 8192
-- Characters of its incarnation in the name of a holder: a process that has its predecessor's name holds nothing.
local INCARNATION_CHARACTERS = 8
-- Requests that are left to a worker and that it has not read, at most.
local MAX_LEFT = 16
-- A worker is busy for the requests of a class from this part of the mean, rounded up, but not below this number.
local PART, LEAST = 1.25, 2

local function held_prefixes(prefix)
    return prefix .. 'prefixes', prefix .. 'prefixes:before'
end

-- Note that a worker holds prefixes, or will have computed them soon. packed: msgpack array of prefixes.
local function hold_prefixes(prefix, packed, worker, incarnation)
    local is_read, prefixes = pcall(cmsgpack.unpack, packed)
    if not is_read or type(prefixes) ~= 'table' then
        return
    end
    local current, before = held_prefixes(prefix)
    local holder = string.sub(incarnation, 1, INCARNATION_CHARACTERS) .. ' ' .. worker
    for _, key in ipairs(prefixes) do
        redis.call('HSET', current, key, holder)
    end
    local size = redis.call('HLEN', current)
    if size > MAX_PREFIXES then
        redis.call('UNLINK', before)
        redis.call('RENAME', current, before)
    elseif size <= #prefixes then -- later on heartbeats keep it
        redis.call('EXPIRE', current, WORKER_TTL_S)
    end
end

-- Return a worker and its rows; nil unless the process with this beginning of its incarnation lives.
local function live_worker(prefix, worker, process)
    local live = worker and redis.call('HMGET', prefix .. 'worker:' .. worker, 'incarnation', 'rows')
    if live and live[1] and string.sub(live[1], 1, INCARNATION_CHARACTERS) == process and tonumber(live[2]) then
        return worker, tonumber(live[2])
    end
end

-- Return the live worker with the longest known prefix, and its rows; nil without one.
local function holder_of(prefix, prefixes)
    local current, before = held_prefixes(prefix)
    local now, earlier = redis.call('HMGET', current, unpack(prefixes)), redis.call('HMGET', before, unpack(prefixes))
    for i = 1, #prefixes do
        local process, name = string.match(now[i] or earlier[i] or '', '^(%S*) (.+)$')
        local worker, rows = live_worker(prefix, name, process)
        if worker then
            return worker, rows
        end
    end
end

-- Give a fork the prefixes of its origin. Return the owner of the origin and its rows; nil if it is gone.
local function follow_origin(prefix, terms)
    local origin = redis.pcall('HMGET', prefix .. 'req:' .. terms.origin, 'owner', 'incarnation', 'prefixes')
    local is_read, prefixes = pcall(cmsgpack.unpack, origin[3] or '')
    if is_read and type(prefixes) == 'table' and #prefixes > 0 then
        terms.prefixes = prefixes
    end
    return live_worker(prefix, origin[1], string.sub(origin[2] or '', 1, INCARNATION_CHARACTERS))
end

-- Return true if a worker does not take what is left to it, or has more than its part of the requests of a class.
-- rows: of the worker. queue: stream of the class.
local function is_busy(prefix, queue, worker, rows, left_ms, now)
    local left = prefix .. 'worker:' .. worker .. ':left'
    local oldest = redis.call('XRANGE', left, '-', '+', 'COUNT', 1)[1]
    if oldest and (now - tonumber(string.match(oldest[1], '^%d+')) > left_ms or redis.call('XLEN', left) >= MAX_LEFT) then
        return true
    end
    local live = math.max(1, redis.call('ZCOUNT', prefix .. 'workers', now - 1000 * WORKER_TTL_S, '+inf'))
    local part = math.ceil(PART * redis.call('XLEN', queue) / live)
    local most = math.min(rows, math.max(LEAST, part))
    for _, consumer in ipairs(redis.call('XPENDING', queue, GROUP)[4] or {}) do
        if consumer[1] == worker then
            return tonumber(consumer[2]) >= most
        end
    end
    return false
end

-- Leave a request that was just queued to the holder of its prefixes. Return the field `affinity`; nil without a holder.
local function leave_to_holder(prefix, terms, id, queue, entry)
    local worker, rows
    if terms.origin then
        worker, rows = follow_origin(prefix, terms)
    end
    if not worker then
        worker, rows = holder_of(prefix, terms.prefixes)
    end
    if not worker then
        return nil
    end
    local stream, now = prefix .. 'queue:' .. queue, now_ms()
    -- A request that waits in a line keeps its place there.
    if queue ~= terms.class or is_busy(prefix, stream, worker, rows, terms.left_ms, now) then
        return 'busy ' .. entry .. ' ' .. worker
    end
    -- The request is the only unread one of its class.
    redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', stream, '>')
    redis.call('XADD', prefix .. 'worker:' .. worker .. ':left', '*', 'id', id, 'cost', terms.cost, 'queue', queue,
        'entry', entry)
    return 'left ' .. entry .. ' ' .. worker
end

-- Acknowledge what was left to a worker, and is read. entries: of its stream.
local function forget_left(prefix, worker, entries)
    local left = prefix .. 'worker:' .. worker .. ':left'
    for _, entry in ipairs(entries) do
        redis.call('XACK', left, GROUP, entry)
        redis.call('XDEL', left, entry)
    end
end

-- Return how a request came to the worker that claims it, 'holder', 'waited' or 'busy', and the holder of its prefix.
local function placement_of(affinity, worker)
    local what, holder = string.match(affinity or '', '^(%l+) %S+ (.+)$')
    if what == 'left' then
        what = holder == worker and 'holder' or 'waited'
    end
    return what or '', holder or ''
end
