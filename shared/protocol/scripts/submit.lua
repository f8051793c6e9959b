-- Accept a request: write its hash, its queue entry or its place in a line, its load and perhaps its conversation, or
-- nothing.
--   KEYS  request hash, idempotency key (or the request hash again: none)
--   ARGV  prefix, id, body, terms (msgpack map, see Admission.encode in shared/protocol/admission.py; what is empty is
--         left out. Without max_stored the request is not counted among those that stay, see _stored.lua; without
--         charge it is charged to nobody, see _limits.lua), the files of terms.images in their order (see _images.lua;
--         empty if Redis has the file)
--   ->    {'accepted', now_ms, {state of the limits per minute of each account, see _limits.lua}, 1 if the request is
--         left to one worker (see _affinity.lua; 0 = any worker may take it)}
--         | {'limited', limit that is reached, its account, milliseconds until it allows the request (-1: never)}
--         | {'no_room', 'key' or 'all', bytes held, milliseconds until a request of the key may go (-1: none has ended)}
--         | {'no_files'} (Redis has lost a file that was not sent) | {'duplicate'} | {'same', id of the first call} | {'conflict'}
--         | {'locked'} (terms.joins = {id of a conversation, its version for the caller}: a response continues that
--           conversation, or its items have changed)
--         | {'full', queued requests, queued tokens}
--         | {'late', requests before it, milliseconds until it would begin, milliseconds that it would run}
-- Repeatable: an id is accepted once, so a caller that lost the reply calls again. The caller's gateway becomes a
-- listener in any case. An idempotency key whose request has expired counts as unused.
local prefix, id, body, terms = ARGV[1], ARGV[2], ARGV[3], cmsgpack.unpack(ARGV[4])
local gateway, class, cost, fingerprint = terms.gateway, terms.class, terms.cost, terms.fingerprint
local owner = terms.owner or ''

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
if fingerprint then
    local first = redis.call('HMGET', KEYS[2], 'id', 'fingerprint')
    if first[1] and redis.call('EXISTS', prefix .. 'req:' .. first[1]) == 1 then
        if first[2] ~= fingerprint then
            return {'conflict'}
        end
        return {'same', first[1]}
    end
end
local joined = terms.joins and prefix .. 'conv:' .. terms.joins[1]
if joined and redis.call('HGET', joined, 'version') ~= terms.joins[2] then
    return {'locked'}
end
local load = redis.call('HMGET', prefix .. 'load', 'requests', 'tokens')
local requests, tokens = tonumber(load[1] or 0), tonumber(load[2] or 0)
-- One request always fits an empty queue, however large: the engine decides whether it can ever run.
if requests > 0 and (requests + 1 > terms.max_requests or tokens + cost > terms.max_tokens)
    and not is_below_part(prefix, terms.tenant, cost, requests, tokens, terms.max_requests, terms.max_tokens) then
    return {'full', requests, tokens}
end
local late = terms.pace and too_late(prefix, terms)
if late then
    return late
end
local gateways = {gateway}
if terms.beside then
    -- The first caller's gateway may not have reached this prompt yet. Make that gateway a listener, so that the request
    -- stays alive if the second caller leaves.
    local other = redis.pcall('HMGET', prefix .. 'req:' .. terms.beside, 'gateways', 'gateway')
    gateways = without(listeners(other[1], other[2]), gateway)
    gateways[#gateways + 1] = gateway
    if #gateways > MAX_LISTENERS then
        table.remove(gateways, 1)
    end
end
local now = now_ms()
-- A request without much text that is not stored and has a client is bounded by the queue alone.
local bytes = STORED_BYTES + #body + #terms.metadata + #(terms.conversation or '')
local images, files = terms.images or {}, {unpack(ARGV, 5)}
local stays = terms.max_stored and (terms.retention_s or terms.is_background or #terms.metadata >= LARGE_BYTES
    or #images > 0)
if stays then
    local more = missing_bytes(prefix, images, files)
    local reached, held, wait = make_room(prefix, owner, bytes + more, terms.max_stored, terms.max_key_stored, now)
    if reached then
        return {'no_room', reached, held, wait}
    end
end
-- A request that made room may have taken an image with it.
if not has_images(prefix, images, files) then
    return {'no_files'}
end
local states = {}
if terms.charge then
    local reached, account, wait = reserve(prefix, id, terms.charge, cost, now)
    if reached then
        return {'limited', reached, account, wait}
    end
    states = account
end
redis.call('HINCRBY', prefix .. 'totals', 'accepted', 1)
local arrival = redis.call('HINCRBY', prefix .. 'totals', 'arrivals', 1)
local queue, entry = enqueue(prefix, id, cost, terms.rows, arrival, terms)
local affinity = terms.prefixes and leave_to_holder(prefix, terms, id, queue, entry)
redis.call('HSET', KEYS[1], 'body', body, 'state', 'queued', 'gateway', gateway, 'class', class, 'queue', queue, 'cost', cost,
    'entry', entry, 'arrival', arrival, 'tenant', class .. ' ' .. terms.weight .. ' ' .. terms.tenant,
    'user', terms.prompt .. ' ' .. terms.user, 'created', now, 'deadline', terms.deadline_ms and now + terms.deadline_ms or 0,
    'emitted', 0, 'deliveries', 0, 'metadata', terms.metadata, 'background', terms.is_background and '1' or '',
    'gateways', cmsgpack.pack(gateways))
for field, value in pairs({account = terms.owner, rows = terms.rows > 1 and terms.rows or nil,
    traceparent = terms.traceparent, pins = terms.pins and 1 or nil, retention = terms.retention_s, answer = terms.answer,
    awaited = not terms.max_stored and 1 or nil,
    prefixes = terms.prefixes and cmsgpack.pack(terms.prefixes), affinity = affinity or nil}) do
    redis.call('HSET', KEYS[1], field, value)
end
if stays then
    hold(prefix, id, owner, bytes, now)
end
if #images > 0 then
    use_images(prefix, id, owner, images, files, now)
end
if terms.conversation then
    redis.call('SET', prefix .. 'conversation:' .. id, terms.conversation)
end
if joined then
    -- `write_conversation` adds the items of this response once it has ended.
    redis.call('HSET', joined, 'version', id, 'open', id)
    redis.call('PERSIST', joined)
    redis.call('SADD', prefix .. 'answering', terms.joins[1])
end
if fingerprint then
    redis.call('HSET', KEYS[2], 'id', id, 'fingerprint', fingerprint)
    redis.call('EXPIRE', KEYS[2], IDEMPOTENCY_S)
end
add_load(prefix, class, 1, cost)
return {'accepted', now, states, affinity and string.match(affinity, '^left ') and 1 or 0}
