-- Write a conversation: a new one, or other items or metadata of one that the caller has read.
--   KEYS  hash of the conversation
--   ARGV  prefix, id, terms (msgpack map: version = of the new record, random; before = version that the caller has
--         read, '' = there is no record yet; fields = of the new record; open = the response that still continues it,
--         '' = none; retention_s = life of the record from now on if none does; owner; max_stored and max_key_stored =
--         bounds of all bytes that stay, see _stored.lua, which refuse only a larger record; images = names
--         of the files of its images), the files in their order (empty if Redis has the file)
--   ->    {'written'} | {'changed'} (the record has another version, or is gone)
--         | {'no_room', 'key' or 'all', bytes held, milliseconds until a request of the key may go (-1: none has ended)}
--         | {'no_files'} (Redis has lost a file that was not sent)
-- Repeatable: the record has the version of the caller after the first call.
local prefix, id, terms = ARGV[1], 'conv:' .. ARGV[2], cmsgpack.unpack(ARGV[3])
local images, files, now = terms.images, {unpack(ARGV, 4)}, now_ms()
local known = redis.call('HMGET', KEYS[1], 'version', 'images')
if known[1] == terms.version then
    return {'written'}
end
if (known[1] or '') ~= terms.before then
    return {'changed'}
end
local bytes = STORED_BYTES
for _, value in pairs(terms.fields) do
    bytes = bytes + #value
end
local more = bytes - held_of(prefix, id) + missing_bytes(prefix, images, files)
if terms.max_stored and more > 0 then
    local reached, held, wait = make_room(prefix, terms.owner, more, terms.max_stored, terms.max_key_stored, now)
    if reached then
        return {'no_room', reached, held, wait}
    end
end
if not has_images(prefix, images, files) then
    return {'no_files'}
end
redis.call('HSET', KEYS[1], 'version', terms.version, 'open', terms.open)
for field, value in pairs(terms.fields) do
    redis.call('HSET', KEYS[1], field, value)
end
hold(prefix, id, terms.owner, bytes, now)
use_images(prefix, id, terms.owner, images, files, now)
-- Images that the record no longer names go; those that it names live as long as the record.
local kept, packed = {}, redis.call('HGET', KEYS[1], 'images')
for _, name in ipairs(images) do
    kept[name] = true
end
local is_read, names = pcall(cmsgpack.unpack, known[2] or '\144')
local left = {}
for _, name in ipairs(is_read and names or {}) do
    left[#left + 1] = not kept[name] and name or nil
end
leave_images(prefix, id, cmsgpack.pack(left), 0, now)
if terms.open ~= '' then
    redis.call('PERSIST', KEYS[1])
    return {'written'}
end
redis.call('PEXPIRE', KEYS[1], 1000 * terms.retention_s)
redis.call('ZADD', prefix .. 'due', now + 1000 * terms.retention_s + 1, id)
leave_images(prefix, id, packed, 1000 * terms.retention_s, now)
redis.call('SREM', prefix .. 'answering', ARGV[2])
return {'written'}
