from __future__ import annotations

import re
from importlib.resources import files

import msgpack
from redis.asyncio import Redis

from quire.shared import keys, share
from quire.shared.broker.scripts import Script, constants, load_script, script_source
from quire.shared.messages import VERSION
from quire.shared.redis.clients import command_client


async def test_lua_has_the_constants_of_python(client: Redis) -> None:
    names = re.findall(r"^local (\w+) = ", constants(), re.M)
    packed = await client.eval(constants() + f"return cmsgpack.pack({{{', '.join(names)}}})", 0)  # type: ignore[misc]
    found = dict(zip(names, msgpack.unpackb(packed), strict=True))
    assert found.pop("MESSAGE_VERSION") == VERSION
    assert found.pop("FORGET_WORKER_MS") == 1000 * keys.FORGET_WORKER_S
    expected = {name: getattr(keys if hasattr(keys, name) else share, name) for name in found}
    assert found == {name: list(value) if isinstance(value, tuple) else value for name, value in expected.items()}


def test_no_script_repeats_a_shared_constant() -> None:
    scripts = [path for path in (files("quire.shared") / "scripts").iterdir() if path.name.endswith(".lua")]
    assert len(scripts) > 10
    for script in scripts:
        code = re.sub(r"--.*", "", script.read_text())
        for word in (keys.GROUP, *keys.QUEUES):
            assert f"'{word}'" not in code, f"{script.name} spells {word}"


async def test_a_script_is_sent_once_and_then_called_by_its_hash(client: Redis) -> None:
    await client.script_flush()
    script = load_script(client, "cancel")
    calls_before = await _calls(client)
    for _ in range(3):
        assert await script(keys=["quire:{lane}:req:none"], args=["quire:{lane}:", "none", 1, ""]) == b"unknown"
    calls = {name: count - calls_before.get(name, 0) for name, count in (await _calls(client)).items()}
    assert (calls["eval"], calls["evalsha"]) == (1, 3)


async def test_a_script_returns_what_its_source_says(client: Redis) -> None:
    assert script_source("read").endswith("return found\n")
    assert await Script(client, constants() + "return {GROUP, ARGV[1]}")(args=["x"]) == [b"workers", b"x"]


async def test_a_script_is_sent_again_to_a_server_that_has_lost_it(redis_url: str) -> None:
    client = command_client(redis_url)
    add = Script(client, "return redis.call('INCRBY', KEYS[1], ARGV[1])")
    assert await add(keys=["sum"], args=[3]) == 3
    await client.script_flush()
    assert await add(keys=["sum"], args=[4]) == 7
    assert await add(keys=["sum"], args=[5]) == 12
    await client.aclose()


async def _calls(client: Redis) -> dict[str, int]:
    """Return the number of times that the server ran each command."""
    stats = await client.info("commandstats")
    return {name.removeprefix("cmdstat_"): entry["calls"] for name, entry in stats.items()}
