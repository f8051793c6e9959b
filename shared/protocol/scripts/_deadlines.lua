-- Deadlines that cannot be met: `submit` refuses a request that would end too late by what the workers have learnt
-- (shared/protocol/pace.py), and `claim` ends one that has waited for too long. The estimate errs on the early side:
-- an unknown cost counts as no time, and a request that finds a free row is never late.

-- Other tenants, or users, whose requests are counted; those of any further ones are not.
local MAX_OTHERS = 64
-- One of these many reads takes a request of the class first (TURNS in worker/queue/consumer.py).
local TURNS = {standard = 4, batch = 8}

-- Return how many requests of a group are taken before one that is behind `own` requests of the same member. Another
-- member comes first until its counter has reached that of this member after its own requests.
-- units: what a request adds to the counters of this member, and of others. waiting_of: returns how many requests of a
-- member wait.
local function taken_before(group, name, own, units, waiting_of)
    local _, floor = least(group)
    local known = redis.call('HMGET', group.served, name, FLOOR)
    local reach = math.max(tonumber(known[1]) or 0, floor or tonumber(known[2]) or 0) + own * units[1]
    local others = redis.call('ZRANGEBYSCORE', group.waiting, '-inf', string.format('%.0f', reach), 'LIMIT', 0, MAX_OTHERS)
    if #others == 0 then
        return own
    end
    local counters, taken = redis.call('HMGET', group.served, unpack(others)), own
    for i, other in ipairs(others) do
        local before = math.ceil((reach - (tonumber(counters[i]) or reach)) / units[2])
        if other ~= name and before > 0 then
            taken = taken + math.min(before, waiting_of(other))
        end
    end
    return taken
end

-- Return how many requests are taken before a new one, and the tokens of all that wait in its class and above.
-- charge: tokens by which a request raises a counter.
local function queue_ahead(prefix, terms, charge)
    local higher, tokens, class = 0, 0, terms.class
    for _, name in ipairs(PRIORITY_CLASSES) do
        local load = redis.call('HMGET', prefix .. 'load', 'requests:' .. name, 'tokens:' .. name)
        tokens = tokens + tonumber(load[2] or 0)
        if name == class then
            class = {requests = tonumber(load[1] or 0)}
            break
        end
        higher = higher + tonumber(load[1] or 0)
    end
    local own, tenants = class.requests, tenants_of(prefix, terms.class)
    if own > 0 and redis.call('EXISTS', tenants.waiting) == 1 then
        local unit, owned = amount(charge, 1, DEFAULT_WEIGHT), amount(charge, 1, terms.weight)
        local function in_line(user)
            return redis.call('ZCARD', line_of(prefix, terms.class, terms.tenant, user))
        end
        local users = users_of(prefix, terms.class, terms.tenant)
        local of_tenant = taken_before(users, terms.user, in_line(terms.user), {owned, owned}, in_line)
        own = math.min(own, taken_before(tenants, terms.tenant, of_tenant, {owned, unit}, function(tenant)
            return tonumber(redis.call('HGET', prefix .. 'waiting', 'requests ' .. tenant) or 0)
        end))
    end
    local turns = TURNS[terms.class]
    return own + (turns and math.min(higher, (turns - 1) * (own + 1)) or higher), tokens
end

-- Return how many requests run now.
local function num_running(prefix)
    local count = 0 - tonumber(redis.call('HGET', prefix .. 'load', 'requests') or 0)
    for _, queue in ipairs(QUEUES) do
        count = count + redis.call('XLEN', prefix .. 'queue:' .. queue)
    end
    for _, class in ipairs(PRIORITY_CLASSES) do
        count = count + redis.call('XLEN', prefix .. 'queue:' .. WAITING .. class)
    end
    return count
end

-- Return the refusal of a new request that would end after its deadline; nil for any other.
-- terms.pace: see LanePace in shared/protocol/pace.py.
local function too_late(prefix, terms)
    local prompt_us, token_us, request_us, held_us, rows, charge = unpack(terms.pace)
    local ahead, tokens = queue_ahead(prefix, terms, charge)
    if ahead < rows - num_running(prefix) then
        return nil
    end
    local wait_ms = math.ceil(math.min(ahead * request_us, tokens * held_us) / 1000)
    local service_ms = math.ceil((terms.prompt * prompt_us + terms.answer * token_us) / 1000)
    if wait_ms + service_ms <= terms.deadline_ms then
        return nil
    end
    return {'late', ahead, wait_ms, service_ms}
end

-- Return true if a request that is about to begin would end after its deadline, and others wait for its row.
-- answer, user: its fields. left_ms: until its deadline. prompt_us, token_us: of the worker.
local function is_hopeless(prefix, answer, user, left_ms, prompt_us, token_us)
    local expected, prompt = whole(answer), whole(string.match(user or '', '^%d+'))
    return expected and prompt and prompt * prompt_us + expected * token_us > 1000 * left_ms
        and tonumber(redis.call('HGET', prefix .. 'load', 'requests') or 0) > 0
end
