-- Shared functions, prepended to every script of this folder. In front of them, shared/protocol/broker/scripts.py
-- defines the constants that Lua and Python share: MESSAGE_VERSION, GROUP, QUEUES, PRIORITY_CLASSES, ...
-- Scripts build the keys of a request from the lane's prefix; all keys of a lane have the same hash tag.

local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Read a field as a non-negative integer; nil if the text is anything else.
local function whole(text)
    return text and #text < 16 and string.match(text, '^%d+$') and tonumber(text) or nil
end

-- Like redis.call, but errors caused by corrupt data (bad id, wrong type, missing group) are returned instead of
-- raised. Other errors, such as no memory, end the script.
local PASSED_OVER = {ERR = true, WRONGTYPE = true, NOGROUP = true}

local function try(...)
    local reply = redis.pcall(...)
    local failure = type(reply) == 'table' and reply.err
    if failure and not PASSED_OVER[string.match(failure, '^%u+')] then
        return redis.call(...)
    end
    return reply
end

-- Add to the queued load of a class, and to the sum over all classes.
local function add_load(prefix, class, requests, tokens)
    local load = prefix .. 'load'
    tokens = tokens + 0 -- HINCRBY refuses -0
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

-- Return the class and the cost with which a request counts in the load. If these fields are corrupt, its queue and its
-- entry replace them.
local function load_of(prefix, class, cost, queue, entry)
    if not is_class(class) then
        local name = string.match(queue or '', '%l+$')
        class = is_class(name) and name or DEFAULT_CLASS
    end
    local tokens = whole(cost)
    if not tokens and queue and entry then
        local entries = redis.pcall('XRANGE', prefix .. 'queue:' .. queue, entry, entry)
        tokens = entries[1] and whole(entries[1][2][4])
    end
    return class, tokens or 0
end

-- Remove an entry from a queue and from the pending entries of its workers. A corrupt queue name or entry id is
-- ignored.
local function take_off_queue(prefix, queue, entry)
    if queue and entry then
        local stream = prefix .. 'queue:' .. queue
        try('XACK', stream, GROUP, entry)
        try('XDEL', stream, entry)
    end
end

-- Listeners kept per request; the oldest is dropped. Far above any real number of gateways.
local MAX_LISTENERS = 64

-- Return the gateways that listen to a request. If the field `gateways` is corrupt, only the last, `gateway`.
local function listeners(gateways, gateway)
    local is_read, names = pcall(cmsgpack.unpack, gateways or '')
    if not is_read or type(names) ~= 'table' then
        return {gateway or nil}
    end
    local texts = {}
    for _, name in ipairs(names) do
        texts[#texts + 1] = type(name) == 'string' and name or nil
    end
    return texts
end

local function without(names, name)
    local rest = {}
    for _, other in ipairs(names) do
        if other ~= name then
            rest[#rest + 1] = other
        end
    end
    return rest
end

-- Return the tokens that a request has used: those that it emitted, or those that were computed for it, if more.
local function used_tokens(emitted, computed)
    return math.max(whole(emitted) or 0, whole(computed) or 0)
end

-- Put a notice about a request into a worker's mailbox. The mailbox expires, because a worker that is gone never
-- empties it.
local function notify(prefix, worker, id, notice, retention_s)
    local mailbox = prefix .. 'worker:' .. worker .. ':mailbox'
    redis.call('HSET', mailbox, id, notice)
    redis.call('EXPIRE', mailbox, retention_s)
end

-- Delete the consumers of a worker that is gone. Return false if entries are still pending for one of them: that
-- consumer stays until they are taken over.
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
    if is_gone then
        try('XGROUP', 'DELCONSUMER', prefix .. 'wake', GROUP, worker)
        redis.call('DEL', prefix .. 'worker:' .. worker .. ':left')
    end
    return is_gone
end

-- Remove a request from the parked requests: all are in the sorted set `parked`, those of an owner in a set of their own.
local function leave_parked(prefix, id)
    local _, owner = held_of(prefix, id)
    redis.call('ZREM', prefix .. 'parked', id)
    redis.call('SREM', prefix .. 'parked:' .. (owner or ''), id)
end

-- End a request: write the outcome, remove the queue entry, settle its reservation, count it, let the keys expire, and
-- tell canaries its id.
-- The caller has checked that the request is not done yet. retention_s: for requests without a retention of their own.
-- The bound keeps EXPIRE from failing on a corrupt field. The body stays for forks and replays, unless no client can come
-- back for the request, or the body is large and no bound counts its bytes.
local function finish(prefix, id, outcome, retention_s)
    local req = prefix .. 'req:' .. id
    local own = redis.call('HMGET', req, 'queue', 'entry', 'retention', 'emitted', 'state', 'cost', 'tenant', 'user',
        'deliveries', 'held', 'account', 'computed', 'awaited', 'images')
    local used = used_tokens(own[4], own[12])
    end_share(prefix, {own[1], own[2], own[6], own[7], own[8], own[9], used})
    take_off_queue(prefix, own[1], own[2])
    settle(prefix, id, used, outcome)
    retention_s = math.min(whole(own[3]) or tonumber(retention_s), MAX_RETENTION_S)
    redis.call('HSET', req, 'state', 'done', 'outcome', outcome, 'finished', now_ms())
    if own[13] or not own[10] and redis.call('HSTRLEN', req, 'body') >= LARGE_BYTES then
        redis.call('HDEL', req, 'body')
    end
    if own[5] == 'parked' then
        leave_parked(prefix, id)
    end
    if own[10] then
        local now = now_ms()
        local owner = hold(prefix, id, own[11] or '', weight(prefix, id, whole(own[4]) or 0), now)
        note_end(prefix, id, owner, now, 1000 * retention_s)
    end
    if own[14] then
        leave_images(prefix, id, own[14], 1000 * retention_s, now_ms())
    end
    redis.call('EXPIRE', req, retention_s)
    redis.call('EXPIRE', prefix .. 'out:' .. id, retention_s)
    redis.call('EXPIRE', prefix .. 'conversation:' .. id, retention_s)
    redis.call('HINCRBY', prefix .. 'totals', outcome, 1)
    redis.call('PUBLISH', prefix .. 'endings', id)
end

-- End a request that no attempt will end: log and publish a terminal item, then finish the request.
local function finish_unowned(prefix, id, outcome, detail, retention_s)
    local req = redis.call('HMGET', prefix .. 'req:' .. id, 'emitted', 'gateway')
    local log = prefix .. 'out:' .. id
    local emitted = whole(req[1])
    if not emitted then -- corrupt: derive it from the output log
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
        redis.call('XADD', log, '*', 'item', item) -- the log is longer than the state says: append
    end
    redis.call('PUBLISH', prefix .. 'gateway:' .. (req[2] or ''), item)
    finish(prefix, id, outcome, retention_s)
end

-- Return the history of a request with one more event: a line of the time (ms), the event, the tokens so far and the
-- worker. It is for operators (`quire trace`); no script reads it. The oldest events go.
local MAX_HISTORY = 2048

local function noted(history, event, emitted, worker)
    local line = string.format('%.0f %s %s %s\n', now_ms(), event, emitted or 0, worker or '')
    return string.sub((history or '') .. line, -MAX_HISTORY)
end

-- Count an act of recovery. The counters are for operators; no script reads them.
local function count(prefix, what)
    redis.call('HINCRBY', prefix .. 'recoveries', what, 1)
end

-- Park a request, waiting or running, for `park_s` at most. The owner of a running request finds its attempt token in its
-- mailbox, unless `is_told` says that it gets to know otherwise. A request that was cancelled, or whose deadline has
-- passed, ends instead.
local function set_aside(prefix, id, park_s, retention_s, is_told)
    local key = prefix .. 'req:' .. id
    local req = redis.call('HMGET', key, 'state', 'owner', 'attempt', 'queue', 'entry', 'class', 'cost', 'cancel',
        'deadline', 'emitted', 'tenant', 'user', 'deliveries', 'account', 'computed', 'history')
    local now, deadline = now_ms(), tonumber(req[9])
    if req[1] == 'queued' then
        local class, cost = load_of(prefix, req[6], req[7], req[4], req[5])
        add_load(prefix, class, -1, -cost)
    else
        if not is_told then
            notify(prefix, req[2], id, req[3], retention_s)
        end
        redis.call('HSET', key, 'before', req[3])
    end
    if req[8] then
        return finish_unowned(prefix, id, 'cancelled', '', retention_s)
    elseif deadline > 0 and now > deadline then
        return finish_unowned(prefix, id, 'deadline', 'the deadline passed', retention_s)
    end
    leave_share(prefix, {req[4], req[5], req[7], req[11], req[12], req[13]})
    take_off_queue(prefix, req[4], req[5])
    local unpaid = settle(prefix, id, used_tokens(req[10], req[15]), 'parked')
    if unpaid then
        redis.call('HSET', key, 'unpaid', cmsgpack.pack(unpaid))
    end
    redis.call('HSET', key, 'state', 'parked', 'deadline', 0, 'left', deadline > 0 and deadline - now + 1 or 0,
        'background', 1, 'gateways', cmsgpack.pack({}), 'history', noted(req[16], 'parked', req[10], req[2]))
    redis.call('HDEL', key, 'attempt', 'owner', 'incarnation', 'waits', 'queue', 'entry')
    redis.call('ZADD', prefix .. 'parked', now + 1000 * park_s, id)
    local owner = hold(prefix, id, req[14] or '', weight(prefix, id, tonumber(req[10])), now)
    redis.call('SADD', prefix .. 'parked:' .. owner, id)
    count(prefix, 'parked')
end

-- End a parked request whose retention is over. Return false if it is not over.
local function has_lapsed(prefix, id, retention_s)
    if now_ms() <= tonumber(redis.call('ZSCORE', prefix .. 'parked', id) or 0) then
        return false
    end
    finish_unowned(prefix, id, 'deadline', 'the request was parked for longer than its retention', retention_s)
    return true
end

-- End a request whose hash is corrupt, as an error. The output log and the queue tell its progress and its place.
local function finish_corrupt(prefix, id, retention_s)
    local state = redis.call('HMGET', prefix .. 'req:' .. id, 'state', 'class', 'cost', 'queue', 'entry', 'attempt',
        'owner')
    -- A claim removes a running request from the load.
    if state[1] == 'queued' or not (state[6] or state[1] == 'running' or state[1] == 'parked') then
        local class, cost = load_of(prefix, state[2], state[3], state[4], state[5])
        add_load(prefix, class, -1, -cost)
    elseif state[6] and state[7] then
        notify(prefix, state[7], id, state[6], retention_s)
    end
    count(prefix, 'corrupt')
    finish_unowned(prefix, id, 'error', 'the request is corrupt in Redis; send it again', retention_s)
end

-- Count a death: an attempt that ended because its worker died or lost its lease. Return true from the `limit`th death
-- without a new token in between, and from the tenth death of the request, so that retries end.
local function has_died_too_often(req, emitted, limit)
    local seen = redis.call('HMGET', req, 'deaths', 'died_at')
    local deaths = (emitted > tonumber(seen[2] or -1)) and 1 or tonumber(seen[1] or 0) + 1
    redis.call('HSET', req, 'deaths', deaths, 'died_at', emitted)
    return redis.call('HINCRBY', req, 'all_deaths', 1) >= 10 or deaths >= limit
end
