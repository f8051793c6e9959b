-- Write the record of a file, with the bytes that it takes or may take at most.
--   KEYS  file hash
--   ARGV  prefix, id, owner, bytes, most bytes of all files of the owner (0 = no bound), most bytes of all files, '1'
--         if the content is complete ('' = an upload that reserves its bytes), seconds until it is deleted (0 = never),
--         bytes that an upload says it needs, '1' if the upload has begun, then field and value of the rest of the
--         record
--   ->    {'written'} | {'full', 'owner' or 'all', bytes that the files take} | {'lost'} (the upload was given up)
-- Repeatable: bytes are set, not added. A bound is checked only if the bytes grow.
local prefix, id, owner, bytes = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
local before = tonumber(redis.call('HGET', KEYS[1], 'bytes') or 0)
if ARGV[10] == '1' and redis.call('EXISTS', KEYS[1]) == 0 then
    return {'lost'}
end
if ARGV[7] ~= '1' and redis.call('HGET', KEYS[1], 'complete') == '1' then
    return {'written'} -- a late renewal: the upload is complete
end
local needed = math.max(bytes, tonumber(ARGV[9]))
if needed > before then
    local used = redis.call('HMGET', prefix .. 'used', 'owner:' .. owner, 'all')
    for i, whose in ipairs({'owner', 'all'}) do
        local taken, most = tonumber(used[i] or 0), tonumber(ARGV[4 + i])
        if most > 0 and taken + needed - before > most then
            return {'full', whose, taken}
        end
    end
end
add_used(prefix, owner, bytes - before)
local now, life = now_ms(), tonumber(ARGV[8])
local expires = life > 0 and math.floor(now / 1000) + life or 0
redis.call('HSET', KEYS[1], 'owner', owner, 'bytes', bytes, 'expires', expires, 'complete', ARGV[7])
redis.call('HSETNX', KEYS[1], 'created', math.floor(now / 1000))
for i = 11, #ARGV, 2 do
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
end
if ARGV[7] == '1' then
    redis.call('ZADD', prefix .. 'files:' .. owner, 'NX', now, id)
    redis.call('HSET', prefix .. 'parts:' .. id, '0', '0 ' .. bytes)
end
if expires == 0 then
    redis.call('ZREM', prefix .. 'expiring', id)
else
    redis.call('ZADD', prefix .. 'expiring', expires, id)
end
return {'written'}
