-- Count the lines of a window whose output is stored, and make its parts those of the output files.
--   KEYS  batch hash
--   ARGV  prefix, id, fencing token, number of the window, completed lines, failed lines, failed lines that had expired,
--         tokens of prompts, tokens of answers, object and bytes of the output, object and bytes of the errors (0 bytes =
--         there is no object)
--   ->    'ended' | 'lost'
-- Repeatable: a window is counted once.
local prefix, id, token, index = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if not holds(prefix, id, index, token) then
    return 'lost'
end
local open = prefix .. 'open:' .. id
if redis.call('HSETNX', open, index .. ':written', '1') == 0 then
    return 'ended'
end
redis.call('HDEL', open, index .. ':progress')
for i, name in ipairs({'completed', 'failed', 'expired_lines', 'prompt_tokens', 'completion_tokens'}) do
    redis.call('HINCRBY', KEYS[1], name, ARGV[4 + i])
end
local record = redis.call('HMGET', KEYS[1], 'owner', 'output', 'errors_file')
for i, name in ipairs({'output_bytes', 'error_bytes'}) do
    local object, bytes = ARGV[8 + 2 * i], tonumber(ARGV[9 + 2 * i])
    if bytes > 0 then
        redis.call('HSET', prefix .. 'parts:' .. record[1 + i], index, object .. ' ' .. ARGV[9 + 2 * i])
        redis.call('HINCRBY', KEYS[1], name, bytes)
        add_used(prefix, record[1], bytes)
    end
end
return 'ended'
