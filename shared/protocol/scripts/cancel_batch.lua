-- Cancel a batch. If it is being validated it ends at once; else the lines of its open windows are to be cancelled.
--   KEYS  batch hash
--   ARGV  prefix, id, owner
--   ->    {} (there is no such batch of this owner) | {status, begin, end, ...}: begin and end of each open window
-- Repeatable.
local prefix, id, owner = ARGV[1], ARGV[2], ARGV[3]
local record = redis.call('HMGET', KEYS[1], 'owner', 'status')
if not record[1] or record[1] ~= owner then
    return {}
end
local status, now = record[2], now_ms()
if status == 'validating' then
    redis.call('HSET', KEYS[1], 'cancelling_at', math.floor(now / 1000))
    end_batch(prefix, id, 'cancelled', now)
    return {'cancelled'}
end
if status == 'in_progress' then
    status = 'cancelling'
    redis.call('HSET', KEYS[1], 'status', status, 'cancelling_at', math.floor(now / 1000))
end
local reply = {status}
if status == 'cancelling' then
    for _, index in ipairs(redis.call('ZRANGE', prefix .. 'leases:' .. id, 0, -1)) do
        reply[#reply + 1] = redis.call('LINDEX', prefix .. 'windows:' .. id, index) or ''
        reply[#reply + 1] = redis.call('LINDEX', prefix .. 'windows:' .. id, index + 1) or ''
    end
end
return reply
