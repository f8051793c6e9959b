-- Accept a request: write its hash, its queue entry or its place in a line, its load and perhaps its conversation, or
-- nothing.
--   KEYS  request hash, idempotency key (or the request hash again: none)
--   ARGV  prefix, id, body, gateway, class, cost, max queued requests, max queued tokens, deadline (ms from now, 0 =
--         none), metadata (what a gateway must know to render the answer again), background ('1': runs on without a
--         client), fingerprint of the call ('' = no idempotency key), life of the idempotency key (s), traceparent (''
--         = none), another request whose listeners become listeners of this one ('' = none), retention (s) of
--         the request's keys after its end ('' = the default), conversation for later calls ('' = none), largest
--         number of bytes of all requests that stay ('' = the request is not counted among these; see _stored.lua), and
--         of those of an API key, owner (id of the API key of the call, '' = none), charge (see _limits.lua; '' = none),
--         tenant, weight of the tenant, hash of the user ('' = none), tokens of the prompt, rows
--         (sequences that run at once)
--   ->    {'accepted', now_ms, {state of the limits per minute of each account, see _limits.lua}}
--         | {'limited', limit that is reached, its account, milliseconds until it allows the request (-1: never)}
--         | {'no_room', 'key' or 'all', bytes held, milliseconds until a request of the key may go (-1: none has ended)}
--         | {'duplicate'} | {'same', id of the first call} | {'conflict'}
--         | {'full', queued requests, queued tokens}
-- Repeatable: an id is accepted once, so a caller that lost the reply calls again. The caller's gateway becomes a
-- listener in any case. An idempotency key whose request has expired counts as unused.
local prefix, id, body, gateway, class = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local cost, max_requests, max_tokens, deadline = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8]), tonumber(ARGV[9])
local fingerprint = ARGV[12]
local share = {class = class, tenant = ARGV[22], weight = tonumber(ARGV[23]), user = ARGV[24], prompt = tonumber(ARGV[25])}

if redis.call('EXISTS', KEYS[1]) == 1 then
    -- With several prompts under one idempotency key, the gateway of a second caller may have submitted this one first.
    local req = redis.pcall('HMGET', KEYS[1], 'state', 'gateways', 'gateway')
    local gateways = listeners(req[2], req[3])
    if req[1] and req[1] ~= 'done' and #without(gateways, gateway) == #gateways and #gateways < MAX_LISTENERS then
        table.insert(gateways, 1, gateway)
        redis.call('HSET', KEYS[1], 'gateways', cmsgpack.pack(gateways))
    end
    return {'duplicate'}
end
if fingerprint ~= '' then
    local first = redis.call('HMGET', KEYS[2], 'id', 'fingerprint')
    if first[1] and redis.call('EXISTS', prefix .. 'req:' .. first[1]) == 1 then
        if first[2] ~= fingerprint then
            return {'conflict'}
        end
        return {'same', first[1]}
    end
end
local load = redis.call('HMGET', prefix .. 'load', 'requests', 'tokens')
local requests, tokens = tonumber(load[1] or 0), tonumber(load[2] or 0)
-- One request always fits an empty queue, however large: the engine decides whether it can ever run.
if requests > 0 and (requests + 1 > max_requests or tokens + cost > max_tokens)
    and not is_below_part(prefix, share.tenant, cost, requests, tokens, max_requests, max_tokens) then
    return {'full', requests, tokens}
end
local gateways = {gateway}
if ARGV[15] ~= '' then
    -- The first caller's gateway may not have reached this prompt yet. Make that gateway a listener, so that the request
    -- stays alive if the second caller leaves.
    local other = redis.pcall('HMGET', prefix .. 'req:' .. ARGV[15], 'gateways', 'gateway')
    gateways = without(listeners(other[1], other[2]), gateway)
    gateways[#gateways + 1] = gateway
    if #gateways > MAX_LISTENERS then
        table.remove(gateways, 1)
    end
end
local now = now_ms()
-- A request without much text that is not stored and has a client is bounded by the queue alone.
local bytes = STORED_BYTES + #body + #ARGV[10] + #ARGV[17]
local stays = ARGV[18] ~= '' and (ARGV[16] ~= '' or ARGV[11] ~= '' or #ARGV[10] >= LARGE_BYTES)
if stays then
    local reached, held, wait = make_room(prefix, ARGV[20], bytes, tonumber(ARGV[18]), tonumber(ARGV[19]), now)
    if reached then
        return {'no_room', reached, held, wait}
    end
end
local states = {}
if ARGV[21] ~= '' then
    local reached, account, wait = reserve(prefix, id, ARGV[21], cost, now)
    if reached then
        return {'limited', reached, account, wait}
    end
    states = account
end
redis.call('HINCRBY', prefix .. 'totals', 'accepted', 1)
local arrival = redis.call('HINCRBY', prefix .. 'totals', 'arrivals', 1)
local rows = tonumber(ARGV[26])
local queue, entry = enqueue(prefix, id, cost, rows, arrival, share)
redis.call('HSET', KEYS[1], 'body', body, 'state', 'queued', 'gateway', gateway, 'class', class, 'queue', queue, 'cost', cost,
    'entry', entry, 'arrival', arrival, 'tenant', class .. ' ' .. ARGV[23] .. ' ' .. share.tenant,
    'user', ARGV[25] .. ' ' .. share.user, 'created', now, 'deadline', deadline > 0 and now + deadline or 0, 'emitted', 0, 'deliveries', 0,
    'metadata', ARGV[10], 'background', ARGV[11], 'gateways', cmsgpack.pack(gateways))
if ARGV[20] ~= '' then
    redis.call('HSET', KEYS[1], 'account', ARGV[20])
end
if rows > 1 then
    redis.call('HSET', KEYS[1], 'rows', rows)
end
if ARGV[14] ~= '' then
    redis.call('HSET', KEYS[1], 'traceparent', ARGV[14])
end
if ARGV[16] ~= '' then
    redis.call('HSET', KEYS[1], 'retention', ARGV[16])
end
if ARGV[18] == '' then
    redis.call('HSET', KEYS[1], 'awaited', 1)
end
if stays then
    hold(prefix, id, ARGV[20], bytes, now)
end
if ARGV[17] ~= '' then
    redis.call('SET', prefix .. 'conversation:' .. id, ARGV[17])
end
if fingerprint ~= '' then
    redis.call('HSET', KEYS[2], 'id', id, 'fingerprint', fingerprint)
    redis.call('EXPIRE', KEYS[2], ARGV[13])
end
add_load(prefix, class, 1, cost)
return {'accepted', now, states}
