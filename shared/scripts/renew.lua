-- Keep the leases of a worker's running requests: what is not renewed in time goes to another worker.
--   KEYS  any of the lane (a cluster finds the node by it)
--   ARGV  prefix, worker, then for each request: id, attempt token
--   ->    {lost id, its attempt token, ...}: another attempt owns it
-- Repeatable.
local prefix, worker = ARGV[1], ARGV[2]
local lost = {}
for i = 3, #ARGV, 2 do
    local req = redis.pcall('HMGET', prefix .. 'req:' .. ARGV[i], 'attempt', 'state', 'queue', 'entry')
    if req[1] == ARGV[i + 1] and req[2] == 'running' then
        -- What has no such entry cannot be renewed; it must not stop the others.
        try('XCLAIM', prefix .. 'queue:' .. (req[3] or ''), GROUP, worker, 0, req[4] or '', 'JUSTID')
    elseif req[1] ~= ARGV[i + 1] then
        lost[#lost + 1] = ARGV[i]
        lost[#lost + 1] = ARGV[i + 1]
    end
end
return lost
