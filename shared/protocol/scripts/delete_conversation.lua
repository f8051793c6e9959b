-- Delete a conversation. A response that continues it runs on, and its items are added to nothing.
--   KEYS  hash of the conversation
--   ARGV  prefix, id
--   ->    1 if there was one, else 0
-- Repeatable.
local prefix, id = ARGV[1], 'conv:' .. ARGV[2]
leave_images(prefix, id, redis.call('HGET', KEYS[1], 'images') or nil, 0, now_ms())
let_go(prefix, id)
redis.call('SREM', prefix .. 'answering', ARGV[2])
return redis.call('DEL', KEYS[1])
