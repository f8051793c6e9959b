-- Add a batch, whose input file is validated next.
--   KEYS  batch hash, hash of the input file
--   ARGV  prefix, id, owner, most batches of the owner that have not ended, seconds until it expires, then field and
--         value of the rest of the record
--   ->    'added' | 'unknown' (there is no such complete file of this owner) | 'full'
-- Repeatable.
local prefix, id, owner = ARGV[1], ARGV[2], ARGV[3]
if redis.call('EXISTS', KEYS[1]) == 1 then
    return 'added'
end
local file = redis.call('HMGET', KEYS[2], 'owner', 'complete')
if file[1] ~= owner or file[2] ~= '1' then
    return 'unknown'
end
local open = 0
for _, other in ipairs(redis.call('ZRANGE', prefix .. 'active', 0, -1)) do
    if redis.call('HGET', prefix .. 'batch:' .. other, 'owner') == owner then
        open = open + 1
    end
end
if open >= tonumber(ARGV[4]) then
    return 'full'
end
local now = now_ms()
local seconds = math.floor(now / 1000)
redis.call('HSET', KEYS[1], 'owner', owner, 'status', 'validating', 'created', seconds, 'expires',
    seconds + tonumber(ARGV[5]), 'total', 0, 'completed', 0, 'failed', 0, 'expired_lines', 0, 'windows', 0, 'next', 0,
    'closed', 0, 'output_bytes', 0, 'error_bytes', 0, 'prompt_tokens', 0, 'completion_tokens', 0)
for i = 6, #ARGV, 2 do
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
redis.call('HINCRBY', KEYS[2], 'uses', 1)
redis.call('ZADD', prefix .. 'active', now, id)
redis.call('ZADD', prefix .. 'batches:' .. owner, now, id)
-- A lease that has ended: the next gateway that looks begins the validation.
redis.call('ZADD', prefix .. 'leases:' .. id, 0, VALIDATION)
return 'added'
