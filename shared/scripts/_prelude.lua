-- Prepended to every script of this folder. Lane keys are built from the lane's prefix: all share one hash tag.

local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- A number of a hash or of an entry: digits alone. nil if it is none.
local function whole(text)
    return text and #text < 16 and string.match(text, '^%d+$') and tonumber(text) or nil
end

-- Like redis.call, but what a corrupt id, a key of another type or a queue that is none makes impossible is not done.
-- Other errors, such as no memory, end the script.
local PASSED_OVER = {ERR = true, WRONGTYPE = true, NOGROUP = true}

local function try(...)
    local reply = redis.pcall(...)
    local failure = type(reply) == 'table' and reply.err
    if failure and not PASSED_OVER[string.match(failure, '^%u+')] then
        return redis.call(...)
    end
    return reply
end

-- Add to the queued load of a class and to the sum over all classes.
local function add_load(prefix, class, requests, tokens)
    local load = prefix .. 'load'
    redis.call('HINCRBY', load, 'requests', requests)
    redis.call('HINCRBY', load, 'tokens', tokens)
    redis.call('HINCRBY', load, 'requests:' .. class, requests)
    redis.call('HINCRBY', load, 'tokens:' .. class, tokens)
end

local function is_class(name)
    for _, class in ipairs(PRIORITY_CLASSES) do
        if class == name then
            return true
        end
    end
    return false
end

-- What a request counts as in the load: its class and cost, and where these are corrupt what its queue knows of them.
local function load_of(prefix, class, cost, queue, entry)
    if not is_class(class) then
        class = is_class(queue) and queue or DEFAULT_CLASS
    end
    local tokens = whole(cost)
    if not tokens and queue and entry then
        local found = redis.pcall('XRANGE', prefix .. 'queue:' .. queue, entry, entry)
        tokens = found[1] and whole(found[1][2][4])
    end
    return class, tokens or 0
end

-- Remove an entry from a queue and from the list of what its workers have pending. One that cannot be has none.
local function take_off_queue(prefix, queue, entry)
    if queue and entry then
        local stream = prefix .. 'queue:' .. queue
        try('XACK', stream, GROUP, entry)
        try('XDEL', stream, entry)
    end
end

-- Of a request, the oldest falls away: far more gateways than there are clients of one request.
local MAX_LISTENERS = 64

-- The gateways at which somebody listens to a request, as its hash has them; where that is corrupt, the last one.
local function listeners(gateways, gateway)
    local is_read, names = pcall(cmsgpack.unpack, gateways or '')
    if not is_read or type(names) ~= 'table' then
        return {gateway or nil}
    end
    local found = {}
    for _, name in ipairs(names) do
        found[#found + 1] = type(name) == 'string' and name or nil
    end
    return found
end

local function without(names, name)
    local rest = {}
    for _, one in ipairs(names) do
        if one ~= name then
            rest[#rest + 1] = one
        end
    end
    return rest
end

-- Leave a worker a notice about a request. Nobody empties the mailbox of a worker that is gone: it expires.
local function notify(prefix, worker, id, notice, retention_s)
    local mailbox = prefix .. 'worker:' .. worker .. ':mailbox'
    redis.call('HSET', mailbox, id, notice)
    redis.call('EXPIRE', mailbox, retention_s)
end

-- Have the queues forget a worker that is gone. False where something is still pending for it: it goes with that.
local function forget_consumer(prefix, worker)
    local is_gone = true
    for _, name in ipairs(QUEUES) do
        local stream = prefix .. 'queue:' .. name
        local pending = try('XPENDING', stream, GROUP, '-', '+', 1, worker)
        if #pending > 0 then
            is_gone = false
        elseif not pending.err then
            redis.call('XGROUP', 'DELCONSUMER', stream, GROUP, worker)
        end
    end
    return is_gone
end

-- End a request: outcome, entry off the queue, counter, expiry. The caller has checked that it is not done yet.
local function finish(prefix, id, outcome, retention_s)
    local req = prefix .. 'req:' .. id
    local queued = redis.call('HMGET', req, 'queue', 'entry')
    take_off_queue(prefix, queued[1], queued[2])
    redis.call('HSET', req, 'state', 'done', 'outcome', outcome, 'finished', now_ms())
    redis.call('HDEL', req, 'body')
    redis.call('EXPIRE', req, retention_s)
    redis.call('EXPIRE', prefix .. 'out:' .. id, retention_s)
    redis.call('HINCRBY', prefix .. 'totals', outcome, 1)
end

-- End a request that no attempt can end: log and publish a terminal item, then finish it.
local function finish_unowned(prefix, id, outcome, detail, retention_s)
    local req = redis.call('HMGET', prefix .. 'req:' .. id, 'emitted', 'gateway')
    local log = prefix .. 'out:' .. id
    local emitted = whole(req[1])
    if not emitted then -- corrupt; the log says it too
        local last = redis.pcall('XREVRANGE', log, '+', '-', 'COUNT', 1)[1]
        emitted = last and whole(string.match(last[1], '^%d+')) or 0
        redis.call('HSET', prefix .. 'req:' .. id, 'emitted', emitted)
    end
    local item = cmsgpack.pack({MESSAGE_VERSION, id, emitted, {}, {outcome, detail}})
    local reply = try('XADD', log, emitted .. '-1', 'item', item)
    if type(reply) == 'table' then
        if string.find(reply.err, '^WRONGTYPE') then
            redis.call('DEL', log)
        end
        redis.call('XADD', log, '*', 'item', item) -- the log is further than the state says: behind all it has
    end
    redis.call('PUBLISH', prefix .. 'gateway:' .. (req[2] or ''), item)
    finish(prefix, id, outcome, retention_s)
end

-- Count something that recovery did, for operators; it decides nothing.
local function count(prefix, what)
    redis.call('HINCRBY', prefix .. 'recoveries', what, 1)
end

-- End a request whose hash is corrupt: no attempt can. What else is in Redis says how far it was and where it waits.
local function finish_corrupt(prefix, id, retention_s)
    local state = redis.call('HMGET', prefix .. 'req:' .. id, 'state', 'class', 'cost', 'queue', 'entry', 'attempt',
        'owner')
    if state[1] == 'queued' or not state[6] then -- an attempt takes it off the load
        local class, cost = load_of(prefix, state[2], state[3], state[4], state[5])
        add_load(prefix, class, -1, -cost)
    elseif state[7] then
        notify(prefix, state[7], id, state[6], retention_s)
    end
    count(prefix, 'corrupt')
    finish_unowned(prefix, id, 'error', 'the request is corrupt in Redis; send it again', retention_s)
end

-- Count that an attempt ended because its worker died or lost its lease. Without a new token since the last time the
-- same may happen for ever: true from the `limit`th time on, and after ten times in all.
local function has_died_too_often(req, emitted, limit)
    local seen = redis.call('HMGET', req, 'deaths', 'died_at')
    local deaths = (emitted > tonumber(seen[2] or -1)) and 1 or tonumber(seen[1] or 0) + 1
    redis.call('HSET', req, 'deaths', deaths, 'died_at', emitted)
    return redis.call('HINCRBY', req, 'all_deaths', 1) >= 10 or deaths >= limit
end
