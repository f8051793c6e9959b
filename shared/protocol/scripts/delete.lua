-- Delete what a client may read of a request: the metadata, the output log and the conversation.
--   KEYS  request hash
--   ARGV  prefix, id
--   ->    'deleted' | 'hidden' (it has not ended: no gateway finds it any more, and its keys expire soon after its
--         end) | 'unknown'
-- Does not cancel the request. Repeatable.
local prefix, id = ARGV[1], ARGV[2]
local req = redis.pcall('HMGET', KEYS[1], 'state', 'held', 'account', 'emitted', 'images')
local state = req[1]
if not state then
    return 'unknown'
end
redis.call('DEL', prefix .. 'conversation:' .. id)
if state == 'done' then
    leave_images(prefix, id, req[5], 0, now_ms())
    redis.call('DEL', KEYS[1], prefix .. 'out:' .. id)
    if req[2] then
        let_go(prefix, id)
    end
    return 'deleted'
end
-- Gateways take empty metadata for an unknown request. A claim of a request without the field would call it corrupt.
redis.call('HSET', KEYS[1], 'metadata', '', 'retention', HIDDEN_RETENTION_S)
if req[2] then
    hold(prefix, id, req[3] or '', weight(prefix, id, whole(req[4]) or 0), now_ms())
end
return 'hidden'
