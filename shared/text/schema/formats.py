"""Values of `format` that answers follow, and the patterns that replace them."""

from __future__ import annotations

from typing import Any

# Dates and times of RFC 3339, with `T` and `Z` in upper case. The year 0000 is excluded: Python's `datetime` lacks it.
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DAY = (
    "(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    "|02-(?:0[1-9]|1[0-9]|2[0-8]))"
)
_DATE = f"(?:{_YEAR}-{_DAY}|{_LEAP_YEAR}-02-29)"
_FRACTION = r"(?:\.[0-9]{1,9})?"
_MINUTE = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
# The second 60 exists only at 23:59 UTC. This lists the local times for offsets of whole and half hours.
_LEAP_SECOND = "|".join(
    [f"23:59:60{_FRACTION}Z"]
    + [
        f"{hour:02}:59:60{_FRACTION}(?:[+]{(hour + 1) % 24:02}:00|-{23 - hour:02}:00)"
        f"|{hour:02}:29:60{_FRACTION}(?:[+]{hour:02}:30|-{23 - hour:02}:30)"
        for hour in range(24)
    ]
)
_TIME = f"(?:{_MINUTE}:[0-5][0-9]{_FRACTION}(?:Z|[+-]{_MINUTE})|{_LEAP_SECOND})"

# Formats that answers follow, each with the pattern that replaces it. llguidance has all of these formats, but allows
# 29 February in any year and the second 60 in any minute. Other formats are annotations, as in JSON Schema 2020-12.
FORMATS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}$",
    "time": f"^{_TIME}$",
    "duration": None,
    "email": None,
    "hostname": None,
    "ipv4": None,
    "ipv6": None,
    "uri": None,
    "uuid": None,
}


def replace_format(schema: dict[str, Any]) -> None:
    """Replace a format by its pattern, in place; a format that is an annotation vanishes."""
    name = schema["format"]
    if name in FORMATS and FORMATS[name] is None:
        return
    del schema["format"]
    if name not in FORMATS:
        return
    if "pattern" not in schema:
        schema["pattern"] = FORMATS[name]
    elif type(others := schema.get("allOf", [])) is list:
        schema["allOf"] = [*others, {"pattern": FORMATS[name]}]
