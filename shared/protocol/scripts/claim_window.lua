-- Begin a window of a batch, or its validation, or take over a window whose lease has ended.
--   KEYS  batch hash
--   ARGV  prefix, id, fencing token, lease (ms)
--   ->    {} (no window is free now) | {number of the window (-1: the validation), begin, end, '1' if an earlier gateway
--         has begun it, '1' if its output is written: only its lines are to be deleted, milliseconds until the batch
--         expires}
--         begin, end: `<offset> <number of the line>` of the input, blank lines not counted
-- Not repeatable: a caller that lost the reply has begun a window, which another caller takes over when the lease ends.
local prefix, id, token = ARGV[1], ARGV[2], ARGV[3]
local record = redis.call('HMGET', KEYS[1], 'status', 'expires')
if not record[1] then -- the record was lost
    redis.call('ZREM', prefix .. 'active', id)
    return {}
end
local now = now_ms()
local leases, open = prefix .. 'leases:' .. id, prefix .. 'open:' .. id
local index = redis.call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, 1)[1]
if not index then
    local place = redis.call('HMGET', KEYS[1], 'next', 'windows')
    if tonumber(place[1] or 0) >= tonumber(place[2] or 0) then
        return {}
    end
    index = tostring(redis.call('HINCRBY', KEYS[1], 'next', 1) - 1)
end
local begun = redis.call('HGET', open, index) and '1' or ''
redis.call('ZADD', leases, now + tonumber(ARGV[4]), index)
redis.call('HSET', open, index, token)
local written = redis.call('HGET', open, index .. ':written') and '1' or ''
local windows = prefix .. 'windows:' .. id
return {index, redis.call('LINDEX', windows, index) or '', redis.call('LINDEX', windows, index + 1) or '', begun, written,
    left_ms(record[2], now)}
