-- Fair sharing between tenants, in front of _prelude.lua in every script: virtual token counters, after "Fairness in
-- Serving Large Language Models" (Sheng et al., OSDI 2024).
--
-- Requests of a class that cannot be delivered at once wait in lines, one for each user of a tenant. A worker that reads
-- takes the first request of the tenant with the least counter, of that tenant's user with the least counter. A counter
-- grows by what its tenant was served: prompt tokens when a request is taken, output tokens when they are committed,
-- both divided by the weight of the tenant. The counter of a user grows by the output of a request when that ends,
-- because a commit must be cheap.
--
-- `tenants:<class>`, `users:<class>:<tenant>`: sorted sets of those who wait, by a lower bound of their counters.
-- `served:<class>`, `served:<class>:<tenant>`: hashes of the counters, those of idle tenants and users included. The
-- field FLOOR has the counter of the last that was taken: who comes back begins there if none waits.
-- `line:<class>:<tenant>:<user>`: sorted set of entries of the stream `queue:waiting:<class>`, by arrival.
-- `waiting`: hash of the requests and the tokens of each tenant in its lines, in all classes.
-- `wake`: stream with an entry that ends the blocking read of one idle worker.

local function tenants_of(prefix, class)
    return {waiting = prefix .. 'tenants:' .. class, served = prefix .. 'served:' .. class}
end

local function users_of(prefix, class, tenant)
    local place = class .. ':' .. tenant
    return {waiting = prefix .. 'users:' .. place, served = prefix .. 'served:' .. place, expires = true}
end

local function line_of(prefix, class, tenant, user)
    return prefix .. 'line:' .. class .. ':' .. tenant .. ':' .. user
end

-- A share is who a request counts for. Return it from the fields `tenant` and `user` of a request; nil if they are
-- missing or corrupt.
local function share_of(tenant, user)
    local class, weight, name = string.match(tenant or '', '^(%l+) (%d+) (%S+)$')
    local prompt, hash = string.match(user or '', '^(%d+) (%x*)$')
    if not class or not prompt or tonumber(weight) == 0 then
        return nil
    end
    return {class = class, weight = tonumber(weight), tenant = name, user = hash, prompt = tonumber(prompt)}
end

-- Return what tokens add to a counter.
local function amount(tokens, cost, weight)
    return tokens * math.floor(cost * COUNTER_UNITS * DEFAULT_WEIGHT / weight + 0.5)
end

local function set_counter(group, name, counter)
    redis.call('HSET', group.served, name, string.format('%.0f', counter))
    if group.expires then
        redis.call('EXPIRE', group.served, USER_COUNTERS_S)
    end
end

-- Add to a counter. A counter that is corrupt, or at its largest value, stays as it is.
local function charge(group, name, by)
    redis.pcall('HINCRBY', group.served, name, by)
    if group.expires then
        redis.call('EXPIRE', group.served, USER_COUNTERS_S)
    end
end

-- Return who waits with the least counter, and the counter; nil if none waits.
-- Charges do not change the sorted set, so its first member gets its present place until the first has it already.
local function least(group)
    while true do
        local first = redis.call('ZRANGE', group.waiting, 0, 0, 'WITHSCORES')
        if not first[1] then
            return nil
        end
        local bound, counter = tonumber(first[2]), tonumber(redis.pcall('HGET', group.served, first[1]))
        if not counter or counter < bound then -- the counter was forgotten while its owner waited
            set_counter(group, first[1], bound)
        end
        if not counter or counter <= bound then
            return first[1], bound
        end
        redis.call('ZADD', group.waiting, string.format('%.0f', counter), first[1])
    end
end

-- Return the counter of a tenant or user that does not wait: at least the least counter of those who wait, so that idle
-- time earns no service.
local function lifted(group, name)
    local _, floor = least(group)
    local known = redis.call('HMGET', group.served, name, FLOOR)
    local own = tonumber(known[1])
    floor = floor or tonumber(known[2]) or 0
    if own and own >= floor then
        return own
    end
    if not own and redis.call('HLEN', group.served) >= MAX_COUNTERS then
        redis.call('DEL', group.served)
        set_counter(group, FLOOR, floor)
    end
    set_counter(group, name, floor)
    return floor
end

local function join(group, name)
    if not redis.call('ZSCORE', group.waiting, name) then
        redis.call('ZADD', group.waiting, string.format('%.0f', lifted(group, name)), name)
    end
end

-- Charge the prompt of a request that is taken, to its tenant and its user. counters: theirs before.
local function charge_prompt(prefix, share, counters)
    local prompt = amount(share.prompt, INPUT_COST, share.weight)
    for i, group in ipairs({tenants_of(prefix, share.class), users_of(prefix, share.class, share.tenant)}) do
        set_counter(group, FLOOR, counters[i])
        charge(group, i == 1 and share.tenant or share.user, prompt)
    end
end

-- Take back the charge for the prompt of a request that was taken and has not run.
local function refund_prompt(prefix, share)
    local prompt = 0 - amount(share.prompt, INPUT_COST, share.weight)
    for i, group in ipairs({tenants_of(prefix, share.class), users_of(prefix, share.class, share.tenant)}) do
        local name = i == 1 and share.tenant or share.user
        charge(group, name, prompt)
        local counter = redis.pcall('HGET', group.served, name)
        if type(counter) == 'string' then -- the score of a member that waits is a lower bound again
            redis.call('ZADD', group.waiting, 'XX', counter, name)
        end
    end
end

-- Charge committed output tokens to tenants. tokens: by the field `tenant` of their requests.
local function charge_output(prefix, tokens)
    local served = prefix .. 'served:'
    for tenant, count in pairs(tokens) do
        local class, weight, name = string.match(tenant, '^(%l+) (%d+) (%S+)$')
        if class and weight ~= '0' then
            redis.pcall('HINCRBY', served .. class, name, amount(count, OUTPUT_COST, weight))
        end
    end
end

-- Add to what a tenant has in its lines.
local function add_waiting(prefix, tenant, requests, tokens)
    local key = prefix .. 'waiting'
    redis.call('HINCRBY', key, 'tokens ' .. tenant, tokens)
    if redis.call('HINCRBY', key, 'requests ' .. tenant, requests) <= 0 then
        redis.call('HDEL', key, 'requests ' .. tenant, 'tokens ' .. tenant)
    end
end

-- Return the fields of an entry. The entry of a request with one row has no field `rows`.
local function fields_of(id, cost, rows)
    if rows > 1 then
        return 'id', id, 'cost', cost, 'rows', rows
    end
    return 'id', id, 'cost', cost
end

-- Return the rows of a request from the fields of its entry: the sequences that it runs at once.
local function rows_of(fields)
    return math.max(1, tonumber(fields[6]) or 1)
end

-- Put a request at its place in the line of its user. before: its entry in another stream, whose time it keeps; '*'
-- without one. Return the name of its queue and its entry.
local function join_line(prefix, id, cost, rows, arrival, share, before)
    local queue = WAITING .. share.class
    local stream = prefix .. 'queue:' .. queue
    local entry = redis.pcall('XADD', stream, before, fields_of(id, cost, rows))
    if type(entry) == 'table' then -- the stream has a later entry
        entry = redis.call('XADD', stream, '*', fields_of(id, cost, rows))
    end
    redis.call('ZADD', line_of(prefix, share.class, share.tenant, share.user), arrival, entry)
    join(users_of(prefix, share.class, share.tenant), share.user)
    join(tenants_of(prefix, share.class), share.tenant)
    add_waiting(prefix, share.tenant, 1, cost)
    return queue, entry
end

-- Remove an entry from the line of a user, and the user and the tenant from those who wait if it was their last.
local function leave_line(prefix, class, tenant, user, entry, cost)
    local line, users = line_of(prefix, class, tenant, user), users_of(prefix, class, tenant).waiting
    if redis.call('ZREM', line, entry) == 1 then
        add_waiting(prefix, tenant, -1, 0 - cost) -- HINCRBY refuses -0
    end
    if redis.call('EXISTS', line) == 0 and redis.call('ZREM', users, user) == 1
        and redis.call('EXISTS', users) == 0 then
        redis.call('ZREM', tenants_of(prefix, class).waiting, tenant)
    end
end

-- Return the first entry of a stream that no worker has read, {id, {field, value, ...}}; nil without one.
local function first_unread(stream)
    local last = '0-0'
    for _, group in ipairs(redis.pcall('XINFO', 'GROUPS', stream)) do -- names and values in turn
        for i = 1, group[2] == GROUP and #group or 0, 2 do
            last = group[i] == 'last-delivered-id' and group[i + 1] or last
        end
    end
    return redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1]
end

-- End the blocking read of one idle worker, now or when it begins: requests wait in lines.
local function wake(prefix)
    if not first_unread(prefix .. 'wake') then
        redis.call('XADD', prefix .. 'wake', 'MAXLEN', 1, '*', 'lines', 1)
    end
end

-- Move a request that waits alone at the end of its stream to the line of its user: another request has come, and the
-- counters decide who is next.
local function put_back(prefix, class, unread)
    local id, req = unread[2][2], prefix .. 'req:' .. (unread[2][2] or '')
    local own = redis.pcall('HMGET', req, 'state', 'queue', 'entry', 'tenant', 'user', 'arrival', 'cost')
    local share, arrival, cost = share_of(own[4], own[5]), tonumber(own[6]), tonumber(own[7])
    if own[1] ~= 'queued' or own[2] ~= class or own[3] ~= unread[1] or not (share and arrival and cost) then
        return
    end
    redis.call('XDEL', prefix .. 'queue:' .. class, unread[1])
    refund_prompt(prefix, share)
    local queue, entry = join_line(prefix, id, cost, rows_of(unread[2]), arrival, share, unread[1])
    redis.call('HSET', req, 'queue', queue, 'entry', entry)
end

-- Put a new request into the stream of its class if nothing else waits there, so that an idle worker gets it at once;
-- else into the line of its user. A request with several rows always joins its line: a worker that blocks on the stream
-- gets the next entry whether it has the rows or not. Return the name of its queue and its entry.
local function enqueue(prefix, id, cost, rows, arrival, share)
    local class, tenants = share.class, tenants_of(prefix, share.class)
    if redis.call('EXISTS', tenants.waiting) == 0 then
        local unread = first_unread(prefix .. 'queue:' .. class)
        if unread then
            put_back(prefix, class, unread)
        elseif rows == 1 then
            local users = users_of(prefix, class, share.tenant)
            charge_prompt(prefix, share, {lifted(tenants, share.tenant), lifted(users, share.user)})
            return class, redis.call('XADD', prefix .. 'queue:' .. class, '*', fields_of(id, cost, rows))
        end
    end
    local queue, entry = join_line(prefix, id, cost, rows, arrival, share, '*')
    wake(prefix)
    return queue, entry
end

-- Move the next request of a class from its line to the stream of the class, unless it has more than `most` rows.
-- Return the rows of the request that was moved, or 0; and the id of the next request if it has too many rows.
local function move_next(prefix, class, most)
    local tenants = tenants_of(prefix, class)
    while true do
        local tenant, counter = least(tenants)
        if not tenant then
            return 0
        end
        local user, user_counter = least(users_of(prefix, class, tenant))
        local entry = user and redis.call('ZRANGE', line_of(prefix, class, tenant, user), 0, 0)[1]
        if not user then
            redis.call('ZREM', tenants.waiting, tenant)
        elseif not entry then
            leave_line(prefix, class, tenant, user, '', 0)
        else
            local stream = prefix .. 'queue:' .. WAITING .. class
            local queued = redis.call('XRANGE', stream, entry, entry)[1]
            local id, cost = queued and queued[2][2], queued and tonumber(queued[2][4]) or 0
            local rows = queued and rows_of(queued[2]) or 1
            if rows > most then
                return 0, id
            end
            leave_line(prefix, class, tenant, user, entry, cost)
            if queued then
                redis.call('XDEL', stream, entry)
                local moved = redis.call('XADD', prefix .. 'queue:' .. class, '*', fields_of(id, cost, rows))
                local req = prefix .. 'req:' .. id
                local own = redis.pcall('HMGET', req, 'entry', 'tenant', 'user')
                -- If the hash is lost or corrupt, the claim drops the entry.
                if own[1] == entry then
                    redis.call('HSET', req, 'queue', class, 'entry', moved)
                    local share = share_of(own[2], own[3])
                    if share then
                        charge_prompt(prefix, share, {counter, user_counter})
                    end
                end
                return rows
            end
        end
    end
end

-- Remove a request that will not run now from its line, or take back the charge for its prompt if it never ran.
-- own: its fields queue, entry, cost, tenant, user, deliveries.
local function leave_share(prefix, own)
    local share = share_of(own[4], own[5])
    if share and own[1] == WAITING .. share.class then
        leave_line(prefix, share.class, share.tenant, share.user, own[2] or '', tonumber(own[3]) or 0)
    elseif share and own[1] and own[6] == '0' then -- a parked request has no queue, and its charge is taken back already
        refund_prompt(prefix, share)
    end
end

-- Leave the line, and settle the counters, of a request that ends. own: as for leave_share, then the tokens that it used.
local function end_share(prefix, own)
    leave_share(prefix, own)
    local share = share_of(own[4], own[5])
    if share and own[6] ~= '0' then
        charge(users_of(prefix, share.class, share.tenant), share.user, amount(own[7], OUTPUT_COST, share.weight))
    end
end

-- True if a tenant may queue a request although the queue is at its bound: others wait too, the tenant has less than its
-- part of the bound, and the queue is below twice the bound.
local function is_below_part(prefix, tenant, cost, requests, tokens, max_requests, max_tokens)
    local own = redis.call('HMGET', prefix .. 'waiting', 'requests ' .. tenant, 'tokens ' .. tenant)
    local tenants = redis.call('HLEN', prefix .. 'waiting') / 2 + (own[1] and 0 or 1)
    return tenants > 1 and requests + 1 <= 2 * max_requests and tokens + cost <= 2 * max_tokens
        and tenants * (tonumber(own[1] or 0) + 1) <= max_requests
        and tenants * (tonumber(own[2] or 0) + cost) <= max_tokens
end
