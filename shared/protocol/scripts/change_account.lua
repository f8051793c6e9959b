-- Write accounts if they are as the caller has read them, and log the change.
--   KEYS  hash of all accounts, audit stream
--   ARGV  actor, action, what changed (JSON without secrets), then for each account: field, value that the caller has
--         read ('' = none), new value
--   ->    1 | 0 (another caller changed one of them: nothing was written)
-- Not repeatable: a caller that lost the reply reads the accounts again.
for i = 4, #ARGV, 3 do
    if (redis.call('HGET', KEYS[1], ARGV[i]) or '') ~= ARGV[i + 1] then
        return 0
    end
end
local changed = {}
for i = 4, #ARGV, 3 do
    redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 2])
    changed[#changed + 1] = ARGV[i]
end
redis.call('XADD', KEYS[2], 'MAXLEN', '~', MAX_AUDIT, '*', 'at', now_ms(), 'actor', ARGV[1], 'action', ARGV[2],
    'accounts', table.concat(changed, ' '), 'change', ARGV[3])
return 1
