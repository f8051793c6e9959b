-- Delete the record of a file, and note that its objects are to be deleted.
--   KEYS  file hash
--   ARGV  prefix, id, owner, '1' to delete the file only if it has expired
--   ->    'deleted' | 'used' (a batch that has not ended reads it: nothing was done) | 'kept' (it has not expired) |
--         'unknown' (there is no such file of this owner)
-- Repeatable.
local prefix, id, owner = ARGV[1], ARGV[2], ARGV[3]
local record = redis.call('HMGET', KEYS[1], 'owner', 'bytes', 'uses', 'expires')
if not record[1] or record[1] ~= owner then
    return 'unknown'
end
local expires = tonumber(record[4] or 0)
if ARGV[4] == '1' and (expires == 0 or expires > now_ms() / 1000) then
    return 'kept'
end
if tonumber(record[3] or 0) > 0 then
    return 'used'
end
-- Not `-bytes`: Redis takes a negative zero for no integer.
add_used(prefix, owner, 0 - tonumber(record[2] or 0))
redis.call('DEL', KEYS[1], prefix .. 'parts:' .. id)
redis.call('ZREM', prefix .. 'files:' .. owner, id)
redis.call('ZREM', prefix .. 'expiring', id)
redis.call('SADD', prefix .. 'doomed', id)
return 'deleted'
