-- Remove a gateway from the listeners of a request.
--   KEYS  request hash
--   ARGV  gateway
--   ->    {gateway, ...}: the remaining listeners, some of which may have died; {} if the request is done or unknown
-- The output is published to the last of these from now on. Repeatable.
local req = redis.pcall('HMGET', KEYS[1], 'state', 'gateways', 'gateway')
if not req[1] or req[1] == 'done' then
    return {}
end
local gateways = without(listeners(req[2], req[3]), ARGV[1])
redis.call('HSET', KEYS[1], 'gateways', cmsgpack.pack(gateways), 'gateway', gateways[#gateways] or req[3] or '')
return gateways
