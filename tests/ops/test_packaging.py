"""The packages: one import name, the same dependencies everywhere, and wheels that hold no more than they should."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from typing import Any

import pytest

from quire.ops import paths
from quire.ops.paths import PROJECT_ROOT
from tests.conftest import clean_environ

FOLDERS = "gateway|worker|shared|kernels|ops"
OLD_IMPORT = re.compile(rf"^\s*(from|import) ({FOLDERS})\b", re.MULTILINE)
SOURCES = [path for folder in (*FOLDERS.split("|"), "tests", "src") for path in (PROJECT_ROOT / folder).rglob("*.py")]
# The folders in each wheel.
SERVICES = {"gateway": {"gateway", "shared"}, "worker": {"worker", "kernels", "shared"}}
HELD_BY_QUIRE = {*FOLDERS.split("|"), "models"}
NOT_HELD = ("ops/benchmarks/", "ops/deploy/", "ops/tools/", "models/demo/training/")
BUILD_FILES = {"Dockerfile", "pyproject.toml", ".gitignore"}


def project(folder: str) -> dict[str, Any]:
    """The table [project] of the pyproject.toml in a folder of the project."""
    table: dict[str, Any] = tomllib.loads((PROJECT_ROOT / folder / "pyproject.toml").read_text())["project"]
    return table


def test_the_installed_package_is_quire_alone() -> None:
    """`kernels` and `ops` are packages of other projects; transformers imports the first if it is there."""
    top_level = importlib.metadata.distribution("quire").read_text("top_level.txt")
    assert top_level is not None
    assert top_level.split() == ["quire"]


@pytest.mark.parametrize("line", ["import worker.service  # noqa", "    from kernels import ops", "import shared"])
def test_an_old_import_is_recognised(line: str) -> None:
    assert OLD_IMPORT.search(line)


def test_no_module_imports_a_folder_by_its_own_name() -> None:
    assert len(SOURCES) > 400
    found = [f"{path}: {match[0].strip()}" for path in SOURCES if (match := OLD_IMPORT.search(path.read_text()))]
    assert found == []


def test_the_links_of_the_package_lead_to_the_folders() -> None:
    links = {path.name: path.resolve() for path in (PROJECT_ROOT / "src" / "quire").iterdir() if path.is_symlink()}
    assert links == {name: Path(PROJECT_ROOT, name).resolve() for name in (*FOLDERS.split("|"), "models")}


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_requires_what_the_complete_package_requires_for_it(service: str) -> None:
    whole, part = project("."), project(service)
    extras = whole["optional-dependencies"]
    assert part["dependencies"] == sorted(whole["dependencies"] + extras[service], key=str.lower)
    names = ("s3", "tracing") if service == "gateway" else ("tracing",)
    assert part["optional-dependencies"] == {name: extras[name] for name in names}
    for name in ("version", "requires-python", "license"):
        assert part[name] == whole[name], name


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The wheels of both services and of the complete package, built from a copy of the sources."""
    tree, target = tmp_path_factory.mktemp("sources"), tmp_path_factory.mktemp("wheels")
    not_sources = shutil.ignore_patterns("__pycache__", "_build", "build", "*.egg-info", "results")
    for name in ("src", "models", *FOLDERS.split("|")):
        shutil.copytree(PROJECT_ROOT / name, tree / name, symlinks=True, ignore=not_sources)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(PROJECT_ROOT / name, tree)
    places = {service: f"./{service}" for service in SERVICES} | {"quire": "."}
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), *places.values(), cwd=tree)
    return {name: next(target.glob(f"quire{'' if name == 'quire' else '_' + name}-*.whl")) for name in places}


def pip(*arguments: str, cwd: Path | None = None) -> None:
    """Run pip, with the pinned build tools. Raises AssertionError with its output."""
    environ = clean_environ(PIP_CONSTRAINT=str(PROJECT_ROOT / "constraints.txt"))
    command = [sys.executable, "-m", "pip", *arguments]
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def new_environment(folder: Path, *requirements: str) -> Path:
    """Make a virtual environment with just these packages; what they import comes from the one that runs the tests.

    Returns its Python.
    """
    venv.create(folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    pip("install", "--no-deps", "--target", str(packages), *requirements)
    # Folders in a .pth file come after those of the environment itself.
    folders = [path for path in sys.path if path.endswith("site-packages")]
    (packages / "dependencies.pth").write_text("\n".join(folders) + "\n")
    return folder / "bin" / "python"


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a Python that sees only the installed part of the project."""
    return subprocess.run(
        [python, "-P", *arguments], cwd="/", env=clean_environ(), capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("service", ["quire", *SERVICES])
def test_a_package_holds_its_folders_and_no_others(service: str, tmp_path: Path) -> None:
    """What setuptools collects for the wheel."""
    place = PROJECT_ROOT if service == "quire" else PROJECT_ROOT / service
    # -P: worker/queue is not the module `queue`.
    build = [sys.executable, "-P", "-c", "import setuptools; setuptools.setup()", "-q", "build_py"]
    subprocess.run([*build, "--build-lib", str(tmp_path)], cwd=place, env=clean_environ(), check=True)
    held = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*") if path.is_file()}
    listed = ["git", "ls-files", *SERVICES.get(service, HELD_BY_QUIRE)]
    tracked = subprocess.run(listed, cwd=PROJECT_ROOT, capture_output=True, text=True, check=True).stdout.split()
    if service == "quire":
        tracked = [name for name in tracked if not name.startswith(NOT_HELD)]
        held -= {"quire/__init__.py", "quire/__main__.py", "quire/py.typed"}
        program = "from quire.shared.model.model_argument import resolve_model as r; print(r('models/demo'))"
        command = [sys.executable, "-P", "-c", program]
        environ = clean_environ(PYTHONPATH=str(tmp_path))
        found = subprocess.run(command, cwd="/", env=environ, capture_output=True, text=True, check=True)
        assert found.stdout.strip() == str(tmp_path / "quire" / "models" / "demo")
    assert held == {f"quire/{name}" for name in tracked if Path(name).name not in BUILD_FILES}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("service", "module", "commands"),
    [
        ("gateway", "quire.gateway.server.main", ["quire-gateway", "quire-dead", "quire-keys", "quire-parking"]),
        ("worker", "quire.worker.service", ["quire-worker"]),
    ],
)
def test_a_service_runs_without_the_rest(
    service: str, module: str, commands: list[str], wheels: dict[str, Path], tmp_path: Path
) -> None:
    python = new_environment(tmp_path / "environment", str(wheels[service]))
    here = run(python, "-c", f"import {module} as m; print(m.__file__)")
    assert here.stdout.startswith(str(tmp_path)), here.stderr
    others = {"gateway", "worker", "kernels", "ops"} - SERVICES[service]
    for other in others:
        assert f"No module named 'quire.{other}'" in run(python, "-c", f"import quire.{other}").stderr
    with zipfile.ZipFile(wheels[service]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
        scripts = dict(re.findall(r"^(\S+) = (\S+)$", wheel.read(name).decode(), re.MULTILINE))
    assert sorted(scripts) == sorted(commands)
    for command, entry in scripts.items():
        module_name, _, function = entry.partition(":")
        program = f"import sys; from {module_name} import {function} as f; sys.argv[1:] = ['--help']; sys.exit(f())"
        done = run(python, "-c", program)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"usage: {command} " in done.stdout
        assert "quire " not in done.stdout.partition("examples:")[2]


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_it_shares_an_environment_with_the_package_kernels(wheels: dict[str, Path], tmp_path: Path) -> None:
    """PyPI's `kernels`, which transformers imports if it is there, and our `quire.kernels` are different packages."""
    python = new_environment(tmp_path / "environment", str(wheels["quire"]), "kernels")
    program = (
        "import kernels, quire.kernels, transformers, transformers.integrations.hub_kernels\n"
        "import quire.worker.models.transformers.bridge\n"
        "print(kernels.__file__, quire.kernels.__file__, callable(kernels.get_kernel))"
    )
    done = run(python, "-c", program)
    theirs, ours, *rest = done.stdout.split() or [done.stderr]
    assert theirs.endswith("site-packages/kernels/__init__.py"), done.stderr
    assert ours.endswith("site-packages/quire/kernels/__init__.py")
    assert all(path.startswith(str(tmp_path)) for path in (theirs, ours))
    assert rest == ["True"]


def serve_and_chat(quire: Path, home: Path) -> str:
    """Serve the demo model with an installed `quire`, and return the answer of its `quire chat`."""
    environ = {"HOME": str(home), "PATH": f"{quire.parent}:/usr/local/bin:/usr/bin:/bin"}
    server = subprocess.Popen([quire, "serve", "--port", "0"], env=environ, cwd=home, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        ready = server.stdout.readline()
        assert ready.startswith("ready: "), ready
        ask = [quire, "chat", "--url", ready.split()[1], "Tell me a story about a fox."]
        return subprocess.run(
            ask, env=environ, cwd=home, capture_output=True, text=True, check=True, timeout=120
        ).stdout
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("installer", ["pipx", "uv"])
def test_the_installed_wheel_serves_its_model(installer: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    """As a user installs it: PyTorch is downloaded, and the first start compiles the kernels."""
    venv.create(tmp_path / "tools", with_pip=True)
    bin_dir = tmp_path / "tools" / "bin"
    subprocess.run([bin_dir / "pip", "install", "-q", installer], check=True, env=clean_environ())
    folders = {"PIPX_HOME": "pipx", "PIPX_BIN_DIR": "bin", "UV_TOOL_DIR": "uv", "UV_TOOL_BIN_DIR": "bin"}
    environ = clean_environ(**{name: str(tmp_path / folder) for name, folder in folders.items()})
    command = [bin_dir / "pipx", "install"] if installer == "pipx" else [bin_dir / "uv", "tool", "install"]
    wanted = f"quire[gateway,worker,embedded] @ file://{wheels['quire']}"
    subprocess.run([*command, "--python", sys.executable, wanted], check=True, env=environ)
    (tmp_path / "home").mkdir()
    assert "fox" in serve_and_chat(tmp_path / "bin" / "quire", tmp_path / "home")


# --- paths ------------------------------------------------------------------------------------------------------------
# The project's folder, and the state folders of a server and of the user.


def test_the_project_and_the_import_root_are_those_of_the_checkout() -> None:
    assert (paths.PROJECT_ROOT / "pyproject.toml").is_file()
    assert (paths.IMPORT_ROOT / "quire" / "ops" / "paths.py").is_file()


def test_a_checkout_keeps_its_state_and_an_installed_package_that_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = {"XDG_STATE_HOME": str(tmp_path)}
    assert paths.default_state_dir(environ) == paths.PROJECT_ROOT / ".quire"
    monkeypatch.setattr(paths, "PROJECT_ROOT", tmp_path)
    assert paths.default_state_dir(environ) == tmp_path / "quire"
    assert paths.default_state_dir({}) == Path.home() / ".local" / "state" / "quire"


def test_a_given_state_folder_is_absolute() -> None:
    assert paths.resolve_state_dir("~/state", {}) == Path.home() / "state"
    assert paths.resolve_state_dir("state", {}) == Path.cwd() / "state"
