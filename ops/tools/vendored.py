"""Fetches the libraries of others that the pages load from npm, and checks them against a table of their digests.

    python -m quire.ops.tools.vendored check
    python -m quire.ops.tools.vendored fetch

`fetch` writes the folder anew, and its README.md with the table; it needs npm. The same pins give the same bytes. For a
newer version, change a pin here (`npm view NAME@VERSION dist.integrity` prints the digest) and the paths in the scripts
that import the library.
"""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from pathlib import Path

from quire.ops.paths import PROJECT_ROOT

FOLDER = PROJECT_ROOT / "gateway" / "features" / "pages" / "static" / "vendor"
LICENCE = "LICENSE.txt"
TITLE = """# Libraries of others

The chat page loads these files when an answer needs them. `python -m quire.ops.tools.vendored fetch` writes this folder
from npm's packages, and `check` compares it with this table. Change no file by hand. Each folder has the licence of its
files, which is served beside them.

| file | version | licence | npm package | sha256 |
|---|---|---|---|---|
"""


@dataclass(frozen=True)
class Package:
    """One npm package. files: path in the package -> name here. bundled: packages inside of its files."""

    name: str
    version: str
    integrity: str
    licence: str
    files: dict[str, str]
    bundled: tuple[Package, ...] = ()

    @property
    def folder(self) -> str:
        return f"{FOLDER_NAMES.get(self.name, self.name)}-{self.version}"


FOLDER_NAMES = {"@highlightjs/cdn-assets": "highlight.js"}
# Languages of code that are not among those of highlight.min.js.
LANGUAGES = [
    *(
        "clojure",
        "cmake",
        "dart",
        "dockerfile",
        "elixir",
        "erlang",
        "haskell",
        "http",
        "julia",
        "latex",
        "lisp",
        "matlab",
    ),
    *("nginx", "nix", "ocaml", "powershell", "protobuf", "scala"),
]

PACKAGES = (
    Package(
        "markdown-it",
        "15.0.3",
        "sha512-+Az7Ojz3iRGu8KYMvJ6xVhvrxP3eE+vEtJX75Ow88XBpcQNV/0lGX5ZynIIBftREo4DC2jsveAMDaeltmm8QvQ==",
        "MIT; in it entities (BSD-2-Clause), linkify-it, mdurl, punycode.js and uc.micro (MIT)",
        {"dist/browser/markdown-it.esm.min.mjs": "markdown-it.esm.min.mjs"},
        bundled=(
            Package(
                "entities",
                "8.1.0",
                "sha512-kxL7msIffSuh9aaFAMD7rxAIuTRMAHMeBtgHW2yUdWw732ZNh4MehkF2gdjvtdmikkaIP9bFDDJOPlsvm7avrA==",
                "BSD-2-Clause",
                {},
            ),
            Package(
                "linkify-it",
                "6.1.0",
                "sha512-wJ/TwpSDTLepCrQoYWYIExIKg5Zchex2Nn5yk2mFnB+6PtdkHtyLx742md9csRjjOnGkKIS/RrbY7l8D6gT9Vw==",
                "MIT",
                {},
            ),
            Package(
                "mdurl",
                "2.1.0",
                "sha512-1+HBaOx0zi/dQWht8rNv9MYf9qqpqL/kxI0hXImU6Y547zM6Sni8BQibt7ifgMcYtQg41ao3Ivd6cnSM86inpg==",
                "MIT",
                {},
            ),
            Package(
                "punycode.js",
                "2.3.1",
                "sha512-uxFIHU0YlHYhDQtV4R9J6a52SLx28BCjT+4ieh7IGbgwVJWO+km431c4yRlREUAsAmt/uMjQUyQHNEPf0M39CA==",
                "MIT",
                {},
            ),
            Package(
                "uc.micro",
                "3.0.0",
                "sha512-U3PppEkleoTnIfi8BozMx3yju3qc/L6SwqWo2Sw+54PX+PX0q9I+r1Um5HCmqD7n9VDX5/v3vQH/AjA6deDdtw==",
                "MIT",
                {},
            ),
        ),
    ),
    Package(
        "markdown-it-footnote",
        "4.0.0",
        "sha512-WYJ7urf+khJYl3DqofQpYfEYkZKbmXmwxQV8c8mO/hGIhgZ1wOe7R4HLFNwqx7TjILbnC98fuyeSsin19JdFcQ==",
        "MIT",
        {"index.mjs": "index.mjs"},
    ),
    Package(
        "temml",
        "0.13.5",
        "sha512-aPkDDgunanpLNL0ql32HbolqLep+w8DRcVXRql7rWrMt/PhczdLgL4UBYYVU3BYjCNjkGq4EqwIicu/zWr1iOg==",
        "MIT",
        {"dist/temml.min.js": "temml.min.mjs", "dist/Temml-Local.css": "temml.css"},
    ),
    Package(
        "@highlightjs/cdn-assets",
        "11.12.0",
        "sha512-KvOKXODaiFmId9xaq3xc5xCL66wVLUuOngDbO9B/kewbFTqdGbn2nJxNhN3H5R1cgDTVj6R8vH0zgiNDEGjpDw==",
        "BSD-3-Clause",
        {
            "es/highlight.min.js": "highlight.min.mjs",
            **{f"es/languages/{name}.min.js": f"languages/{name}.min.mjs" for name in LANGUAGES},
        },
    ),
)


def adapted(name: str, content: bytes) -> bytes:
    """Return a file of a package as the page needs it. Every other file is served as it is in the package."""
    if name == "temml.min.mjs":  # the package has its module unminified only
        return content + b"\nexport default temml;\n"
    if name == "temml.css":  # the pages load neither fonts nor data: URLs
        text = re.sub(r"@font-face \{[^}]*\}\n", "", content.decode())
        text = re.sub(r' *(?:-webkit-)?mask-image: url\("data:[^"]*"\);\n', "", text)
        return text.encode()
    return content


def fetch() -> None:
    """Write the folder and its table from npm's packages."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / FOLDER.name
        rows = []
        for package in PACKAGES:
            contents = _unpacked(package, Path(scratch))
            target = folder / package.folder
            licences = [_licence(contents, package)]
            for inner in package.bundled:
                licences.append(f"\n{'-' * 80}\n{inner.name} {inner.version}\n\n")
                licences.append(_licence(_unpacked(inner, Path(scratch)), inner))
            written = {LICENCE: "".join(licences).encode()}
            written |= {name: adapted(name, contents[source]) for source, name in package.files.items()}
            for name, content in written.items():
                path = target / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
                digest = hashlib.sha256(content).hexdigest()
                cells = (f"`{package.folder}/{name}`", package.version, package.licence, package.name, f"`{digest}`")
                rows.append(f"| {' | '.join(cells)} |\n")
        (folder / "README.md").write_text(TITLE + "".join(rows))
        shutil.rmtree(FOLDER, ignore_errors=True)  # only now: a download may fail
        shutil.move(folder, FOLDER)


def mistakes() -> list[str]:
    """Return the files that are missing, changed, or not in the table, and the packages without a licence."""
    table = dict(re.findall(r"^\| `([^`]+)` \|.*\| `([0-9a-f]{64})` \|$", (FOLDER / "README.md").read_text(), re.M))
    found = {
        path.relative_to(FOLDER).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in FOLDER.rglob("*")
        if path.is_file() and path.name != "README.md"
    }
    wanted = {f"{package.folder}/{name}" for package in PACKAGES for name in (LICENCE, *package.files.values())}
    return [
        *(f"{name} is not in the table" for name in sorted(found.keys() - table.keys())),
        *(f"{name} is missing" for name in sorted((table.keys() | wanted) - found.keys())),
        *(f"{name} is of no pinned package" for name in sorted(found.keys() - wanted)),
        *(f"{name} was changed" for name, digest in sorted(found.items()) if table.get(name, digest) != digest),
    ]


def _unpacked(package: Package, scratch: Path) -> dict[str, bytes]:
    """Return the files of a package by their paths in it. Raises ValueError if it is not the pinned one."""
    asked = f"{package.name}@{package.version}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(scratch), asked]
    name = subprocess.run(command, check=True, capture_output=True, text=True, cwd=scratch).stdout.split()[-1]
    archive = scratch / name
    digest = "sha512-" + base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    if digest != package.integrity:
        raise ValueError(f"{asked} has the integrity {digest}, not the pinned {package.integrity or 'one'}")
    contents = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            if (file := tar.extractfile(member)) is not None:
                contents[member.name.split("/", 1)[1]] = file.read()
    return contents


def _licence(contents: dict[str, bytes], package: Package) -> str:
    for name, content in contents.items():
        if re.fullmatch(r"(?i)licen[cs]e(-mit)?(\.txt|\.md)?", name):
            return content.decode().strip() + "\n"
    raise ValueError(f"{package.name} has no licence file")


def main() -> int:
    """Fetch or check; return 1 if the check finds a mistake."""
    if sys.argv[1:] == ["fetch"]:
        fetch()
    elif sys.argv[1:] != ["check"]:
        print("usage: python -m quire.ops.tools.vendored check|fetch", file=sys.stderr)
        return 2
    found = mistakes()
    for line in found:
        print(line, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
