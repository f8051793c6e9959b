-- Renew the leases of a worker's running requests. Another worker takes over a request that is not renewed in time.
--   KEYS  any key of the lane (a cluster finds the node by it)
--   ARGV  prefix, worker, then for each request: id, attempt token
--   ->    {lost id, its attempt token, ...}: another attempt owns the request
-- Repeatable.
local prefix, worker = ARGV[1], ARGV[2]
local lost = {}
for i = 3, #ARGV, 2 do
    local req = redis.pcall('HMGET', prefix .. 'req:' .. ARGV[i], 'attempt', 'state', 'queue', 'entry')
    if req[1] == ARGV[i + 1] and req[2] == 'running' then
        -- A request without such an entry cannot be renewed; it must not stop the rest.
        try('XCLAIM', prefix .. 'queue:' .. (req[3] or ''), GROUP, worker, 0, req[4] or '', 'JUSTID')
    elseif req[1] ~= ARGV[i + 1] then
        lost[#lost + 1] = ARGV[i]
        lost[#lost + 1] = ARGV[i + 1]
    end
end
return lost
