"""Pictures in messages: pasted, dropped or chosen, sent, shown, kept with their conversation, and refused."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path
from typing import Any

from PIL import Image
from playwright.async_api import Page, expect

from tests.page.conftest import IN_BROWSER, open_chat, stored
from tests.page.test_access import FAINT, MISTAKES
from tests.page.test_versions import choose
from tests.support.gateway.running import until
from tests.support.page.stub import Call, Script, Stub

pytestmark = IN_BROWSER

CARD: dict[str, Any] = {
    "capabilities": ["chat", "images"],
    "max_images": 3,
    "max_image_bytes": 1_000_000,
    "max_image_pixels": 1_000_000,
}
SHOWN, TRAY = ".turn .pictures img", "#tray img"
# Gives files to the page as a paste or a drop does.
GIVE = """([kind, files]) => {
  const data = new DataTransfer();
  for (const [name, type, base64] of files) {
    const bytes = Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
    data.items.add(new File([bytes], name, { type }));
  }
  const options = { bubbles: true, cancelable: true, clipboardData: data, dataTransfer: data };
  const made = kind === "paste" ? new ClipboardEvent(kind, options) : new DragEvent(kind, options);
  document.getElementById("input").dispatchEvent(made);
}"""
# The number of files in the browser's storage.
KEPT = """() => new Promise((resolve) => {
  indexedDB.open("quire").onsuccess = ({ target: { result: database } }) => {
    database.transaction("pictures").objectStore("pictures").count().onsuccess = ({ target }) => {
      database.close();
      resolve(target.result);
    };
  };
})"""


def file(color: str = "red", size: tuple[int, int] = (8, 6)) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, color).save(out, "PNG")
    return out.getvalue()


async def give(page: Page, kind: str, *files: bytes, name: str = "red.png", media_type: str = "image/png") -> None:
    given = [[name, media_type, base64.b64encode(data).decode()] for data in files]
    await page.evaluate(GIVE, [kind, given])


async def seeing(page: Page, stub: Stub) -> Page:
    stub.card = CARD
    await open_chat(page, stub.url)
    return page


def content(call: Call) -> list[dict[str, Any]]:
    """What the last message of a call consists of."""
    assert call.body is not None
    found: list[dict[str, Any]] = call.body["messages"][-1]["content"]
    return found


def files_in(call: Call) -> list[bytes]:
    """The files of all pictures of a call."""
    assert call.body is not None
    parts = [part for message in call.body["messages"] for part in message["content"] if isinstance(part, dict)]
    urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return [base64.b64decode(url.partition(",")[2]) for url in urls]


async def answered(page: Page, stub: Stub, text: str, number: int = 1) -> Call:
    await page.fill("#input", text)
    await page.press("#input", "Enter")
    call = await stub.call()
    await Script(f"{number:032x}").play(call, ["one"])
    await expect(page.locator("#send")).to_be_visible()
    return call


async def settled(page: Page) -> None:
    """Wait until the newest conversation is stored with the ends of its answers: a reload resumes the others."""

    async def is_stored() -> bool:
        runs = [run for turn in (await stored(page))[0]["turns"] for run in turn["runs"]]
        return all(run["state"] in ("done", "stopped") for run in runs)

    await until(is_stored)


async def test_pictures_are_pasted_dropped_chosen_removed_and_sent(page: Page, stub: Stub) -> None:
    await seeing(page, stub)
    await give(page, "paste", file("red"))
    await give(page, "drop", file("green"), name="green.png")
    await expect(page.locator(TRAY)).to_have_count(2)
    async with page.expect_file_chooser() as chooser:
        await page.click("#attach")
    assert (await chooser.value).is_multiple()
    await (await chooser.value).set_files({"name": "blue.png", "mimeType": "image/png", "buffer": file("blue")})
    await expect(page.locator(TRAY)).to_have_count(3)
    assert await page.locator(TRAY).last.get_attribute("alt") == "blue.png, 8 × 6 pixels"
    # A fourth one would be one too many for the server.
    await give(page, "paste", file())
    await expect(page.locator("#notice")).to_have_text(
        "This conversation has 3 pictures, and the server takes no more."
    )
    await page.get_by_role("button", name="Remove green.png").press("Enter")
    await expect(page.locator("#input")).to_be_focused()
    call = await answered(page, stub, "What is this?")
    assert [part["type"] for part in content(call)] == ["image_url", "image_url", "text"]
    assert content(call)[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert files_in(call) == [file("red"), file("blue")]
    await expect(page.locator(TRAY)).to_have_count(0)
    await expect(page.locator(SHOWN)).to_have_count(2)
    await expect(page.locator("#status")).to_have_text("Answer: one")


async def test_a_picture_is_sent_alone_and_shown_in_full_size(page: Page, stub: Stub) -> None:
    await seeing(page, stub)
    await give(page, "paste", file())
    await expect(page.locator(TRAY)).to_have_count(1)
    await page.press("#input", "Enter")
    call = await stub.call()
    assert [part["type"] for part in content(call)] == ["image_url"]
    await page.click(".turn .picture")
    large = page.locator("dialog img")
    await expect(large).to_be_visible()
    assert await large.evaluate("(image) => [image.naturalWidth, image.alt]") == [8, "red.png, 8 × 6 pixels"]
    # Escape closes it, and does not stop the answer.
    await page.keyboard.press("Escape")
    await expect(large).to_have_count(0)
    await Script().play(call, ["one"])
    await expect(page.locator(".text")).to_have_text("one")
    await expect(page.locator("#title")).to_have_text("red.png")


async def test_pictures_stay_after_a_reload_and_in_versions_and_go_with_their_conversation(
    page: Page, stub: Stub
) -> None:
    await seeing(page, stub)
    await give(page, "paste", file())
    await expect(page.locator(TRAY)).to_have_count(1)
    await answered(page, stub, "What is this?")
    await settled(page)
    await open_chat(page, stub.url)
    await expect(page.locator(SHOWN)).to_have_js_property("naturalWidth", 8)
    await page.click("text=Regenerate")
    again = await stub.call()
    assert files_in(again) == [file()]
    await Script("02" * 16).play(again, ["two"])
    await expect(page.locator(".text")).to_have_text("two")
    await page.click("text=Edit")
    await page.fill(".editor textarea", "And now?")
    await page.press(".editor textarea", "Enter")
    edited = await stub.call()
    assert (files_in(edited), content(edited)[-1]["text"]) == ([file()], "And now?")
    await Script("03" * 16).play(edited, ["three"])
    await expect(page.locator("#send")).to_be_visible()
    # Later messages send it again.
    later = await answered(page, stub, "More", 4)
    assert files_in(later) == [file()]
    await settled(page)
    assert await page.evaluate(KEPT) == 1
    # A tab that has not shown the picture removes it, and brings it back.
    other = await page.context.new_page()
    await open_chat(other, stub.url)
    await other.click("#shelf-button")
    await other.click("[aria-label='Forget “What is this?”']")
    await expect(other.locator("text=Undo")).to_be_visible()
    assert await page.evaluate(KEPT) == 0
    await other.click("text=Undo")
    await expect(other.locator(SHOWN)).to_have_js_property("naturalWidth", 8)
    assert await page.evaluate(KEPT) == 1
    await other.click("[aria-label='Forget “What is this?”']")
    await expect(other.locator(".turn")).to_have_count(0)
    assert await page.evaluate(KEPT) == 0
    # A tab that still shows the conversation stores it again, with its picture.
    await answered(page, stub, "Once more", 5)
    assert await page.evaluate(KEPT) == 1


async def test_an_export_has_its_pictures(page: Page, stub: Stub, tmp_path: Path) -> None:
    await seeing(page, stub)
    await give(page, "paste", file())
    await expect(page.locator(TRAY)).to_have_count(1)
    await answered(page, stub, "What is this?")
    await settled(page)
    await page.click("#shelf-button")
    async with page.expect_download() as download:
        await page.click("#export")
    exported = json.loads((await (await download.value).path()).read_text())
    (picture,) = exported["turns"][0]["pictures"]
    assert base64.b64decode(picture["data"].partition(",")[2]) == file()
    await page.click("[aria-label='Forget “What is this?”']")
    await expect(page.locator("#conversations li")).to_have_count(0)
    # Pictures of other types, such as SVG, are not taken from a file.
    exported["turns"][0]["pictures"].append({**picture, "id": "other", "type": "image/svg+xml"})
    (tmp_path / "one.json").write_text(json.dumps(exported))
    await open_chat(page, stub.url)  # the sidebar is open again
    async with page.expect_file_chooser() as chooser:
        await page.click("#import")
    await (await chooser.value).set_files(tmp_path / "one.json")
    await page.click(".conversation")
    await expect(page.locator(".turn .picture").last).to_have_text("red.png is no longer in this browser")
    await expect(page.locator(SHOWN)).to_have_js_property("naturalWidth", 8)
    (conversation,) = await stored(page)
    assert all("data" not in one for one in conversation["turns"][0]["pictures"])
    # A call without it would be another one: it is not sent.
    await page.click("text=Regenerate")
    await expect(page.locator(".trouble span").first).to_have_text(
        "The picture “red.png” is no longer in this browser: add it again to a message of a new conversation."
    )
    assert stub.calls.empty()


async def test_a_large_picture_is_made_smaller(page: Page, stub: Stub) -> None:
    await seeing(page, stub)
    await give(page, "drop", file("orange", (3000, 1500)))
    await expect(page.locator(TRAY)).to_have_count(1)
    call = await answered(page, stub, "What is this?")
    sent = Image.open(io.BytesIO(files_in(call)[0]))
    assert (sent.format, sent.width * sent.height <= 1_000_000) == ("JPEG", True)
    assert abs(sent.width / sent.height - 2) < 0.01
    assert max(abs(a - b) for a, b in zip(sent.getpixel((9, 9)), (255, 165, 0), strict=True)) < 6


async def test_what_is_no_picture_is_refused(page: Page, stub: Stub) -> None:
    await seeing(page, stub)
    notice = page.locator("#notice")
    await give(page, "drop", b"%PDF-1.7", name="one.pdf", media_type="application/pdf")
    await expect(notice).to_have_text("“one.pdf” is no PNG, JPEG, WebP or GIF file.")
    await give(page, "paste", b"not a picture")
    await expect(notice).to_have_text("“red.png” cannot be read as a picture.")
    await expect(page.locator(TRAY)).to_have_count(0)
    # What the server refuses is said in its words.
    await give(page, "paste", file())
    await expect(page.locator(TRAY)).to_have_count(1)
    await page.press("#input", "Enter")
    words = "messages[0].content[0].image_url is an image that cannot be used: it has 48 x 1 pixels."
    (await stub.call()).refuse(400, words, "invalid_image", X_Should_Retry="false")
    await expect(page.locator(".trouble")).to_contain_text(words)


async def test_a_model_that_reads_text_alone_is_said(page: Page, stub: Stub) -> None:
    await open_chat(page, stub.url)
    await expect(page.locator("#attach")).to_be_hidden()
    await give(page, "paste", file())
    await expect(page.locator("#notice")).to_have_text("stub reads text alone, so the picture was not added.")
    await expect(page.locator(TRAY)).to_have_count(0)
    # With another model it is sent; back at this one, it is not.
    stub.more_models = [{"id": "seeing", "max_model_len": 512, **CARD}]
    await open_chat(page, stub.url)
    await page.select_option("#model", "seeing")
    await give(page, "paste", file())
    await expect(page.locator(TRAY)).to_have_count(1)
    await page.select_option("#model", "stub")
    await page.press("#input", "Enter")
    await expect(page.locator("#notice")).to_have_text(
        "stub reads text alone: remove the pictures, or choose another model."
    )
    await page.select_option("#model", "seeing")
    await page.press("#input", "Enter")
    assert files_in(await stub.call()) == [file()]


async def test_pictures_can_be_read_in_both_themes_and_on_a_narrow_page(page: Page, stub: Stub) -> None:
    await seeing(page, stub)
    await page.set_viewport_size({"width": 320, "height": 640})
    await give(page, "paste", file(size=(1200, 80)), file("blue"))
    await expect(page.locator(TRAY)).to_have_count(2)
    await answered(page, stub, "What is this?")
    await give(page, "paste", file())
    await expect(page.locator(TRAY)).to_have_count(1)
    await page.locator(".turn .picture").last.press("Enter")
    assert await page.evaluate("document.documentElement.scrollWidth") == 320
    await page.get_by_role("button", name="Close", exact=True).press("Enter")
    await expect(page.locator("dialog")).to_have_count(0)
    assert await page.evaluate(MISTAKES) == []
    schemes: Any = ("light", "dark")
    for scheme in schemes:
        await page.emulate_media(color_scheme=scheme)
        assert (await page.evaluate(FAINT))["faint"] == []


async def test_a_continued_answer_keeps_its_pictures(page: Page, stub: Stub) -> None:
    await seeing(page, stub)
    await give(page, "paste", file())
    await expect(page.locator(TRAY)).to_have_count(1)
    await page.fill("#input", "What is this?")
    await page.press("#input", "Enter")
    await Script().play(await stub.call(), ["A", " red", " thing"])
    await expect(page.locator("#send")).to_be_visible()
    await choose(page, "thing")
    await page.press(".fork-bar input", "Enter")
    # The server has the tokens no longer: the call has the picture and the text again.
    (await stub.call()).refuse(404, "It is gone.", "not_found", X_Should_Retry="false")
    call = await stub.call()
    assert call.body is not None
    assert files_in(call) == [file()]
    assert call.body["messages"][-1] == {"role": "assistant", "content": "A red"}
    await Script("02" * 16).play(call, [" square"])
    await expect(page.locator(SHOWN)).to_have_count(1)


async def test_conversations_of_a_browser_without_pictures_stay(page: Page, stub: Stub) -> None:
    """Earlier versions had a database without them."""
    await page.goto(f"{stub.url}/icon.svg")
    await page.evaluate("""async () => {
      const { newConversation, newTurn } = await import("/conversation.js");
      const conversation = newConversation();
      Object.assign(newTurn(conversation, "from before", [{ model: "stub" }]).runs[0], { state: "done" });
      await new Promise((resolve) => {
        const asked = indexedDB.open("quire", 1);
        asked.onupgradeneeded = () => {
          const store = asked.result.createObjectStore("conversations", { keyPath: "id" });
          store.createIndex("by time", ["changed", "title"]);
          store.put(conversation);
        };
        asked.onsuccess = () => resolve(asked.result.close());
      });
    }""")
    await seeing(page, stub)
    assert [one["title"] for one in await stored(page)] == ["from before"]
    await give(page, "paste", file())
    await expect(page.locator(TRAY)).to_have_count(1)
    await answered(page, stub, "What is this?")
    assert await page.evaluate(KEPT) == 1
