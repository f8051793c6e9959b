"""Fair sharing: a request counts for a tenant, which has a weight, and for a user of the tenant."""

from __future__ import annotations

import re

# Tenant of calls without an API key. Other tenants are projects, whose ids have a slash.
ANONYMOUS_TENANT = "anonymous"
# Weights are relative: of two tenants that wait, one with twice the weight is served twice as many tokens.
DEFAULT_WEIGHT = 100
MAX_WEIGHT = 1000
# Costs of a token of a prompt and of an answer, as in the paper.
INPUT_COST = 1
OUTPUT_COST = 2
# Counters are integers: a prompt token of a tenant with the default weight adds as many units.
COUNTER_UNITS = 10_000
# Counters of tenants in a class, and of users of a tenant. Beyond it, the counters of those who do not wait are
# forgotten, and all begin at the least counter again.
MAX_COUNTERS = 10_000
# Field of the counters: that of the tenant or user that was taken last. The name has more than 64 characters, so that
# Redis stores the hash as a table from the start: a short hash is a list, which each charge would search.
FLOOR = "floor".ljust(65, "-")
# Life of the counters of a tenant's users after their last change.
USER_COUNTERS_S = 86_400

_TENANT = re.compile(r"[a-z]+ ([0-9]{1,4}) (\S{1,256})", re.ASCII)
_USER = re.compile(r"[0-9]+ ([0-9a-f]{0,64})", re.ASCII)


def read_share(tenant: str, user: str) -> tuple[str, int, str]:
    """The tenant, its weight and the user in the fields `tenant` and `user` that scripts write.

    Corrupt fields count as those of a request of nobody.
    """
    first, second = _TENANT.fullmatch(tenant), _USER.fullmatch(user)
    if first is None or second is None or not 1 <= int(first[1]) <= MAX_WEIGHT:
        return ANONYMOUS_TENANT, DEFAULT_WEIGHT, ""
    return first[2], int(first[1]), second[1]
