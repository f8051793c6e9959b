-- Retire a worker that ends: it does not count as live any more, and its name is free.
--   KEYS  the worker's hash, its mailbox, the set of workers
--   ARGV  worker, incarnation of its process, prefix
--   ->    1 | 0 (another process has the name: nothing was done)
-- Repeatable.
local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= ARGV[2] then
    return 0
end
redis.call('DEL', KEYS[1], KEYS[2])
if forget_consumer(ARGV[3], ARGV[1]) then -- if not, a later beat of another worker does
    redis.call('ZREM', KEYS[3], ARGV[1])
end
return 1
