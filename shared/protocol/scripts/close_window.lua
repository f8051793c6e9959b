-- Close a window whose lines are counted and deleted. The last window ends the batch.
--   KEYS  batch hash
--   ARGV  prefix, id, fencing token, number of the window
--   ->    'closed' | 'lost'
-- Not repeatable, but harmless: a caller that lost the reply gets 'lost'.
local prefix, id, token, index = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not holds(prefix, id, index, token) then
    return 'lost'
end
redis.call('ZREM', prefix .. 'leases:' .. id, index)
redis.call('HDEL', prefix .. 'open:' .. id, index, index .. ':written', index .. ':progress')
local closed = redis.call('HINCRBY', KEYS[1], 'closed', 1)
local record = redis.call('HMGET', KEYS[1], 'windows', 'status', 'expired_lines')
if closed == tonumber(record[1]) then
    local status = record[2] == 'cancelling' and 'cancelled' or tonumber(record[3]) > 0 and 'expired' or 'completed'
    end_batch(prefix, id, status, now_ms())
end
return 'closed'
