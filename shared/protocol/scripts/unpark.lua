-- Queue a parked request again with its tokens, at the end of the line of its user.
--   KEYS  request hash
--   ARGV  prefix, id, max queued requests, max queued tokens, accounts with their present limits (msgpack array, as in a
--         charge; see _limits.lua; '' = reserve in any case), retention (s) of requests without their own
--   ->    {'queued'} | {'active'} (it is not parked: it waits or runs) | {'limited', limit that is reached, its account,
--         milliseconds until it allows the request (-1: never)} | {'full', queued requests, queued tokens} | {'done'}
--         | {'unknown'}
-- Repeatable. The rest of its deadline counts from now on. After its end its keys stay for the rest of the time for
-- which it might have been parked, like those of a stored request.
local prefix, id, retention = ARGV[1], ARGV[2], ARGV[6]
local req = redis.pcall('HMGET', KEYS[1], 'state', 'class', 'cost', 'emitted', 'left', 'unpaid', 'retention', 'tenant',
    'user', 'rows', 'computed', 'history')
local state, class, cost, emitted, left = req[1], req[2], whole(req[3]), whole(req[4]), whole(req[5])
local share = share_of(req[8], req[9])
if not state then
    return {'unknown'}
end
if state == 'done' then
    return {'done'}
end
if state ~= 'parked' then
    return {'active'}
end
if not (is_class(class) and cost and emitted and left and share) then
    finish_corrupt(prefix, id, retention)
    return {'done'}
end
if has_lapsed(prefix, id, retention) then
    return {'done'}
end
local load = redis.call('HMGET', prefix .. 'load', 'requests', 'tokens')
local requests, tokens = tonumber(load[1] or 0), tonumber(load[2] or 0)
local max_requests, max_tokens = tonumber(ARGV[3]), tonumber(ARGV[4])
if requests > 0 and (requests + 1 > max_requests or tokens + cost > max_tokens)
    and not is_below_part(prefix, share.tenant, cost, requests, tokens, max_requests, max_tokens) then
    return {'full', requests, tokens}
end
local now = now_ms()
if req[6] then
    local unpaid = cmsgpack.unpack(req[6])
    local prompt = unpaid[2]
    local accounts = ARGV[5] ~= '' and cmsgpack.unpack(ARGV[5]) or {unpack(unpaid, 8)}
    local charge = {unpaid[1], 0, prompt, unpaid[3], unpaid[4], unpaid[5], unpaid[7], unpack(accounts)}
    local reached, account, wait = reserve(prefix, id, charge, unpaid[6], now, used_tokens(req[4], req[11]), ARGV[5] == '')
    if reached then
        return {'limited', reached, account, wait}
    end
end
local due = tonumber(redis.call('ZSCORE', prefix .. 'parked', id))
leave_parked(prefix, id)
local arrival = redis.call('HINCRBY', prefix .. 'totals', 'arrivals', 1)
local queue, entry = enqueue(prefix, id, cost, whole(req[10]) or 1, arrival, share)
redis.call('HSET', KEYS[1], 'state', 'queued', 'queue', queue, 'entry', entry, 'arrival', arrival,
    'deadline', left > 0 and now + left or 0, 'history', noted(req[12], 'unparked', emitted))
redis.call('HDEL', KEYS[1], 'left', 'unpaid')
add_load(prefix, class, 1, cost)
if not req[7] then
    redis.call('HSET', KEYS[1], 'retention', math.max(1, math.ceil((due - now) / 1000)))
end
count(prefix, 'unparked')
return {'queued'}
