-- End the validation of a batch: its windows can be begun, or it has failed.
--   KEYS  batch hash
--   ARGV  prefix, id, fencing token, errors as JSON ('' = the input is valid), lines, then `<offset> <number>` at which
--         each window begins, and those of the end
--   ->    'begun' | 'failed' | 'lost' (another gateway validates it, or it was cancelled)
-- Not repeatable, but harmless: a caller that lost the reply gets 'lost'.
local prefix, id, token = ARGV[1], ARGV[2], ARGV[3]
if not holds(prefix, id, VALIDATION, token) then
    return 'lost'
end
local now = now_ms()
redis.call('HSET', KEYS[1], 'total', ARGV[5])
if ARGV[4] ~= '' then
    redis.call('HSET', KEYS[1], 'errors', ARGV[4])
    end_batch(prefix, id, 'failed', now)
    return 'failed'
end
redis.call('DEL', prefix .. 'windows:' .. id)
for i = 6, #ARGV do
    redis.call('RPUSH', prefix .. 'windows:' .. id, ARGV[i])
end
redis.call('HSET', KEYS[1], 'status', 'in_progress', 'in_progress_at', math.floor(now / 1000), 'windows', #ARGV - 6)
redis.call('ZREM', prefix .. 'leases:' .. id, VALIDATION)
redis.call('HDEL', prefix .. 'open:' .. id, VALIDATION, VALIDATION .. ':progress')
return 'begun'
