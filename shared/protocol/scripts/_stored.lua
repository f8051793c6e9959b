-- Memory of records that stay, in front of _prelude.lua: requests that are stored, in the background or parked, those
-- with much text, and conversations (their ids begin with 'conv:'). They are counted from `submit` (or `park`) until Redis forgets their keys.
--
-- Hash `held`: the bytes and the owner (id of the API key, '' = none) of each counted request, as '<bytes> <owner>'; the
-- field '' has the sum of the bytes. Sorted set `holders`: owners by their bytes. Sorted set `ended:<owner>`: counted
-- requests that have ended, by the time of their end. Sorted set `due`: counted requests by the time at which `look`
-- asks Redis whether their keys are gone, so a request that no script ended leaves the count, too.
-- The hash of a counted request has the field `held`.

-- Steps of one `make_room`: each looks at up to 64 requests, or deletes one.
local MAX_STEPS = 256
-- Time after which `look` asks for a request that has not ended.
local LOOK_MS = 1000 * RETENTION_S

-- Return the bytes that Redis takes for a request; an estimate for the parts of fixed size and the output log.
local function weight(prefix, id, emitted)
    local req = prefix .. 'req:' .. id
    local conversation = redis.pcall('STRLEN', prefix .. 'conversation:' .. id)
    return STORED_BYTES + redis.call('HSTRLEN', req, 'body') + redis.call('HSTRLEN', req, 'metadata')
        + (tonumber(conversation) or 0) + LOG_BYTES_PER_TOKEN * emitted
end

-- Return the key of the hash of a counted request or conversation.
local function record_key(prefix, id)
    return prefix .. (string.sub(id, 1, 5) == 'conv:' and id or 'req:' .. id)
end

-- Change the sums by the bytes of one owner.
local function add_held(prefix, owner, bytes)
    redis.call('HINCRBY', prefix .. 'held', '', bytes)
    if tonumber(redis.call('ZINCRBY', prefix .. 'holders', bytes, owner)) <= 0 then
        redis.call('ZREM', prefix .. 'holders', owner)
    end
end

-- Return the bytes and the owner of a counted request; 0 and nil for another.
local function held_of(prefix, id)
    local bytes, owner = string.match(redis.call('HGET', prefix .. 'held', id) or '', '^(%d+) (.*)$')
    return tonumber(bytes or 0), owner
end

-- Count the bytes of a request, or of an image (see _images.lua). What is counted keeps its owner. Return the owner, and
-- whether it was counted before.
local function count_held(prefix, id, owner, bytes)
    local before, known = held_of(prefix, id)
    owner = known or owner
    redis.call('HSET', prefix .. 'held', id, bytes .. ' ' .. owner)
    add_held(prefix, owner, bytes - before)
    return owner, known
end

-- Count a record, or change its bytes. Return the owner.
local function hold(prefix, id, owner, bytes, now)
    local known
    owner, known = count_held(prefix, id, owner, bytes)
    if not known then
        redis.call('HSET', record_key(prefix, id), 'held', 1)
        redis.call('ZADD', prefix .. 'due', now + LOOK_MS, id)
    end
    return owner
end

-- Note that a counted request has ended. life_ms: of its keys from now on. A request with the field `awaited` never goes
-- before its time: a reader other than a client needs it.
local function note_end(prefix, id, owner, now, life_ms)
    if redis.call('HEXISTS', prefix .. 'req:' .. id, 'awaited') == 0 then
        local ended = prefix .. 'ended:' .. owner
        redis.call('ZADD', ended, 'NX', now, id)
        redis.call('PEXPIRE', ended, math.max(redis.call('PTTL', ended), life_ms + 1000))
    end
    redis.call('ZADD', prefix .. 'due', now + life_ms + 1, id)
end

-- Remove a record from the count.
local function let_go(prefix, id)
    local bytes, owner = held_of(prefix, id)
    if owner then
        redis.call('HDEL', prefix .. 'held', id)
        redis.call('ZREM', prefix .. 'due', id)
        redis.call('ZREM', prefix .. 'ended:' .. owner, id)
        redis.call('SREM', prefix .. 'parked:' .. owner, id)
        add_held(prefix, owner, -bytes)
    end
end

-- Remove a record from the count if its keys are gone. No conversation goes before its time, so none is noted as ended.
local function look_at_record(prefix, id, now)
    local key = record_key(prefix, id)
    local life = redis.call('PTTL', key)
    local _, owner = held_of(prefix, id)
    if life == -2 or not owner then
        let_go(prefix, id)
        redis.call('ZREM', prefix .. 'due', id)
    elseif life < 0 then
        redis.call('ZADD', prefix .. 'due', now + LOOK_MS, id)
    elseif key ~= prefix .. 'req:' .. id then
        redis.call('ZADD', prefix .. 'due', now + life + 1, id)
    else
        note_end(prefix, id, owner, now, life)
    end
end

-- Defined in _images.lua.
local look_at_image, leave_images

-- Remove records and images whose keys are gone. Return the number of those that were due.
local function look(prefix, now)
    local due = redis.call('ZRANGEBYSCORE', prefix .. 'due', '-inf', now, 'LIMIT', 0, 64)
    for _, id in ipairs(due) do
        if string.sub(id, 1, 6) == 'image:' then
            look_at_image(prefix, id, now)
        else
            look_at_record(prefix, id, now)
        end
    end
    return #due
end

-- Delete the counted request of an owner that ended first, unless it ended less than RETENTION_S ago: until then a
-- client may come back for any call. Return false without such a request.
local function drop_oldest(prefix, owner, now)
    local id = redis.call('ZRANGEBYSCORE', prefix .. 'ended:' .. owner, '-inf', now - 1000 * RETENTION_S, 'LIMIT', 0,
        1)[1]
    if id then
        leave_images(prefix, id, redis.call('HGET', prefix .. 'req:' .. id, 'images') or nil, 0, now)
        redis.call('UNLINK', prefix .. 'req:' .. id, prefix .. 'out:' .. id, prefix .. 'conversation:' .. id)
        let_go(prefix, id)
    end
    return id ~= nil
end

-- Make room for more bytes of an owner: requests that ended long ago go, first those of the owner, then those of the
-- owner who holds most. No owner loses a request to one who holds more. One call takes at most MAX_STEPS steps, since
-- other scripts wait meanwhile: then the wait is 0, and the next call goes on.
--   most_all, most_own  largest number of bytes of all requests, and of those of an owner with an API key (0 = any)
--   ->    nil (there is room) | 'key' or 'all' (the bound that is reached), bytes held, milliseconds until a request of
--         the owner may go (-1: none has ended)
local function make_room(prefix, owner, bytes, most_all, most_own, now)
    local steps = 0
    local function has_more_steps()
        steps = steps + 1
        return steps <= MAX_STEPS
    end
    local function own()
        return tonumber(redis.call('ZSCORE', prefix .. 'holders', owner) or 0)
    end
    local function all()
        return tonumber(redis.call('HGET', prefix .. 'held', '') or 0)
    end
    local function wait()
        if steps > MAX_STEPS then
            return 0
        end
        local first = redis.call('ZRANGE', prefix .. 'ended:' .. owner, 0, 0, 'WITHSCORES')[2]
        return first and math.max(0, tonumber(first) + 1000 * RETENTION_S - now) or -1
    end
    local function drop_of_largest()
        for _, holder in ipairs(redis.call('ZREVRANGEBYSCORE', prefix .. 'holders', '+inf', '(' .. own() + bytes, 'LIMIT',
            0, 16)) do
            if drop_oldest(prefix, holder, now) then
                return true
            end
        end
        return drop_oldest(prefix, owner, now)
    end
    look(prefix, now)
    while owner ~= '' and most_own > 0 and own() + bytes > most_own do
        if not has_more_steps() or look(prefix, now) == 0 and not drop_oldest(prefix, owner, now) then
            return 'key', own(), wait()
        end
    end
    while most_all > 0 and all() + bytes > most_all do
        if not has_more_steps() or look(prefix, now) == 0 and not drop_of_largest() then
            return 'all', all(), wait()
        end
    end
end
