"""A picture through the chat page, a whole stack and the demonstration model that sees, to the right words."""

from __future__ import annotations

import io

import pytest
from playwright.async_api import Page, expect

from tests.conftest import quire_processes
from tests.models.demo.vision.test_seeing_checkpoint import circles_and_square
from tests.page.conftest import IN_BROWSER, open_chat, send
from tests.page.test_added_pictures import TRAY, give

pytestmark = IN_BROWSER


async def test_the_model_says_what_is_in_a_pasted_picture(page: Page, tmp_path_factory: pytest.TempPathFactory) -> None:
    out = io.BytesIO()
    circles_and_square().save(out, "PNG")
    with quire_processes() as start:
        state = str(tmp_path_factory.mktemp("state"))
        server = start("serve", "models/demo-vision", "--port", "0", "--state-dir", state)
        await open_chat(page, server.wait_ready())
        await give(page, "paste", out.getvalue())
        await expect(page.locator(TRAY)).to_have_count(1)
        await send(page, "What is in this picture?")
        await expect(page.locator(".text")).to_have_text("Two red circles and a blue square.")
        # The next question is about the same picture.
        await send(page, "How many circles are there?")
        await expect(page.locator(".text").last).to_have_text("There are two circles.")
