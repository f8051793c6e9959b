"""docker-compose.yml, the Dockerfiles and their start script: settings, rights, and what Compose v2 reads of them."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire.gateway.settings import GatewaySettings
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.compose import VARIABLES
from quire.shared.config.settings import options
from quire.worker.settings import WorkerSettings
from tests.conftest import clean_environ
from tests.support.containers import PINNED_COMPOSE

# --- compose ----------------------------------------------------------------------------------------------------------
# docker-compose.yml and the Dockerfiles as text: settings, rights and versions. test_containers runs them.


TEXT = (PROJECT_ROOT / "docker-compose.yml").read_text()
STACK: dict[str, Any] = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = STACK["services"]
FOLDERS = [PROJECT_ROOT / name for name in ("gateway", "worker", "ops")]
DOCKERFILES = sorted(path for folder in FOLDERS for path in folder.rglob("Dockerfile"))

# Settings that differ for each process, and so cannot be set for a stack with replicas.
OF_ONE_PROCESS = {"QUIRE_GATEWAY_ID", "QUIRE_WORKER_ID", "QUIRE_REUSE_PORT"}


def defaults_in(text: str) -> dict[str, set[str]]:
    """Every `${NAME:-default}` with its defaults."""
    found: dict[str, set[str]] = {}
    for name, default in re.findall(r"\$\{(\w+):-([^}]*)\}", text):
        found.setdefault(name, set()).add(default)
    return found


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_rights_that_it_does_not_need(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["user"].split(":")[0] not in ("", "0", "root")
    assert service["init"] is True
    assert not {"privileged", "cap_add", "network_mode", "pid", "ipc", "env_file"} & service.keys()
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["restart"] == "unless-stopped"


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_limits_of_memory_and_processes(name: str) -> None:
    limits = SERVICES[name]["deploy"]["resources"]["limits"]
    assert limits["pids"] > 0
    assert name == "worker-gpu" or limits["memory"]


def test_the_queue_can_be_reached_by_nobody_outside() -> None:
    assert STACK["networks"]["inside"] == {"internal": True}
    assert SERVICES["redis"]["networks"] == ["inside"]
    assert "ports" not in SERVICES["redis"]
    assert all("ports" not in SERVICES[name] for name in ("worker", "worker-gpu"))
    # By default, ports are published for this machine only.
    for name in ("gateway", "prometheus", "grafana"):
        (port,) = SERVICES[name]["ports"]
        assert port.startswith(("127.0.0.1:", "${GATEWAY_ADDRESS:-127.0.0.1}:"))


def test_the_configuration_of_redis_keeps_what_was_accepted() -> None:
    lines = (PROJECT_ROOT / "ops/deploy/redis/redis.conf").read_text().splitlines()
    assert {"appendonly yes", "appendfsync everysec", "maxmemory-policy noeviction", "protected-mode yes"} <= {*lines}
    assert "queue:/var/lib/quire" in SERVICES["redis"]["volumes"]
    assert "dir /var/lib/quire" in lines


def test_what_starts_by_default_and_what_by_profile() -> None:
    profiles = {name: service.get("profiles", []) for name, service in SERVICES.items()}
    assert profiles.pop("worker-gpu") == ["gpu"]
    assert profiles.pop("grafana") == profiles.pop("redis-exporter") == ["dashboards"]
    assert profiles == {"redis": [], "gateway": [], "worker": [], "prometheus": []}
    # A service that starts by default must not depend on one that does not.
    assert all(
        not SERVICES[other].get("profiles") for name in profiles for other in SERVICES[name].get("depends_on", [])
    )


@pytest.mark.parametrize(
    ("name", "cls"), [("gateway", GatewaySettings), ("worker", WorkerSettings), ("worker-gpu", WorkerSettings)]
)
def test_every_setting_reaches_its_service(name: str, cls: type) -> None:
    wanted = {item.variable for item in options(cls)} - OF_ONE_PROCESS
    given = {variable for variable in SERVICES[name]["environment"] if variable.startswith("QUIRE_")}
    both = {item.variable for other in (GatewaySettings, WorkerSettings) for item in options(other)}
    assert wanted <= given, "add it to docker-compose.yml"
    assert given <= both, "no process has this setting"


def test_names_of_the_stack_are_documented_with_their_defaults() -> None:
    settings = {item.variable for cls in (GatewaySettings, WorkerSettings) for item in options(cls)}
    used = {name: defaults for name, defaults in defaults_in(TEXT).items() if name not in settings}
    used |= {name: {""} for name in re.findall(r"^ +([A-Z_]+):$", TEXT, re.MULTILINE) if not name.startswith("QUIRE_")}
    # Compose itself reads this one.
    documented = {entry.name: {entry.default} for entry in VARIABLES if entry.name != "COMPOSE_PROFILES"}
    assert used == documented


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: str(path.parent.relative_to(PROJECT_ROOT)))
def test_an_image_is_pinned_and_runs_without_rights(path: Path) -> None:
    text = path.read_text()
    defaults = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)$", text, re.MULTILINE))
    compose = defaults_in(TEXT)
    assert defaults
    for name, image in defaults.items():
        assert re.search(r":v?\d+\.\d+\.\d+", image), f"{image} is not pinned"
        assert compose[name] == {image}, "docker-compose.yml and the Dockerfile have different defaults"
    stages = re.findall(r"^FROM (\S+)(?: AS (\w+))?$", text, re.MULTILINE)
    names = {stage for _, stage in stages}
    assert all(base.strip("${}") in defaults or base in names for base, _ in stages)
    assert re.findall(r"^USER (\S+)$", text, re.MULTILINE)[-1] == "10001:10001"


@pytest.mark.parametrize("image", ["gateway", "worker"])
def test_builds_have_stages(image: str) -> None:
    text = (PROJECT_ROOT / image / "Dockerfile").read_text()
    build, *others = re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]
    assert " AS build" in build
    served = [stage for stage in others if not re.match(r"\S+ AS build-", stage)]
    assert served
    assert others[-1] in served, "the last stage is the default one"
    assert all("pip install" not in stage and "g++" not in stage for stage in served)
    assert f"COPY {image}/pyproject.toml " in build
    assert f"pip install --no-deps ./{image}" in build
    copied = set(re.findall(r"^COPY (\w+) \1/$", build, re.MULTILINE))
    assert copied == {"src", "shared", image} | ({"kernels"} if image == "worker" else set())


def stage(text: str, name: str) -> str:
    """The instructions of a stage of a Dockerfile."""
    (found,) = re.findall(rf"^FROM \S+ AS {name}\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    return str(found)


def test_the_image_for_gpus_tells_triton_where_the_driver_and_a_right_assembler_are() -> None:
    """A read-only container has no cache of the linker that names libcuda; Triton's own ptxas is older than 13.3."""
    text = (PROJECT_ROOT / "worker" / "Dockerfile").read_text()
    gpu, assembler = stage(text, "gpu"), stage(text, "build-ptxas")
    environ = dict(re.findall(r"(TRITON_\w+)=(\S+)", gpu))
    assert environ["TRITON_LIBCUDA_PATH"] == "/usr/lib/x86_64-linux-gnu"
    source = r"COPY --from=build-ptxas /cuda/nvidia/cu13/bin/ptxas (\S+)"
    assert re.findall(source, gpu) == [environ["TRITON_PTXAS_PATH"]]
    (version,) = re.findall(r"nvidia-cuda-nvcc==(\d+)\.(\d+)\.\d+\b", assembler)
    assert tuple(map(int, version)) >= (13, 3)
    assert "ptxas --version" in assembler, "the build fails if the wheel has no assembler there that runs"
    assert SERVICES["worker-gpu"]["build"]["target"] == "gpu"
    assert SERVICES["worker-gpu"]["read_only"] is True
    assert not {"TRITON_PTXAS_PATH", "TRITON_LIBCUDA_PATH"} & SERVICES["worker-gpu"]["environment"].keys()


def test_stopping_waits_for_longer_than_what_runs_is_given() -> None:
    defaults = defaults_in(TEXT)
    (grace,), (drain,) = defaults["STOP_GRACE_PERIOD"], defaults["QUIRE_DRAIN_S"]
    assert int(grace.removesuffix("s")) >= int(drain) + 10


def test_a_password_that_would_break_a_url_is_refused(tmp_path: Path) -> None:
    for password, complaint in (("short", "it has 5 characters"), ("with space and @ in it", "part of a URL")):
        done = subprocess.run(
            ["sh", str(PROJECT_ROOT / "ops/deploy/redis/start.sh")],
            env={"PATH": "/usr/bin:/bin", "REDIS_PASSWORD": password},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 1
        assert done.stderr.startswith("REDIS_PASSWORD: ")
        assert complaint in done.stderr
        assert password not in done.stderr


def test_the_engine_gets_each_file_that_a_dockerfile_copies() -> None:
    lines = (PROJECT_ROOT / ".dockerignore").read_text().splitlines()
    let_in = tuple(PROJECT_ROOT / line.removeprefix("!") for line in lines if line.startswith("!"))
    for path in DOCKERFILES:
        copied = re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), re.MULTILINE)
        assert copied
        for source in " ".join(copied).split():
            assert any((PROJECT_ROOT / source).is_relative_to(one) for one in let_in), f"{path}: {source}"


def test_grafana_says_which_password_is_missing() -> None:
    shell, option, script = SERVICES["grafana"]["entrypoint"]
    environ = {"PATH": "/usr/bin:/bin", "GF_SECURITY_ADMIN_PASSWORD": ""}
    done = subprocess.run([shell, option, script.replace("$$", "$")], env=environ, capture_output=True, text=True)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("GRAFANA_PASSWORD is not set")
    assert "add the line GRAFANA_PASSWORD=... to .env and run docker compose --profile dashboards" in line


@pytest.mark.parametrize(
    "document", ["docs/quickstart.md", "docs/how-to/containers.md", "docs/how-to/monitoring.md", "docker-compose.yml"]
)
def test_the_password_of_grafana_is_named_where_grafana_is(document: str) -> None:
    text = (PROJECT_ROOT / document).read_text()
    assert "--profile dashboards" in text
    assert "GRAFANA_PASSWORD=" in text


def compose(*arguments: str, cwd: Path = PROJECT_ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Compose v2 without an engine, and with an empty .env."""
    command = [*PINNED_COMPOSE, "--env-file", "/dev/null", *arguments]
    return subprocess.run(command, cwd=cwd, env=clean_environ(**variables), capture_output=True, text=True)


@pytest.mark.parametrize("profiles", [(), ("gpu",), ("dashboards",), ("gpu", "dashboards")])
def test_compose_accepts_the_file_with_each_profile(profiles: tuple[str, ...]) -> None:
    done = compose(*(word for profile in profiles for word in ("--profile", profile)), "config", "--quiet")
    assert (done.returncode, done.stderr) == (0, "")


def test_variables_reach_the_services() -> None:
    done = compose("--profile", "*", "config", GATEWAY_PORTS="18000-18009", CPU_WORKERS="3", QUIRE_MAX_NUM_SEQS="5")
    understood = yaml.safe_load(done.stdout)["services"]
    assert {*understood} == {*SERVICES}
    assert understood["worker"]["environment"]["QUIRE_MAX_NUM_SEQS"] == "5"
    assert int(understood["worker"]["scale"]) == 3
    assert understood["gateway"]["ports"][0]["published"] == "18000-18009"
    assert all(service["deploy"]["resources"]["limits"]["pids"] == 1024 for service in understood.values())


DOCUMENTS = [PROJECT_ROOT / "README.md", *sorted((PROJECT_ROOT / "docs").rglob("*.md"))]
COMMANDS = sorted(
    {
        re.split(r"[#|<>]", command)[0].strip()
        for path in (*DOCUMENTS, PROJECT_ROOT / "docker-compose.yml", PROJECT_ROOT / "ops/cli/commands.py")
        for command in re.findall(r"docker compose ((?:--profile \S+ )?[a-z]+ [^`\n\";,)]*)", path.read_text())
    }
)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_documented_command_names_options_services_and_profiles_that_exist(command: str) -> None:
    words = command.split()
    if words[0] == "--profile":
        assert words[1] in {profile for service in SERVICES.values() for profile in service.get("profiles", [])}
        words = words[2:]
    if words[0] == "exec":  # what follows the service is a command of its own
        words = words[: 2 + next(i for i, word in enumerate(words[1:]) if not word.startswith("-"))]
    options = {word for word in words if word.startswith("-")}
    known = compose(words[0], "--help").stdout
    assert f"docker compose {words[0]}" in known, "Compose has no such command"
    assert all(re.search(rf"{option}\b", known) for option in options)
    services = re.findall(r"--scale (\S+)=", command) + ([words[-1]] if words[0] in ("exec", "logs") else [])
    assert {*services} - {"SERVICE"} <= {*SERVICES}


EXAMPLES = [
    (path, text)
    for path in DOCUMENTS
    for text in re.findall(r"^```yaml\n(services:\n.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)
]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example[0].name)
def test_compose_accepts_the_overrides_of_the_documents(example: tuple[Path, str], tmp_path: Path) -> None:
    (tmp_path / "docker-compose.yml").write_text(TEXT)
    (tmp_path / "compose.override.yaml").write_text(example[1])
    done = compose("config", "--services", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert {*yaml.safe_load(example[1])["services"]} <= {*done.stdout.split()}


# --- start ------------------------------------------------------------------------------------------------------------
# `quire-start`, the entry point of the images of gateway and worker.


START = PROJECT_ROOT / "ops/deploy/containers/start.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder with the commands of the gateway's image, which print how they are called."""
    for name in ("quire-gateway", "quire-dead", "quire-keys", "quire-parking"):
        path = tmp_path / name
        path.write_text('#!/bin/sh\necho "$(basename "$0") $* url=${QUIRE_REDIS_URL:-}"\n')
        path.chmod(0o755)
    return tmp_path


def start(programs: Path, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(programs), "/usr/bin", "/bin"])
    return subprocess.run(
        ["sh", str(START), *arguments], env={"PATH": path, **environ}, capture_output=True, text=True, check=False
    )


def test_the_first_word_names_the_command_and_the_rest_are_its_arguments(programs: Path) -> None:
    assert start(programs, "gateway", "--port", "8000").stdout == "quire-gateway --port 8000 url=\n"
    assert start(programs, "dead", "show", QUIRE_REDIS_URL="redis://r").stdout == "quire-dead show url=redis://r\n"
    assert start(programs, "keys", "list", QUIRE_REDIS_URL="redis://r").stdout == "quire-keys list url=redis://r\n"
    assert start(programs, "parking", "park").stdout == "quire-parking park url=\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "there is no command '': give gateway, dead, keys, parking or worker"),
        (["serve"], "there is no command 'serve': give gateway, dead, keys, parking or worker"),
        (["worker"], "this image has no command worker; use the image of the other service"),
    ],
)
def test_a_command_that_the_image_does_not_have_is_refused(programs: Path, arguments: list[str], said: str) -> None:
    done = start(programs, *arguments)
    assert done.returncode == 2
    assert said in done.stderr
