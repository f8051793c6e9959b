-- Take a delivered request for one attempt, with the tokens that earlier attempts emitted.
--   KEYS  request hash, queue stream, output log
--   ARGV  prefix, id, entry id, worker, attempt token (random, one per delivery, never reused), retention (s)
--   ->    {'claimed', body, gateway, emitted, waited_ms, {item, ...}} | {'dropped', why}
-- Repeatable with the same attempt token. What is unknown, done, cancelled or expired is dropped and its entry removed.
-- An owner before this one finds its attempt token in its mailbox: that attempt is over.
local prefix, id, entry, worker, attempt, retention = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local function drop(why)
    redis.call('XACK', KEYS[2], 'workers', entry)
    redis.call('XDEL', KEYS[2], entry)
    return {'dropped', why}
end

local req = redis.call('HMGET', KEYS[1],
    'state', 'entry', 'cancel', 'deadline', 'class', 'cost', 'owner', 'attempt', 'body', 'gateway', 'emitted', 'created')
local state, cancel, deadline = req[1], req[3], tonumber(req[4] or 0)
if not state then
    return drop('unknown')
end
if state == 'done' or req[2] ~= entry then
    return drop(state)
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
if req[8] ~= attempt then
    if state == 'running' and req[7] and req[7] ~= worker then
        redis.call('HSET', prefix .. 'worker:' .. req[7] .. ':mailbox', id, req[8])
    end
    redis.call('HSET', KEYS[1], 'state', 'running', 'attempt', attempt, 'owner', worker)
    redis.call('HINCRBY', KEYS[1], 'deliveries', 1)
end
local items = {}
for _, logged in ipairs(redis.call('XRANGE', KEYS[3], '-', '+')) do
    items[#items + 1] = logged[2][2]
end
return {'claimed', req[9], req[10], tonumber(req[11]), now - tonumber(req[12]), items}
