"""Pictures through the chat page and a whole stack: the answers are those of the API to the same files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from playwright.async_api import Page, expect

from tests.conftest import quire_processes
from tests.page.conftest import IN_BROWSER, open_chat, send, set_field, stored
from tests.page.test_added_pictures import TRAY, file, give
from tests.support.gateway.running import until
from tests.test_adapter_calls import call
from tests.test_images import ask, make_seeing

pytestmark = IN_BROWSER


async def test_an_answer_about_a_pasted_picture_is_that_of_the_api(page: Page, tmp_path: Path) -> None:
    with quire_processes() as start:
        server = start(
            "serve", str(make_seeing(tmp_path / "seeing")), "--port", "0", "--state-dir", str(tmp_path / "state")
        )
        url = server.wait_ready()
        await open_chat(page, url)
        await set_field(page, temperature="0", max_tokens="12")
        found = []
        for color in ("red", "green"):
            await page.click("#new")
            await give(page, "paste", file(color, (60, 40)))
            await expect(page.locator(TRAY)).to_have_count(1)
            await send(page, "What is this?")

            # What is stored, since Markdown shows some letters of random weights in another way.
            async def run() -> Any:
                return (await stored(page))[0]["turns"][0]["runs"][0]

            async def is_done() -> bool:
                return bool((await run())["state"] == "done")

            await until(is_done)
            shown = await run()
            body = ask(file(color, (60, 40)), ignore_eos=False)
            status, answer = await asyncio.to_thread(call, f"{url}/v1/chat/completions", "POST", **body)
            assert status == 200, answer
            text = answer["choices"][0]["message"]["content"]
            assert shown["answers"][0]["text"] == text
            assert shown["usage"]["prompt_tokens"] == answer["usage"]["prompt_tokens"]
            found.append(text)
        assert found[0] != found[1]
