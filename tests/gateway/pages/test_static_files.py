"""The pages' files: what their headers allow, how large they are, and whether their colours can be read."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from quire.gateway.pages import static_files
from tests.support.gateway.running import RunningGateway, raw_request

STATIC = Path(static_files.__file__).parent / "static"
FILES = sorted(path for path in STATIC.iterdir() if path.suffix in (".html", ".css", ".js", ".svg"))
PAGES = [path for path in FILES if path.suffix == ".html"]
SCRIPTS = [path for path in FILES if path.suffix == ".js"]
BYTES = {path: static_files.content(path.name) for path in FILES}
MAX_BYTES = 150_000


async def test_a_page_may_load_from_its_own_server_only(gateway: RunningGateway) -> None:
    for path in PAGES:
        reply = await gateway.get(static_files.path_of(path.name))
        assert reply.status == 200
        assert reply.headers["content-type"] == "text/html; charset=utf-8"
        policy = dict(part.strip().split(" ", 1) for part in reply.headers["content-security-policy"].split(";"))
        assert policy == {
            "default-src": "'none'",
            "script-src": "'self'",
            "style-src": "'self'",
            "connect-src": "'self'",
            "img-src": "'self'",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert reply.headers["referrer-policy"] == "no-referrer"
        assert "camera=()" in reply.headers["permissions-policy"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
async def test_a_file_is_sent_once(gateway: RunningGateway, path: Path) -> None:
    where = static_files.path_of(path.name)
    plain = await gateway.get(where)
    assert plain.body == BYTES[path]
    packed = await gateway.send(raw_request("GET", where, headers={"Accept-Encoding": "br, gzip"}))
    assert packed.headers["content-encoding"] == "gzip"
    assert gzip.decompress(packed.body) == plain.body
    assert packed.headers["etag"] != plain.headers["etag"]
    for known in (plain, packed):
        encoding = "gzip" if known is packed else ""
        headers = {"If-None-Match": known.headers["etag"], "Accept-Encoding": encoding}
        again = await gateway.send(raw_request("GET", where, headers=headers))
        assert (again.status, again.body) == (304, b"")
        assert again.headers["cache-control"] == "no-cache"
    changed = await gateway.send(raw_request("GET", where, headers={"If-None-Match": '"older"'}))
    assert changed.status == 200


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_only_comments_of_scripts_are_not_served(path: Path) -> None:
    source, served = path.read_text().splitlines(), BYTES[path].decode().splitlines()
    assert len(served) == len(source)
    left_out = [line.strip() for line, kept in zip(source, served, strict=True) if line != kept]
    assert all(line.startswith(("//", "/**", "* ", "*/")) for line in left_out)
    assert bool(left_out) == (path.suffix == ".js")


def test_all_files_together_are_small() -> None:
    assert sum(map(len, BYTES.values())) < MAX_BYTES


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_has_nothing_inline_and_nothing_from_elsewhere(path: Path) -> None:
    html = path.read_text()
    assert not re.search(r"<script(?![^>]* src=)|<style|\sstyle=|\son[a-z]+=|https?://|javascript:", html)
    for reference in re.findall(r'(?:src|href)="([^"]+)"', html):
        assert (
            reference.startswith("#")
            or reference in ("/", "/engine", "/docs", "/openapi.json")
            or (STATIC / reference[1:]).is_file()
        ), reference


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_a_script_makes_no_markup_and_is_one_noun_long(path: Path) -> None:
    text = path.read_text()
    assert not re.search(
        r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function|DOMParser", text
    )
    assert len(text.splitlines()) <= 300


def test_a_page_preloads_exactly_the_modules_that_it_needs() -> None:
    """With preloads the browser loads all modules at once, instead of each after the module that imports it."""
    for path in PAGES:
        html = path.read_text()
        for entry in re.findall(r'<script src="/([^"]+)" type="module">', html):
            needed: set[str] = set()
            waiting = [entry]
            while waiting:
                found = re.findall(
                    r'^(?:import|export) .*? from "/([^"]+)";', (STATIC / waiting.pop()).read_text(), re.M
                )
                waiting += [name for name in found if name not in needed]
                needed.update(found)
            assert set(re.findall(r'<link rel="modulepreload" href="/([^"]+)">', html)) == needed - {entry}


# --- colours ----------------------------------------------------------------------------------------------------------

COLOURS = {
    name: (light, dark)
    for name, light, dark in re.findall(
        r"--([a-z-]+): light-dark\((#[0-9a-f]{6}), (#[0-9a-f]{6})\)", (STATIC / "base.css").read_text()
    )
}
GROUNDS = ("back", "raised", "sunken", "mine")
PAIRS = [(text, ground, 4.5) for text in ("text", "quiet", "accent", "error", "good", "warn") for ground in GROUNDS]
PAIRS += [("on-accent", "accent", 4.5)]
# The colour of a control's border contrasts with the colours around the control (WCAG 2.2, 1.4.11).
PAIRS += [("control", ground, 3.0) for ground in GROUNDS[:3]]


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours by the definitions of WCAG 2.2."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_what_the_definition_says() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
@pytest.mark.parametrize(("text", "ground", "least"), PAIRS)
def test_colours_can_be_told_apart(text: str, ground: str, least: float, theme: int) -> None:
    assert contrast(COLOURS[text][theme], COLOURS[ground][theme]) >= least
