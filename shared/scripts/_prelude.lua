-- Prepended to every script of this folder. Lane keys are built from the lane's prefix: all share one hash tag.

local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Add to the queued load of a class and to the sum over all classes.
local function add_load(prefix, class, requests, tokens)
    local load = prefix .. 'load'
    redis.call('HINCRBY', load, 'requests', requests)
    redis.call('HINCRBY', load, 'tokens', tokens)
    redis.call('HINCRBY', load, 'requests:' .. class, requests)
    redis.call('HINCRBY', load, 'tokens:' .. class, tokens)
end

-- Remove an entry from a queue and from the list of what its workers have pending.
local function take_off_queue(prefix, queue, entry)
    local stream = prefix .. 'queue:' .. queue
    redis.call('XACK', stream, 'workers', entry)
    redis.call('XDEL', stream, entry)
end

-- The gateways at which somebody listens to a request, as its hash has them.
local function listeners(gateways, gateway)
    return gateways and cmsgpack.unpack(gateways) or {gateway}
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
    local item = cmsgpack.pack({1, id, tonumber(req[1]), {}, {outcome, detail}})
    local log = prefix .. 'out:' .. id
    if type(redis.pcall('XADD', log, req[1] .. '-1', 'item', item)) == 'table' then
        redis.call('XADD', log, '*', 'item', item) -- the log is further than the state says: behind all it has
    end
    redis.call('PUBLISH', prefix .. 'gateway:' .. req[2], item)
    finish(prefix, id, outcome, retention_s)
end

-- Count something that recovery did, for operators; it decides nothing.
local function count(prefix, what)
    redis.call('HINCRBY', prefix .. 'recoveries', what, 1)
end

-- Count that an attempt ended because its worker died or lost its lease. Without a new token since the last time the
-- same may happen for ever: true from the `limit`th time on, and after ten times in all.
local function has_died_too_often(req, emitted, limit)
    local seen = redis.call('HMGET', req, 'deaths', 'died_at')
    local deaths = (emitted > tonumber(seen[2] or -1)) and 1 or tonumber(seen[1] or 0) + 1
    redis.call('HSET', req, 'deaths', deaths, 'died_at', emitted)
    return redis.call('HINCRBY', req, 'all_deaths', 1) >= 10 or deaths >= limit
end
