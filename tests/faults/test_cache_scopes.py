"""Two organisations at the real stack: the prefix cache tells none of them what the other one sent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.faults.calls import FAST, bearers, make_keys
from tests.support.faults.stack import FaultStack, Stream

COMMON = " ".join(f"w{index}" for index in range(40))
SECRET = " ".join(f"w{index}" for index in range(100, 140))


def cached(url: str, headers: dict[str, str], prompt: str) -> int:
    call: dict[str, Any] = {"model": "tiny", "prompt": prompt, "max_tokens": 1, "temperature": 0}
    stream = Stream(url, call, headers).wait_end()
    assert stream.status == 200, stream.text_body
    return int((stream.answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens", 0))


@pytest.mark.slow
def test_cached_tokens_do_not_depend_on_the_prompts_of_another_organisation(stack: FaultStack, tmp_path: Path) -> None:
    tenants = make_keys(stack.redis_server.url, "acme/a1", "acme/a2", "zoo/b")
    keys = {"": {}} | dict(zip(("a1", "a2", "b"), bearers(tenants), strict=True))
    pins = tmp_path / "pins.toml"
    pins.write_text(f'[[prefix]]\nname = "common"\ntext = "{COMMON}"\n')
    stack.worker("a", *FAST, "--pinned-prefixes", str(pins))
    _, url = stack.gateway()
    _, sharing = stack.gateway("--prefix-cache-scope", "all")
    assert cached(url, keys["a1"], SECRET) == 0
    known = cached(url, keys["a1"], SECRET)
    assert known >= 16
    # A guess of another organisation, or without a key, finds nothing; the same organisation shares.
    assert cached(url, keys["b"], SECRET) == 0
    assert cached(url, keys[""], SECRET) == 0
    assert cached(url, keys["a2"], SECRET) == known
    # Pinned prefixes are of the operator: all share them, and nothing behind them.
    prompt = f"{COMMON} {SECRET}"
    pinned = [cached(url, keys[name], prompt) for name in ("a1", "b", "")]
    assert pinned[0] == pinned[1] == pinned[2] >= 32
    assert cached(url, keys["a2"], prompt) > pinned[0]
    # With sharing for all, calls with and without keys share.
    cached(sharing, keys["a1"], SECRET)
    assert cached(sharing, keys["b"], SECRET) == known
