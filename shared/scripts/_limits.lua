-- Reservation and settlement of tokens, in front of _prelude.lua in every script. `submit` reserves what a request may
-- use at most, and the script that ends the request settles it: both are one atomic step with the change of the
-- request, so nothing leaks and nothing is counted twice, whichever process dies.
--
-- Hash `spent:<account>`: open (requests that have not ended), day and month (numbers since 1970 and since the year 0)
-- with their tokens and costs, reservations included; calls and tokens: what is left in the buckets of the limits per
-- minute, in 60,000ths, with the times of their last use. A limit of L per minute adds L of them in a millisecond.
local SPENT = {'open', 'day', 'day_tokens', 'day_cost', 'month', 'month_tokens', 'month_cost', 'calls', 'calls_at',
    'tokens', 'tokens_at'}

-- Return the number of the month that has a day: 12 times the year plus the month from 0. day: since 1970-01-01.
local function month_of(day)
    local shifted = day + 719468 -- days since 0000-03-01
    local era = math.floor(shifted / 146097)
    local of_era = shifted - era * 146097
    local year = math.floor((of_era - math.floor(of_era / 1460) + math.floor(of_era / 36524)
        - math.floor(of_era / 146096)) / 365)
    local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
    local month = math.floor((5 * of_year + 2) / 153) -- from March
    return 12 * (year + era * 400) + month + 2
end

-- Read what an account has spent: today, this month, and its buckets as they are now.
local function spent_of(key, now, day, month, limits)
    local raw = redis.call('HMGET', key, unpack(SPENT))
    local spent = {}
    for i, name in ipairs(SPENT) do
        spent[name] = tonumber(raw[i] or 0) or 0
    end
    if spent.day ~= day then
        spent.day, spent.day_tokens, spent.day_cost = day, 0, 0
    end
    if spent.month ~= month then
        spent.month, spent.month_tokens, spent.month_cost = month, 0, 0
    end
    for name, limit in pairs({calls = limits[2], tokens = limits[3]}) do
        local passed = math.max(0, now - spent[name .. '_at'])
        -- A bucket that is not used yet is full; its time is 0.
        spent[name] = math.min(60000 * limit, spent[name] + math.min(passed, 60000) * limit)
        spent[name .. '_at'] = limit > 0 and now or 0
    end
    return spent
end

local function write_spent(key, spent)
    local fields = {}
    for _, name in ipairs(SPENT) do
        fields[#fields + 1] = name
        fields[#fields + 1] = spent[name]
    end
    redis.call('HSET', key, unpack(fields))
end

-- Reserve what a request may use at most, for all of its accounts or for none.
--   charge  msgpack array: prefix of the accounts, 1 if the request begins a call (else 0), tokens of the prompt, price
--           of a token of a prompt, of an answer, model, then for each account an array: name, and the limits of calls
--           and tokens per minute, of open requests, of tokens per day and month, of costs per day and month (0 = none)
--   most    tokens that the request may use, prompt included
--   ->      nil, states: for each account {limit of calls, left, full in ms, limit of tokens, left, full in ms}
--           | limit that is reached, its account, milliseconds until it allows the request (-1: never)
local function reserve(prefix, id, charge, most, now)
    local given = cmsgpack.unpack(charge)
    local root, calls, prompt = given[1], given[2], given[3]
    local cost = prompt * given[4] + (most - prompt) * given[5]
    local day = math.floor(now / 86400000)
    local month = month_of(day)
    local found = {}
    local reached, account, wait
    for i = 7, #given do
        local limits = given[i]
        local spent = spent_of(root .. 'spent:' .. limits[1], now, day, month, limits)
        found[#found + 1] = {limits, spent}
        for name, check in pairs({tokens_per_day = {spent.day_tokens + most, limits[5]},
            tokens_per_month = {spent.month_tokens + most, limits[6]}, cost_per_day = {spent.day_cost + cost, limits[7]},
            cost_per_month = {spent.month_cost + cost, limits[8]}}) do
            if check[2] > 0 and check[1] > check[2] then
                return name, limits[1], -1
            end
        end
        for name, check in pairs({requests_per_minute = {spent.calls, limits[2], calls},
            tokens_per_minute = {spent.tokens, limits[3], most}}) do
            local missing = 60000 * check[3] - check[1]
            if check[2] > 0 and missing > 0 then
                local until_ms = check[3] > check[2] and -1 or math.ceil(missing / check[2])
                if until_ms < 0 then
                    return name, limits[1], until_ms
                elseif not wait or until_ms > wait then
                    reached, account, wait = name, limits[1], until_ms
                end
            end
        end
        if not reached and limits[4] > 0 and spent.open + 1 > limits[4] then
            reached, account, wait = 'concurrent_requests', limits[1], 0
        end
    end
    if reached then
        return reached, account, wait
    end
    local record = {root, day, month, most, cost, prompt, given[4], given[5], given[6]}
    local states = {}
    for _, pair in ipairs(found) do
        local limits, spent = pair[1], pair[2]
        spent.open = spent.open + 1
        spent.day_tokens, spent.month_tokens = spent.day_tokens + most, spent.month_tokens + most
        spent.day_cost, spent.month_cost = spent.day_cost + cost, spent.month_cost + cost
        spent.calls = math.max(0, spent.calls - 60000 * calls)
        spent.tokens = math.max(0, spent.tokens - 60000 * most)
        write_spent(root .. 'spent:' .. limits[1], spent)
        record[#record + 1] = limits[1]
        record[#record + 1] = limits[3]
        states[#states + 1] = {limits[2], math.floor(spent.calls / 60000),
            limits[2] > 0 and math.ceil((60000 * limits[2] - spent.calls) / limits[2]) or 0, limits[3],
            math.floor(spent.tokens / 60000), limits[3] > 0 and math.ceil((60000 * limits[3] - spent.tokens) / limits[3])
            or 0}
    end
    redis.call('HSET', prefix .. 'reserved', id, cmsgpack.pack(record))
    return nil, states
end

-- Replace the reservation of a request that ends by what it used: nothing if it computed nothing, else its prompt and
-- its tokens. Does nothing without a reservation, so a request is settled once.
local function settle(prefix, id, emitted, outcome)
    local packed = redis.call('HGET', prefix .. 'reserved', id)
    if not packed then
        return
    end
    redis.call('HDEL', prefix .. 'reserved', id)
    local record = cmsgpack.unpack(packed)
    local root, day, month, most, cost, prompt, price_in, price_out, model = unpack(record, 1, 9)
    local has_computed = emitted > 0 or outcome == 'stop' or outcome == 'length'
    local used = has_computed and prompt + emitted or 0
    local spent_cost = has_computed and prompt * price_in + emitted * price_out or 0
    for i = 10, #record, 2 do
        local key = root .. 'spent:' .. record[i]
        local now = redis.call('HMGET', key, 'day', 'month')
        redis.call('HINCRBY', key, 'open', -1)
        if tonumber(now[1]) == day then
            redis.call('HINCRBY', key, 'day_tokens', used - most)
            redis.call('HINCRBY', key, 'day_cost', spent_cost - cost)
        end
        if tonumber(now[2]) == month then
            redis.call('HINCRBY', key, 'month_tokens', used - most)
            redis.call('HINCRBY', key, 'month_cost', spent_cost - cost)
        end
        if record[i + 1] > 0 then -- the bucket has given the tokens
            redis.call('HINCRBY', key, 'tokens', 60000 * (most - used))
        end
    end
    local usage = root .. 'usage:' .. string.format('%d', day)
    local owner = string.match(record[10] or '', '^key:(.+)$') or ''
    local name = owner .. ' ' .. model .. ' '
    for what, amount in pairs({requests = 1, prompt = has_computed and prompt or 0, completion = emitted,
        cost = spent_cost}) do
        redis.call('HINCRBY', usage, name .. what, amount)
    end
    redis.call('EXPIRE', usage, USAGE_S)
end
