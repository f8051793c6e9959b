"""Images of data URLs are read in processes of their own, and hostile ones are refused by name."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import random
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image as Pillow

from quire.gateway.errors.api_errors import InvalidRequest, ServerBusy
from quire.gateway.features.images import images as door
from quire.gateway.features.images import picture_check
from quire.gateway.features.images.images import Images
from tests.support.pictures import chunk, exif, mutated, noise, png, saved, variants

MAX_BYTES, MAX_PIXELS, PROCESSES = 8_000_000, 4_000_000, 2
WHERE = "messages[0].content[1].image_url"
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
SMALL = saved(Pillow.new("RGB", (4, 3), "red"), "PNG")


@pytest.fixture
async def images() -> AsyncIterator[Images]:
    reader = Images(max_images=3, max_bytes=MAX_BYTES, max_pixels=MAX_PIXELS, processes=PROCESSES)
    yield reader
    reader.close()
    assert checkers() == {}


def url(file: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(file).decode()}"


async def read(images: Images, text: str, where: str = WHERE, **keys: str) -> door.Image:
    [image] = await images.read_all([{"url": text, "where": where, **keys}])
    return image


async def refusal(images: Images, text: str) -> str:
    """Read an image that is refused. Returns the message."""
    with pytest.raises(InvalidRequest) as caught:
        await read(images, text)
    assert caught.value.param == WHERE
    assert WHERE in caught.value.message
    return caught.value.message


def checkers() -> dict[int, dict[str, int]]:
    """Returns the memory of the processes that check images, in bytes: the fields of /proc/PID/status."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/status"):
        try:
            lines = [line.split() for line in path.read_text().splitlines()]
            command = path.with_name("cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if ["PPid:", str(os.getpid())] in lines and b"picture_trial" in command:
            found[int(path.parent.name)] = {line[0][:-1]: int(line[1]) * 1024 for line in lines if line[-1] == "kB"}
    return found


async def test_an_image_of_each_format(images: Images) -> None:
    for format in FORMATS:
        file = saved(noise("RGB", 30, 20), format)
        image = await read(images, url(file, f"image/{format.lower()}"))
        assert image == door.Image(file, hashlib.sha256(file).hexdigest(), 30, 20)


async def test_width_and_height_are_upright(images: Images) -> None:
    image = await read(images, url(saved(noise("RGB", 30, 20), "JPEG", exif=exif(6))))
    assert (image.width, image.height) == (20, 30)


@pytest.mark.parametrize("head", ["data:image/jpeg", "data:text/plain;charset=utf-8", "DATA:IMAGE/PNG", "data:"])
async def test_the_bytes_decide_on_the_format(images: Images, head: str) -> None:
    assert (await read(images, f"{head};base64,{base64.b64encode(SMALL).decode()}")).data == SMALL


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("https://example.com/a.png", "does not fetch; give a data URL"),
        ("HTTP://10.0.0.1/a.png", "does not fetch"),
        ("file:///etc/passwd", "must be a data URL"),
        ("", "must be a data URL"),
        ("data:image/png," + "a" * 400, "in base64"),
        ("data:image/png;base64" + "a" * 400, "in base64"),
        ("data:image/png;base64,ä" + "a" * 1000, "in base64"),
        ("data:image/png;base64,\ud800aaa", "in base64"),
        ("data:image/png;base64,", "not a PNG, JPEG, WebP or GIF file"),
        (url(SMALL)[:-2], "its base64 is wrong"),
        (url(SMALL) + "\n", "its base64 is wrong"),
        (url(SMALL)[:40] + " " + url(SMALL)[40:], "its base64 is wrong"),
        (url(SMALL).replace("+", "-").replace("/9", "_9") + "-_==", "its base64 is wrong"),
        ("data:image/png;base64,Zm9vZg==Zm9v", "its base64 is wrong"),
        (url(b"<svg/>", "image/svg+xml"), "not a PNG, JPEG, WebP or GIF file"),
        (url(bytes(MAX_BYTES + 1)), f"{MAX_BYTES + 1:,} bytes; this server allows at most {MAX_BYTES:,}"),
        (url(png(2001, 2000, 1, 0, [])), "2,001 x 2,000 pixels; at most 4,000,000"),
    ],
)
async def test_what_is_no_image_is_refused_by_name(images: Images, text: str, says: str) -> None:
    message = await refusal(images, text)
    assert says in message
    assert len(message) < 400


async def test_the_largest_file_is_accepted(images: Images) -> None:
    file = png(1, 1, 8, 0, [b"\0"])
    rest = MAX_BYTES - len(file) - len(chunk(b"teSt", b""))
    image = await read(images, url(png(1, 1, 8, 0, [b"\0"], chunk(b"teSt", bytes(rest)))))
    assert len(image.data) == MAX_BYTES


async def test_the_images_of_a_call_are_few(images: Images) -> None:
    calls = [{"url": url(SMALL), "where": f"messages[{index}]"} for index in range(4)]
    assert len(await images.read_all(calls[:3])) == 3
    with pytest.raises(InvalidRequest, match="4 images; this server allows at most 3") as caught:
        await images.read_all(calls)
    assert caught.value.param == "messages[3]"


def webp(width: int, height: int, pixels: bytes) -> bytes:
    """A WebP file with a canvas of this size."""
    canvas = struct.pack("<I", 16) + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", len(canvas)) + canvas + pixels
    return b"RIFF" + struct.pack("<I", len(body)) + body


def bombs() -> dict[str, bytes]:
    zeros = zlib.compress(bytes(50_000_000), 9)
    gif = saved(Pillow.new("P", (4, 4)), "GIF")
    jpeg = saved(Pillow.new("RGB", (16, 16)), "JPEG")
    size = jpeg.index(b"\xff\xc0") + 5
    lossless = saved(noise("RGB", 8, 8), "WEBP", lossless=True)[12:]
    frame = gif.index(b",", 13)
    return {
        "png size": png(50_000, 50_000, 8, 2, []),
        "png rows": png(2000, 2000, 8, 0, [bytes(200_000_000)]),
        "png iCCP": png(1, 1, 8, 0, [b"\0"], chunk(b"iCCP", b"icc\0\0" + zeros)),
        "png zTXt": png(1, 1, 8, 0, [b"\0"], *[chunk(b"zTXt", b"key\0\0" + zeros)] * 100),
        "png iTXt": png(1, 1, 8, 0, [b"\0"], chunk(b"iTXt", b"key\0\1\0\0\0" + zeros)),
        "gif screen": gif[:6] + struct.pack("<HH", 65535, 65535) + gif[10:],
        "gif frame": gif[: frame + 5] + struct.pack("<HH", 65535, 65535) + gif[frame + 9 :],
        "webp canvas": webp(16383, 16383, lossless),
        "webp wide canvas": webp(2**24, 2**7, lossless),
        "webp lossless": saved(Pillow.new("RGB", (16383, 3)), "WEBP", lossless=True).replace(
            (16382 | 2 << 14).to_bytes(4, "little"), (16382 | 16382 << 14).to_bytes(4, "little")
        ),
        "jpeg size": jpeg[:size] + struct.pack("!HH", 65500, 65500) + jpeg[size + 4 :],
    }


async def test_decompression_bombs_are_refused(images: Images) -> None:
    """Except those that take no memory: the rows that follow those of a PNG file are not decoded."""
    for name, file in bombs().items():
        if name == "png rows":
            await read(images, url(file))
            continue
        message = await refusal(images, url(file))
        assert "makes the decoder fail" not in message, name
    (memory,) = checkers().values()
    assert memory["VmHWM"] < 64 * 1024 * 1024


async def test_animations_cost_one_frame(images: Images) -> None:
    first, *others = [Pillow.new("P", (1000, 800), colour) for colour in range(60)]
    for format in ("GIF", "PNG", "WEBP"):
        file = saved(first, format, save_all=True, append_images=others, quality=20)
        image = await read(images, url(file))
        assert (image.width, image.height) == (1000, 800)
    assert all(memory["VmHWM"] < 64 * 1024 * 1024 for memory in checkers().values())


@pytest.mark.soak
async def test_a_file_that_takes_too_long_is_refused() -> None:
    """A JPEG file of padding, which Pillow reads byte by byte."""
    images = Images(max_images=1, max_bytes=100_000_000, max_pixels=1000, processes=1)
    assert "takes more than 10 s" in await refusal(images, url(b"\xff\xd8" + bytes([255]) * 90_000_000))
    assert (await read(images, url(SMALL))).width == 4
    images.close()


async def stopped(images: Images) -> tuple[int, asyncio.Task[Any]]:
    """Stops a process before it checks an image. Returns its id, and the call that waits for it."""
    await read(images, url(SMALL))
    (process,) = checkers()
    os.kill(process, signal.SIGSTOP)
    return process, asyncio.create_task(read(images, url(SMALL)))


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        (signal.SIGKILL, 503, "interrupted"),
        (signal.SIGTERM, 503, "interrupted"),
        (signal.SIGSEGV, 400, "makes the decoder fail"),
        (signal.SIGXCPU, 400, "takes more than 10 s"),
    ],
)
async def test_a_process_that_ends_costs_one_call(images: Images, sent: signal.Signals, status: int, says: str) -> None:
    process, call = await stopped(images)
    others = await asyncio.gather(*(read(images, url(SMALL)) for _ in range(8)))
    assert len(others) == 8
    assert not call.done()
    os.kill(process, sent)
    os.kill(process, signal.SIGCONT)
    with pytest.raises((InvalidRequest, ServerBusy), match=says) as caught:
        await call
    assert caught.value.status == status
    assert process not in checkers()
    assert (await read(images, url(SMALL))).width == 4


async def test_a_process_that_hangs_costs_one_call(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    await read(images, url(SMALL))
    (process,) = checkers()
    os.kill(process, signal.SIGSTOP)
    with monkeypatch.context() as patch:
        patch.setattr(picture_check, "TIMEOUT_S", 0.2)
        with pytest.raises(ServerBusy, match="interrupted") as caught:
            await read(images, url(SMALL))
    assert "Retry-After" in caught.value.headers
    assert process not in checkers()
    assert (await read(images, url(SMALL))).width == 4


async def test_a_process_that_dies_while_it_is_idle_costs_one_call(images: Images) -> None:
    await read(images, url(SMALL))
    (process,) = checkers()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(ServerBusy):
        await read(images, url(SMALL))
    assert (await read(images, url(SMALL))).width == 4


async def test_few_images_wait(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_WAITING", 1)
    process, call = await stopped(images)
    await asyncio.sleep(0)
    with pytest.raises(ServerBusy, match="Too many images wait"):
        await read(images, url(SMALL))
    os.kill(process, signal.SIGCONT)
    assert (await call).width == 4


async def test_calls_that_wait_for_memory_hold_up_no_others(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(door, "MAX_WAITING", 1)
    waits, gate = asyncio.Event(), asyncio.Event()

    async def hold(size: int, where: str) -> None:
        waits.set()
        await gate.wait()

    async def content() -> bytes:
        return SMALL

    async def find(file_id: str, owner: str) -> tuple[int, Any]:
        return len(SMALL), content

    images.find_file = find
    part = {"file_id": "file-1", "where": WHERE}
    call = asyncio.create_task(images.read_all([part], door.ImageSender(hold=hold)))
    await waits.wait()
    assert (await read(images, url(SMALL))).width == 4
    gate.set()
    assert (await call)[0].width == 4


async def test_a_process_is_replaced_after_many_images(images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picture_check, "MAX_SERVED", 3)
    for _ in range(3):
        before = set(checkers())
        await read(images, url(SMALL))
    assert len(before) == 1
    assert not checkers()


def test_processes_end_with_the_gateway() -> None:
    program = """
import asyncio, sys
from tests.gateway.features.images.test_images import SMALL, Images, checkers, read, url
images = Images(max_images=1, max_bytes=9999, max_pixels=9999, processes=1)
asyncio.run(read(images, url(SMALL)))
print(*checkers(), flush=True)
sys.stdin.read()
"""
    gateway = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert gateway.stdout is not None
    process = Path("/proc", gateway.stdout.readline().decode().strip())
    assert b"picture_trial" in (process / "cmdline").read_bytes()
    gateway.kill()
    gateway.communicate()
    while process.exists() and "State:\tZ" not in (process / "status").read_text():
        time.sleep(0.05)


async def read_mutated(images: Images, format: str, number: int) -> None:
    """Read mutated files. Each gets a picture or a refusal, and no decoder fails."""
    rng, files = random.Random(format), variants(format)
    counts = {"pictures": 0, "refused": 0}

    async def read_some(numbers: range) -> None:
        for index in numbers:
            file = mutated(files[index % len(files)], rng)
            try:
                image = await read(images, url(file))
            except InvalidRequest as error:
                counts["refused"] += 1
                if "decoder fail" in error.message or "takes more than" in error.message:
                    pytest.fail(f"{error.message} {file.hex()}")
            else:
                counts["pictures"] += 1
                assert image.data == file
                assert 0 < image.width * image.height <= MAX_PIXELS

    await asyncio.gather(*(read_some(range(first, number, 4)) for first in range(4)))
    print(format, json.dumps(counts))
    assert min(counts.values()) > number / 20
    # 4 million pixels of 24 bytes, and what a process has without an image.
    assert all(memory["VmHWM"] < 200_000_000 for memory in checkers().values())


@pytest.mark.parametrize("format", FORMATS)
async def test_mutated_files(images: Images, format: str) -> None:
    await read_mutated(images, format, 300)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("format", FORMATS)
async def test_ten_thousand_mutated_files(images: Images, format: str) -> None:
    await read_mutated(images, format, 10_000)


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(1800)
async def test_memory_is_bounded_over_a_thousand_large_images() -> None:
    """50 calls at a time, each with a file of 10 MB. The bodies that they come in are not counted here."""
    images = Images(max_images=1, max_bytes=20_000_000, max_pixels=MAX_PIXELS, processes=PROCESSES)
    text = url(saved(Pillow.frombytes("RGB", (1850, 1800), random.Random(1).randbytes(1850 * 1800 * 3)), "PNG"))
    assert len(text) > 13_300_000
    memory: list[int] = []
    of_checks: list[int] = []

    async def call(number: int) -> None:
        for _ in range(number):
            await read(images, text)
            memory.append(own_memory())
            of_checks.append(sum(fields["VmRSS"] for fields in checkers().values()))

    before = own_memory()
    await asyncio.gather(*(call(2) for _ in range(50)))
    early = max(memory)
    memory.clear()
    await asyncio.gather(*(call(18) for _ in range(50)))
    images.close()
    print(
        f"MB: before {before >> 20}, first 100 {early >> 20}, next 900 {max(memory) >> 20}, after {own_memory() >> 20}"
    )
    print(f"MB of the processes together: at most {max(of_checks) >> 20}")
    # For each process: a slice of the text, and the file twice. A finished file may wait for its call.
    assert early - before < PROCESSES * 50_000_000
    assert max(memory) < early + 25_000_000


def own_memory() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))
