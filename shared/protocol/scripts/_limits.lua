-- Reservation and settlement of tokens, in front of _prelude.lua in every script. `submit` reserves what a request may
-- use at most, and the script that ends the request settles it: both are one atomic step with the change of the
-- request, so nothing leaks and nothing is counted twice, whichever process dies. `park` settles what a request has used
-- so far, and `unpark` reserves the rest, so a parked request holds no reservation.
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

-- Return the day of a reservation. If the clock of Redis was set back over midnight, an account has begun the next day
-- already: that day goes on, so no budget is renewed twice.
local function day_of(root, given, now)
    local day = math.floor(now / 86400000)
    for i = 8, #given do
        if tonumber(redis.call('HGET', root .. 'spent:' .. given[i][1], 'day') or 0) == day + 1 then
            return day + 1
        end
    end
    return day
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
        if spent[name .. '_at'] > now then -- the clock was set back: the bucket fills from now on, whether or not it allows this
            redis.call('HSET', key, name .. '_at', now)
        end
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
--   given   array: prefix of the accounts, 1 if the request begins a call (else 0), tokens of the prompt, price
--           of a token of a prompt, of an answer, model, seconds for which the request is parked once its budget is
--           used up (0 = it is refused if it might not suffice), then for each account an array: name, and the limits of
--           calls and tokens per minute, of open requests, of tokens per day and month, of costs per day and month
--           (0 = none)
--   most    tokens that the request may use, prompt included
--   base    tokens of the answer that were settled when the request was parked; nil for a new request
--   is_unchecked  reserve although a limit is reached
-- If the budgets suffice for a part of the answer only and the request may be parked, that part is reserved; the field
-- `allowed` of the request's hash has the number of tokens before which `commit_step` parks it.
--   ->      nil, states: for each account {limit of calls, left, full in ms, limit of tokens, left, full in ms}
--           | limit that is reached, its account, milliseconds until it allows the request (-1: never)
local function reserve(prefix, id, given, most, now, base, is_unchecked)
    local root, calls, prompt, price_in, price_out, park_s = given[1], given[2], given[3], given[4], given[5], given[7]
    local day = day_of(root, given, now)
    local month = month_of(day)
    local accounts = {}
    local reached, account, wait
    local whole_answer = most
    -- The tokens, prompt included, that an amount of money buys.
    local function bought(money)
        local rest = money - prompt * price_in
        return rest < 0 and -1 or price_out > 0 and prompt + math.floor(rest / price_out) or whole_answer
    end
    for i = 8, #given do
        local limits = given[i]
        local spent = spent_of(root .. 'spent:' .. limits[1], now, day, month, limits)
        accounts[#accounts + 1] = {limits, spent}
        for name, check in pairs({tokens_per_day = {limits[5], limits[5] - spent.day_tokens},
            tokens_per_month = {limits[6], limits[6] - spent.month_tokens},
            cost_per_day = {limits[7], bought(limits[7] - spent.day_cost)},
            cost_per_month = {limits[8], bought(limits[8] - spent.month_cost)}}) do
            if check[1] > 0 and check[2] < whole_answer and not is_unchecked then
                if park_s == 0 or check[2] <= prompt then
                    return name, limits[1], -1
                end
                most = math.min(most, check[2])
            end
        end
    end
    local cost = prompt * price_in + (most - prompt) * price_out
    for _, pair in ipairs(accounts) do
        local limits, spent = pair[1], pair[2]
        for name, check in pairs({requests_per_minute = {spent.calls, limits[2], calls},
            tokens_per_minute = {spent.tokens, limits[3], most}}) do
            local missing = 60000 * check[3] - check[1]
            if check[2] > 0 and missing > 0 and not is_unchecked then
                local until_ms = check[3] > check[2] and -1 or math.ceil(missing / check[2])
                if until_ms < 0 then
                    return name, limits[1], until_ms
                elseif not wait or until_ms > wait then
                    reached, account, wait = name, limits[1], until_ms
                end
            end
        end
        if not reached and limits[4] > 0 and spent.open + 1 > limits[4] and not is_unchecked then
            reached, account, wait = 'concurrent_requests', limits[1], 0
        end
    end
    if reached then
        return reached, account, wait
    end
    if most < whole_answer then
        redis.call('HSET', prefix .. 'req:' .. id, 'allowed', (base or 0) + most - prompt, 'park_s', park_s)
    elseif base then
        redis.call('HDEL', prefix .. 'req:' .. id, 'allowed')
    end
    local record = {root, day, month, most, cost, prompt, price_in, price_out, given[6], base or 0, base and 0 or 1,
        park_s, whole_answer}
    local states = {}
    for _, pair in ipairs(accounts) do
        local limits, spent = pair[1], pair[2]
        spent.open = spent.open + 1
        spent.day_tokens, spent.month_tokens = spent.day_tokens + most, spent.month_tokens + most
        spent.day_cost, spent.month_cost = spent.day_cost + cost, spent.month_cost + cost
        spent.calls = math.max(0, spent.calls - 60000 * calls)
        spent.tokens = math.max(0, spent.tokens - 60000 * most)
        write_spent(root .. 'spent:' .. limits[1], spent)
        record[#record + 1] = limits
        states[#states + 1] = {limits[2], math.floor(spent.calls / 60000),
            limits[2] > 0 and math.ceil((60000 * limits[2] - spent.calls) / limits[2]) or 0, limits[3],
            math.floor(spent.tokens / 60000), limits[3] > 0 and math.ceil((60000 * limits[3] - spent.tokens) / limits[3])
            or 0}
    end
    redis.call('HSET', prefix .. 'reserved', id, cmsgpack.pack(record))
    return nil, states
end

-- Return how many tokens a request with cache breakpoints has pinned: the report about its prompt in the first item of
-- its log says so.
local function pinned_tokens(prefix, id)
    if redis.pcall('HGET', prefix .. 'req:' .. id, 'pins') ~= '1' then
        return 0
    end
    local entry = redis.pcall('XRANGE', prefix .. 'out:' .. id, '-', '+', 'COUNT', 1)[1]
    local is_read, item = pcall(cmsgpack.unpack, type(entry) == 'table' and entry[2][2] or '')
    local report = is_read and type(item) == 'table' and item[6]
    local pinned = type(report) == 'table' and report[4]
    return type(pinned) == 'table' and (tonumber(pinned[1]) or 0) + (tonumber(pinned[2]) or 0) or 0
end

-- Replace the reservation of a request that ends, or that is parked, by what it used: nothing if it computed nothing,
-- else its prompt and its tokens. Does nothing without a reservation, so a request is settled once.
--   tokens  of the answer: those that were emitted, or all that were computed if these are more
--   ->    what `unpark` needs to reserve the rest: {prefix of the accounts, tokens of the prompt that are not counted
--         yet, price of a token of a prompt, of an answer, model, tokens that are left, seconds for which it is
--         parked once its budget is used up, limits of each account, ...} | nil (no reservation)
local function settle(prefix, id, tokens, outcome)
    local packed = redis.call('HGET', prefix .. 'reserved', id)
    if not packed then
        return
    end
    redis.call('HDEL', prefix .. 'reserved', id)
    local record = cmsgpack.unpack(packed)
    local root, day, month, most, cost, prompt, price_in, price_out, model, base, requests, park_s,
        whole_answer = unpack(record, 1, 13)
    local answer = math.max(0, tokens - base)
    local has_computed = answer > 0 or outcome == 'stop' or outcome == 'length' or outcome == 'repetition'
    local used = has_computed and prompt + answer or 0
    local spent_cost = has_computed and prompt * price_in + answer * price_out or 0
    local rest = {root, has_computed and 0 or prompt, price_in, price_out, model, whole_answer - used, park_s}
    for i = 14, #record do
        local limits = record[i]
        local key = root .. 'spent:' .. limits[1]
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
        rest[#rest + 1] = limits
        if limits[3] > 0 then -- the bucket has given the tokens
            redis.call('HINCRBY', key, 'tokens', 60000 * (most - used))
        end
    end
    local usage = root .. 'usage:' .. string.format('%d', day)
    local owner = string.match(record[14] and record[14][1] or '', '^key:(.+)$') or ''
    local name = owner .. ' ' .. model .. ' '
    for what, amount in pairs({requests = requests, prompt = has_computed and prompt or 0, completion = answer,
        cost = spent_cost}) do
        redis.call('HINCRBY', usage, name .. what, amount)
    end
    local pinned = has_computed and prompt > 0 and pinned_tokens(prefix, id) or 0 -- once, with the prompt
    if pinned > 0 then
        redis.call('HINCRBY', usage, name .. 'pinned', pinned)
    end
    redis.call('EXPIRE', usage, USAGE_S)
    return rest
end
