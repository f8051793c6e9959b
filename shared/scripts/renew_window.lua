-- Renew the lease on a window, and note its progress. A lease of 0 hands the window to the next gateway that looks.
--   KEYS  batch hash
--   ARGV  prefix, id, fencing token, lease (ms), number of the window, completed lines, failed lines
--   ->    status of the batch | 'lost' (another gateway has the window, or the batch has ended)
-- Repeatable.
local prefix, id, token, index = ARGV[1], ARGV[2], ARGV[3], ARGV[5]
if not holds(prefix, id, index, token) then
    return 'lost'
end
local lease = tonumber(ARGV[4])
redis.call('ZADD', prefix .. 'leases:' .. id, lease > 0 and now_ms() + lease or 0, index)
if not redis.call('HGET', prefix .. 'open:' .. id, index .. ':written') then
    redis.call('HSET', prefix .. 'open:' .. id, index .. ':progress', ARGV[6] .. ' ' .. ARGV[7])
end
return redis.call('HGET', KEYS[1], 'status') or 'lost'
