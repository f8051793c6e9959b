-- Make one engine step durable and visible: log every request's new tokens, then publish once per gateway.
--   KEYS  the worker's mailbox
--   ARGV  prefix, retention (s), a msgpack array with six values for each request:
--         id, attempt token, start, end, outcome ('' while it runs), item (msgpack, see
--         shared/protocol/messages/step_items.py);
--         a msgpack array with three values for each request that emits nothing before its end: id, attempt token,
--         tokens that the attempt has computed so far ('' = no such request);
--         then request id and notice for each notice that was obeyed
--   ->    {{lost id, its attempt token, ...}, {cancelled ids}, {expired ids}, {id, index, ...}, {id, notice, ...}}
--         lost: another attempt owns the request, or the request ended without this attempt, or is parked: drop its
--         sequences. A request is parked before a step with which it would exceed its budget.
--         cancelled, expired: finish the request with that outcome.
--         id, index: the log is shorter than the worker assumes (Redis lost its tail): send again from that index on.
--         id, notice: a notice in the mailbox ('cancel', or the attempt token that is over). The notice stays there
--         until a commit says that it was obeyed, because a reply may be lost.
-- The fence: an item is appended only if its attempt token is the current token and it starts where the log ends.
-- Repeatable: an item that the log has is skipped, so a caller that lost the reply sends the same step again.
-- A reader never sees a token that is not in the log: log and publish are one atomic step.
--
-- 1. Remove the notices that were obeyed, and read the remaining notices.
-- 2. Count what was computed for requests that emit nothing before their end.
-- 3. For each request: check the fence, append the item to the log, collect it for its gateway, finish the request if
--    the item has an outcome.
-- 4. Charge the new tokens to their tenants, once per tenant.
-- 5. Publish one frame per gateway.
local prefix, retention = ARGV[1], ARGV[2]
local now = now_ms()
local lost, cancelled, expired, behind = {}, {}, {}, {}
local frames, served = {}, {}

local function serve(tenant, tokens)
    if tenant then
        served[tenant] = (served[tenant] or 0) + tokens
    end
end

local function park(id, attempt, park_s)
    set_aside(prefix, id, whole(park_s) or 0, retention, true)
    lost[#lost + 1] = id
    lost[#lost + 1] = attempt
end

for i = 5, #ARGV, 2 do
    if redis.call('HGET', KEYS[1], ARGV[i]) == ARGV[i + 1] then
        redis.call('HDEL', KEYS[1], ARGV[i])
    end
end
local notices = redis.call('HGETALL', KEYS[1])

local computed = ARGV[4] ~= '' and cmsgpack.unpack(ARGV[4]) or {}
for i = 1, #computed, 3 do
    local id, attempt, tokens = computed[i], computed[i + 1], computed[i + 2]
    local req = prefix .. 'req:' .. id
    local state = redis.pcall('HMGET', req, 'attempt', 'state', 'computed', 'allowed', 'park_s', 'tenant', 'emitted',
        'deadline')
    local before = whole(state[3]) or 0
    if state[2] ~= 'done' and (state[1] ~= attempt or state[2] ~= 'running') then -- the reply that told so may be lost
        lost[#lost + 1] = id
        lost[#lost + 1] = attempt
    elseif state[2] == 'running' and not (whole(state[7]) and whole(state[8])) then
        finish_corrupt(prefix, id, retention)
        lost[#lost + 1] = id
        lost[#lost + 1] = attempt
    elseif state[2] == 'running' and tokens > before then
        if tokens > (whole(state[4]) or tokens) then -- the budget of its API key is used up
            park(id, attempt, state[5])
        else
            redis.call('HSET', req, 'computed', tokens)
            serve(state[6], tokens - before)
        end
    end
end

local step = cmsgpack.unpack(ARGV[3])
for i = 1, #step, 6 do
    local id, attempt, first, last, outcome, item = step[i], step[i + 1], step[i + 2], step[i + 3], step[i + 4],
        step[i + 5]
    local req = prefix .. 'req:' .. id
    local state = redis.pcall('HMGET', req, 'attempt', 'state', 'emitted', 'gateway', 'cancel', 'deadline',
        'allowed', 'park_s', 'tenant')
    local emitted, deadline = whole(state[3]), whole(state[6])
    if state[1] == attempt and state[2] == 'running' and not (emitted and deadline and state[4]) then
        finish_corrupt(prefix, id, retention)
        lost[#lost + 1] = id
        lost[#lost + 1] = attempt
    elseif state[1] ~= attempt or (state[2] ~= 'running' and state[2] ~= 'done') then
        count(prefix, 'fenced')
        lost[#lost + 1] = id
        lost[#lost + 1] = attempt
    elseif state[2] == 'running' then
        if first > emitted or (first < emitted and last > emitted) then
            behind[#behind + 1] = id
            behind[#behind + 1] = emitted
        elseif first == emitted and last > (whole(state[7]) or last) then -- the budget of its API key is used up
            park(id, attempt, state[8])
            outcome = nil
        elseif first == emitted and (last > first or outcome ~= '') then
            local entry = last .. (outcome == '' and '-0' or '-1')
            if type(try('XADD', prefix .. 'out:' .. id, entry, 'item', item)) == 'table' then
                -- The log and the state contradict each other. This request ends: it must not stop its worker's
                -- commits.
                finish_unowned(prefix, id, 'error', 'the output log does not fit the state of the request', retention)
                lost[#lost + 1] = id
                lost[#lost + 1] = attempt
                outcome = 'error'
            else
                redis.call('HSET', req, 'emitted', last)
                if first == 0 and last > 0 then
                    redis.call('HSET', req, 'first_at', now) -- for operators, like `history`
                end
                local counted = first
                if first == 0 and outcome ~= '' then -- perhaps its tokens were counted when they were computed
                    counted = math.min(last, whole(redis.call('HGET', req, 'computed')) or 0)
                end
                serve(state[9], last - counted)
                local gateway = state[4]
                frames[gateway] = frames[gateway] or {}
                table.insert(frames[gateway], item)
                if outcome ~= '' then
                    finish(prefix, id, outcome, retention)
                end
            end
        end
        if outcome == '' then
            if state[5] then
                cancelled[#cancelled + 1] = id
            elseif deadline and deadline > 0 and now > deadline then
                expired[#expired + 1] = id
            end
        end
    elseif last > (emitted or 0) then -- ended without this attempt: cancelled, or past its deadline
        count(prefix, 'fenced')
        lost[#lost + 1] = id
        lost[#lost + 1] = attempt
    end
end

charge_output(prefix, served)
for gateway, items in pairs(frames) do
    redis.call('PUBLISH', prefix .. 'gateway:' .. gateway, table.concat(items))
end
return {lost, cancelled, expired, behind, notices}
