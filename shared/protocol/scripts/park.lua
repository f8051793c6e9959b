-- Park a request, waiting or running: no worker computes it until `unpark`, and its tokens stay.
--   KEYS  request hash
--   ARGV  prefix, id, seconds for which it may be parked, largest number of parked requests of the lane (0 = any),
--         attempt token that must be the present token ('' = any), retention (s) of a notice for its worker, largest
--         number of parked requests of an API key, largest number of bytes of all requests that stay, and of those of an
--         API key (0 = any)
--   ->    'parked' (now or before) | 'ending' (it was cancelled or its deadline has passed: nothing was done) | 'full'
--         (there are as many parked requests already) | 'key_full' (of its API key) | 'no_room' | 'lost' (another
--         attempt owns it) | 'done' | 'unknown'
-- Repeatable; a repeated call does not extend the time. The owner of a running request finds its attempt token in its
-- mailbox: that attempt is over, and the fence refuses its further items. The request holds no reservation while it is
-- parked. The deadline stands still. The request needs no listener any more, also not after `unpark`.
local prefix, id = ARGV[1], ARGV[2]
local req = redis.pcall('HMGET', KEYS[1], 'state', 'owner', 'attempt', 'cancel', 'deadline', 'emitted', 'account')
local state, deadline = req[1], whole(req[5])
if not state then
    return 'unknown'
end
if state == 'done' then
    return 'done'
end
if state == 'parked' then
    return 'parked'
end
if ARGV[5] ~= '' and req[3] ~= ARGV[5] then
    return 'lost'
end
if not deadline or not whole(req[6]) or (state ~= 'queued' and not (req[2] and req[3])) then
    finish_corrupt(prefix, id, ARGV[6])
    return 'done'
end
if req[4] or (deadline > 0 and now_ms() > deadline) then
    return 'ending'
end
local most = tonumber(ARGV[4])
if most > 0 and redis.call('ZCARD', prefix .. 'parked') >= most then
    return 'full'
end
local owner, most_of_key = req[7] or '', tonumber(ARGV[7])
if owner ~= '' and most_of_key > 0 and redis.call('SCARD', prefix .. 'parked:' .. owner) >= most_of_key then
    return 'key_full'
end
local more = weight(prefix, id, tonumber(req[6])) - held_of(prefix, id)
if make_room(prefix, owner, more, tonumber(ARGV[8]), tonumber(ARGV[9]), now_ms()) then
    return 'no_room'
end
set_aside(prefix, id, tonumber(ARGV[3]), ARGV[6])
return 'parked'
