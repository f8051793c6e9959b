-- Delete what a client may read of a request: the metadata, the output log and the conversation.
--   KEYS  request hash
--   ARGV  prefix, id
--   ->    'deleted' | 'hidden' (it has not ended: no gateway finds it any more, and its keys expire soon after its
--         end) | 'unknown'
-- Does not cancel the request. Repeatable.
local prefix, id = ARGV[1], ARGV[2]
local state = redis.pcall('HGET', KEYS[1], 'state')
if type(state) ~= 'string' then
    return 'unknown'
end
redis.call('DEL', prefix .. 'conversation:' .. id)
if state == 'done' then
    redis.call('DEL', KEYS[1], prefix .. 'out:' .. id)
    return 'deleted'
end
-- Gateways take empty metadata for an unknown request. A claim of a request without the field would call it corrupt.
redis.call('HSET', KEYS[1], 'metadata', '', 'retention', HIDDEN_RETENTION_S)
return 'hidden'
