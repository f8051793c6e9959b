-- Renew the lease on a window, and note its progress. A lease of 0 hands the window to the next gateway that looks.
--   KEYS  batch hash
--   ARGV  prefix, id, fencing token, lease (ms), number of the window, completed lines, failed lines
--   ->    {status of the batch, milliseconds until it expires} | {'lost'} (another gateway has the window, or the batch
--         has ended)
-- Repeatable.
local prefix, id, token, index = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
if not holds(prefix, id, index, token) then
    return {'lost'}
end
local lease, now = tonumber(ARGV[4]), now_ms()
redis.call('ZADD', prefix .. 'leases:' .. id, lease > 0 and now + lease or 0, index)
if not redis.call('HGET', prefix .. 'open:' .. id, index .. ':written') then
    redis.call('HSET', prefix .. 'open:' .. id, index .. ':progress', ARGV[6] .. ' ' .. ARGV[7])
end
local record = redis.call('HMGET', KEYS[1], 'status', 'expires')
return record[1] and {record[1], left_ms(record[2], now)} or {'lost'}
