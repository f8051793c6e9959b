-- Claim a delivered request for a new attempt, and return the tokens that earlier attempts emitted.
--   KEYS  request hash, output log
--   ARGV  prefix, id, queue, entry id, worker, incarnation of its process, attempt token (random, one per delivery,
--         never reused), retention (s), deaths with which a request is quarantined; with one less it waits for `begin`;
--         microseconds that the worker takes for a token of a prompt, and for one of an answer (0 = unknown)
--   ->    {'claimed', body, gateway, class, emitted, waited_ms, deaths, attempts so far, {item, ...}, traceparent,
--         token of the previous attempt, '1' if it runs without a client, how it came here and the
--         holder of its prefix, see `placement_of` in _affinity.lua ('', '' = no worker held one)}
--         | {'dropped', reason} (there is nothing left to do, and the entry was removed; see shared/protocol/states.py)
--         | {'lost'} (the entry is pending for another worker by now, or for none: nothing was done)
-- Repeatable with the same attempt token. A request that is unknown, done, cancelled or expired is dropped; and while
-- others wait, one that has not run yet and would end after its deadline.
-- The previous owner finds its attempt token in its mailbox: that attempt is over. If the previous owner was another
-- process, this counts as a death of its worker with this request, unless the request still waited for `begin` there.
local prefix, id, queue, entry, worker, incarnation, attempt, retention, limit = ARGV[1], ARGV[2], ARGV[3], ARGV[4],
    ARGV[5], ARGV[6], ARGV[7], ARGV[8], tonumber(ARGV[9])

local function drop(why)
    take_off_queue(prefix, queue, entry)
    return {'dropped', why}
end

-- If this claim was slow, the reclaim of another worker has taken the entry.
local pending = redis.call('XPENDING', prefix .. 'queue:' .. queue, GROUP, entry, entry, 1)[1]
if not pending or pending[2] ~= worker then
    return {'lost'}
end
local req = redis.pcall('HMGET', KEYS[1], 'state', 'entry', 'cancel', 'deadline', 'class', 'cost', 'owner', 'attempt',
    'body', 'gateway', 'emitted', 'created', 'incarnation', 'queue', 'metadata', 'deliveries', 'deaths', 'died_at',
    'all_deaths', 'waits', 'tenant', 'user', 'prefixes', 'affinity', 'history', 'answer')

-- The hash of a request is lost: settle by its log.
local function drop_unknown()
    local last = redis.pcall('XREVRANGE', KEYS[2], '+', '-', 'COUNT', 1)[1]
    settle(prefix, id, last and whole(string.match(last[1], '^%d+')) or 0, 'error')
    return drop('unknown')
end

if req.err then -- not even a hash
    redis.call('DEL', KEYS[1])
    return drop_unknown()
end
local state, cancel, deadline, emitted = req[1], req[3], whole(req[4]), whole(req[11])
if not state and redis.call('EXISTS', KEYS[1]) == 0 then
    return drop_unknown()
end
if state == 'done' or state == 'parked' then
    return drop(state)
end

local function end_corrupt()
    finish_corrupt(prefix, id, retention)
    return drop('corrupt')
end

local function is_corrupt()
    if state ~= 'queued' and (state ~= 'running' or not req[7] or not req[8] or not req[13]) then
        return true
    end
    for i = 16, 19 do
        if not whole(req[i] or '0') then
            return true
        end
    end
    return not (deadline and emitted and whole(req[6]) and whole(req[12]) and req[9] and req[10] and req[15])
        or not is_class(req[5])
end

if req[2] ~= entry or req[14] ~= queue then
    -- The entry is superseded if the request has another of its own; else the request is corrupt.
    local own = redis.pcall('XRANGE', prefix .. 'queue:' .. (req[14] or ''), req[2] or '', req[2] or '')
    return own[1] and drop(state) or end_corrupt()
end
if is_corrupt() then
    return end_corrupt()
end
local now = now_ms()
if state == 'queued' then
    add_load(prefix, req[5], -1, -tonumber(req[6]))
end
if cancel then
    finish_unowned(prefix, id, 'cancelled', '', retention)
    return {'dropped', 'cancelled'}
end
if deadline > 0 and now > deadline then
    finish_unowned(prefix, id, 'deadline', 'the deadline passed while the request was waiting', retention)
    return {'dropped', 'deadline'}
end
if deadline > 0 and state == 'queued' and emitted == 0 and is_hopeless(prefix, req[26], req[22], deadline - now,
    ARGV[10], ARGV[11]) then
    finish_unowned(prefix, id, 'deadline', 'the request has waited for too long to end before its deadline', retention)
    return {'dropped', 'hopeless'}
end
if req[8] ~= attempt then
    if state == 'running' and req[13] ~= incarnation then
        if req[7] ~= worker then
            notify(prefix, req[7], id, req[8], retention)
        end
        if not req[20] and has_died_too_often(KEYS[1], emitted, limit) then
            redis.call('XADD', prefix .. 'dead', 'MAXLEN', '~', MAX_DEAD, '*', 'id', id, 'class', req[5], 'worker', req[7],
                'emitted', emitted, 'body', req[9], 'metadata', req[15], 'tenant', req[21] or '', 'user', req[22] or '')
            finish_unowned(prefix, id, 'quarantined', 'the worker died each time it ran this request', retention)
            return {'dropped', 'quarantined'}
        end
    end
    if req[8] then
        redis.call('HSET', KEYS[1], 'before', req[8])
    end
    redis.call('HSET', KEYS[1], 'state', 'running', 'attempt', attempt, 'owner', worker, 'incarnation', incarnation,
        'history', noted(req[25], 'claimed', emitted, worker))
    if redis.call('HINCRBY', KEYS[1], 'deliveries', 1) > 1 then
        count(prefix, 'migrations')
    end
end
local items, logged_to = {}, 0
for _, logged in ipairs(redis.pcall('XRANGE', KEYS[2], '-', '+')) do
    items[#items + 1] = logged[2][2]
    logged_to = tonumber(string.match(logged[1], '^%d+'))
end
if logged_to ~= emitted then
    return end_corrupt()
end
local seen = redis.call('HMGET', KEYS[1], 'deaths', 'died_at', 'deliveries', 'traceparent', 'before', 'background')
-- Progress since the last death resets the count.
local deaths = (emitted > tonumber(seen[2] or -1)) and 0 or tonumber(seen[1])
if deaths and deaths >= limit - 1 then
    redis.call('HSET', KEYS[1], 'waits', 1)
else
    redis.call('HDEL', KEYS[1], 'waits')
end
if req[23] then
    hold_prefixes(prefix, req[23], worker, incarnation)
end
return {'claimed', req[9], req[10], req[5], emitted, now - tonumber(req[12]), deaths, tonumber(seen[3]), items,
    seen[4] or '', seen[5] or '', seen[6] or '', placement_of(req[24], worker)}
