"""Tables of a document that are written from the code: each lies between `<!-- NAME -->` and `<!-- /NAME -->`."""

from __future__ import annotations

from collections.abc import Mapping

from quire.ops.paths import PROJECT_ROOT


def with_tables(text: str, tables: Mapping[str, str]) -> str:
    """Return the document `text` with these tables between their markers, each by the name in its markers.

    Raise ValueError if a table does not have exactly one place.
    """
    for name, table in tables.items():
        begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->\n"
        head, *rest = text.split(begin)
        if len(rest) != 1 or rest[0].count(end) != 1:
            raise ValueError(f"the table {name!r} needs one pair of lines {begin.strip()} and {end.strip()}")
        text = f"{head}{begin}\n{table}\n{end}{rest[0].split(end)[1]}"
    return text


def update_page(name: str, tables: Mapping[str, str]) -> None:
    """Write the tables into `docs/NAME`, and print whether the page has changed."""
    page = PROJECT_ROOT / "docs" / name
    before = page.read_text()
    after = with_tables(before, tables)
    page.write_text(after)
    print(f"docs/{name}: " + ("unchanged" if after == before else "tables brought up to date"))
