-- Make a gateway a listener of a request, and publish the output to this gateway from now on.
--   KEYS  request hash
--   ARGV  gateway
--   ->    {state, metadata} | {} (the request is unknown)
-- Earlier output is in the output log. Repeatable.
local req = redis.pcall('HMGET', KEYS[1], 'state', 'metadata', 'gateways', 'gateway')
if not req[1] then
    return {}
end
if req[1] ~= 'done' then
    local gateways = without(listeners(req[3], req[4]), ARGV[1])
    gateways[#gateways + 1] = ARGV[1]
    if #gateways > MAX_LISTENERS then
        table.remove(gateways, 1)
    end
    redis.call('HSET', KEYS[1], 'gateway', ARGV[1], 'gateways', cmsgpack.pack(gateways))
end
return {req[1], req[2] or ''}
