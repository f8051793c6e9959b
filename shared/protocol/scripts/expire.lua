-- End a request whose deadline has passed, waiting or running, because no worker has done so; or a parked request whose
-- retention is over. The deadline of a parked request does not count.
--   KEYS  request hash
--   ARGV  prefix, id, retention (s)
--   ->    'expired' (it is now done) | 'early' (its deadline or retention has not passed, or it has none) | 'done'
--         | 'unknown'
-- Repeatable. The owner of a running request finds its attempt token in its mailbox: that attempt is over.
local prefix, id, retention = ARGV[1], ARGV[2], ARGV[3]
local req = redis.pcall('HMGET', KEYS[1], 'state', 'deadline', 'class', 'cost', 'owner', 'attempt', 'queue', 'entry')
local state, deadline = req[1], whole(req[2])
if not state then
    leave_parked(prefix, id)
    return 'unknown'
end
if state == 'done' then
    return 'done'
end
if state == 'parked' then
    if has_lapsed(prefix, id, retention) then
        return 'expired'
    end
    return 'early'
end
if not deadline or (state ~= 'queued' and not (req[5] and req[6])) then
    finish_corrupt(prefix, id, retention)
    return 'done'
end
if deadline == 0 or now_ms() <= deadline then
    return 'early'
end
local detail = 'the deadline passed while the request was waiting'
if state == 'queued' then
    local class, cost = load_of(prefix, req[3], req[4], req[7], req[8])
    add_load(prefix, class, -1, -cost)
else
    notify(prefix, req[5], id, req[6], retention)
    detail = 'the deadline passed, and no worker took notice'
end
finish_unowned(prefix, id, 'deadline', detail, retention)
return 'expired'
