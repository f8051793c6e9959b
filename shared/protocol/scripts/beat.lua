-- Take or keep a worker's name, and record a heartbeat. A name belongs to one process at a time; a new process may take
-- it over from a dead process.
--   KEYS  the worker's hash, the set of workers
--   ARGV  worker, incarnation of its process, where that process runs, seconds between beats, card ('' before the first
--         beat), life of the hash (s), incarnation of the dead process that it replaces ('' = none), prefix
--   ->    1 | 0 (another process has the name: nothing was done)
-- Repeatable.
local worker, incarnation, home, every, card, ttl = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

local holder = redis.call('HGET', KEYS[1], 'incarnation')
if holder and holder ~= incarnation then
    if holder ~= ARGV[7] then
        return 0
    end
    redis.call('DEL', KEYS[1])
end
local now = now_ms()
redis.call('HSET', KEYS[1], 'incarnation', incarnation, 'home', home, 'every', every, 'beat', now)
if card ~= '' then
    redis.call('HSET', KEYS[1], 'card', card, 'rows', cmsgpack.unpack(card).max_num_seqs)
    redis.call('EXPIRE', ARGV[8] .. 'prefixes', ttl)
    redis.call('EXPIRE', ARGV[8] .. 'prefixes:before', ttl)
    redis.call('EXPIRE', KEYS[1] .. ':left', FORGET_WORKER_MS / 1000)
    redis.call('ZADD', KEYS[2], now, worker)
    for _, gone in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], 0, now - FORGET_WORKER_MS)) do
        if forget_consumer(ARGV[8], gone) then
            redis.call('ZREM', KEYS[2], gone)
        end
    end
end
redis.call('EXPIRE', KEYS[1], ttl)
return 1
