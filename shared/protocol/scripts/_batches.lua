-- Shared functions of the scripts about files and batches, in place of _limits.lua and _prelude.lua. All keys of files
-- and batches have the same hash tag; the scripts build them from `prefix` (`BatchKeys` of shared/protocol/keys.py
-- names them).

local function now_ms()
    local time = redis.call('TIME')
    return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Number of a window that stands for the validation of the input.
local VALIDATION = '-1'

-- Milliseconds until a batch expires, negative once it has. expires: its unix time (s).
local function left_ms(expires, now)
    return 1000 * tonumber(expires or 0) - now
end

-- Add to the bytes that all files take, and those of an owner.
local function add_used(prefix, owner, bytes)
    redis.call('HINCRBY', prefix .. 'used', 'all', bytes)
    if redis.call('HINCRBY', prefix .. 'used', 'owner:' .. owner, bytes) <= 0 then
        redis.call('HDEL', prefix .. 'used', 'owner:' .. owner)
    end
end

-- True if `token` holds a window: no other gateway has begun it since, and it is not closed.
local function holds(prefix, id, index, token)
    return redis.call('HGET', prefix .. 'open:' .. id, index) == token
end

-- Write the record of an output file, if it has a line. Its bytes were counted when its parts were written.
local function keep_output(prefix, batch, file_id, filename, bytes, now)
    if bytes == 0 then
        redis.call('DEL', prefix .. 'parts:' .. file_id)
        return false
    end
    local seconds = math.floor(now / 1000)
    local expires = batch.output_expires_s > 0 and seconds + batch.output_expires_s or 0
    redis.call('HSET', prefix .. 'file:' .. file_id, 'owner', batch.owner, 'filename', filename, 'purpose',
        'batch_output', 'bytes', bytes, 'created', seconds, 'expires', expires, 'complete', '1')
    redis.call('ZADD', prefix .. 'files:' .. batch.owner, now, file_id)
    if expires > 0 then
        redis.call('ZADD', prefix .. 'expiring', expires, file_id)
    end
    return true
end

-- End a batch: write its output files, release its input, and let its record expire. `status` is its last status.
local function end_batch(prefix, id, status, now)
    local key = prefix .. 'batch:' .. id
    local names = {'owner', 'input', 'output', 'errors_file', 'output_bytes', 'error_bytes', 'output_expires_s'}
    local values = redis.call('HMGET', key, unpack(names))
    local batch = {}
    for i, name in ipairs(names) do
        batch[name] = tonumber(values[i]) or values[i] or ''
    end
    batch.owner, batch.input = values[1] or '', values[2] or ''
    local seconds = math.floor(now / 1000)
    local has_output = keep_output(prefix, batch, values[3], 'batch_' .. id .. '_output.jsonl', batch.output_bytes, now)
    local has_errors = keep_output(prefix, batch, values[4], 'batch_' .. id .. '_error.jsonl', batch.error_bytes, now)
    redis.call('HSET', key, 'status', status, status .. '_at', seconds, 'has_output', has_output and '1' or '',
        'has_errors', has_errors and '1' or '')
    if status == 'completed' or status == 'expired' then
        redis.call('HSET', key, 'finalizing_at', seconds)
    end
    if redis.call('EXISTS', prefix .. 'file:' .. batch.input) == 1 then
        redis.call('HINCRBY', prefix .. 'file:' .. batch.input, 'uses', -1)
    end
    redis.call('ZREM', prefix .. 'active', id)
    redis.call('DEL', prefix .. 'windows:' .. id, prefix .. 'leases:' .. id, prefix .. 'open:' .. id)
    redis.call('EXPIRE', key, BATCH_RETENTION_S)
end
