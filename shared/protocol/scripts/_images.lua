-- The files of images; Redis gets this after _stored.lua. A file is kept once for all requests of a tenant that name
-- it, as long as one of them is in Redis.
--
-- String `image:<name>`: the file; the name is a hash of the tenant and the file. Sorted set `image:<name>:users`: the
-- requests and conversations that name it, by the time at which Redis forgets them ('+inf' = they have not ended). Both
-- keys expire with the last user. `held` counts the bytes of a file under the id 'image:<name>', for the owner who sent
-- it first; it is counted until `look` or the end of its last user. The hash of a request or a conversation has the names
-- as a msgpack array, in `images`.

-- Let the keys of an image live as long as its last user.
local function settle_image(prefix, image, now)
    local key = prefix .. image
    local users = key .. ':users'
    redis.call('ZREMRANGEBYSCORE', users, '-inf', now)
    local last = redis.call('ZREVRANGE', users, 0, 0, 'WITHSCORES')[2]
    if not last then
        redis.call('UNLINK', key, users)
        let_go(prefix, image)
    elseif last == 'inf' then
        redis.call('PERSIST', key)
        redis.call('PERSIST', users)
        redis.call('ZADD', prefix .. 'due', now + LOOK_MS, image)
    else
        redis.call('PEXPIREAT', key, string.format('%.0f', last))
        redis.call('PEXPIREAT', users, string.format('%.0f', last))
        redis.call('ZADD', prefix .. 'due', last + 1, image)
    end
end

-- Return whether Redis has each image, or the caller has sent its file.
local function has_images(prefix, images, files)
    for i, name in ipairs(images) do
        if files[i] == '' and redis.call('EXISTS', prefix .. 'image:' .. name) == 0 then
            return false
        end
    end
    return true
end

-- Look at an image that is due: drop requests that Redis has lost before their end, at most 64 at a time.
function look_at_image(prefix, image, now)
    local users = prefix .. image .. ':users'
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', users, '+inf', '+inf', 'LIMIT', 0, 64)) do
        if redis.call('EXISTS', record_key(prefix, id)) == 0 then
            redis.call('ZREM', users, id)
        end
    end
    settle_image(prefix, image, now)
end

-- Return the bytes of those of these images that are not in Redis. names, files: in the same order.
local function missing_bytes(prefix, names, files)
    local bytes = 0
    for i, name in ipairs(names) do
        if redis.call('EXISTS', prefix .. 'image:' .. name) == 0 then
            bytes = bytes + #files[i]
        end
    end
    return bytes
end

-- Keep the images of a new request, or of a conversation.
local function use_images(prefix, id, owner, names, files, now)
    for i, name in ipairs(names) do
        local image = 'image:' .. name
        if redis.call('EXISTS', prefix .. image) == 0 then
            redis.call('SET', prefix .. image, files[i])
            count_held(prefix, image, owner, #files[i])
        end
        redis.call('ZADD', prefix .. image .. ':users', '+inf', id)
        settle_image(prefix, image, now)
    end
    redis.call('HSET', record_key(prefix, id), 'images', cmsgpack.pack(names))
end

-- A request ends: its images stay for `life_ms` more; 0 = they are dropped at once, unless others name them. packed:
-- its field `images`.
function leave_images(prefix, id, packed, life_ms, now)
    local is_read, names = pcall(cmsgpack.unpack, packed or '\144')
    for _, name in ipairs(is_read and type(names) == 'table' and names or {}) do
        local image = 'image:' .. tostring(name)
        if redis.call('ZSCORE', prefix .. image .. ':users', id) then
            redis.call('ZADD', prefix .. image .. ':users', string.format('%.0f', now + life_ms), id)
            settle_image(prefix, image, now)
        end
    end
end
