"""The alert rules: each fires when it should, has tests, and links to its entry in the runbook."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import pytest
import yaml

from quire.ops.local.ports import free_port
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools.runbook_page import PAGE
from quire.shared.processes import dying_with_parent
from tests.support.boards import RULE_TESTS, RULES, alerts

RUNBOOK = (PROJECT_ROOT / "docs" / "runbook.md").read_text()


STACK = yaml.safe_load((PROJECT_ROOT / "docker-compose.yml").read_text())


NEEDS_PROMTOOL = pytest.mark.skipif(
    shutil.which("promtool") is None, reason="promtool is not installed (Debian's package prometheus)"
)


@NEEDS_PROMTOOL
def test_prometheus_accepts_the_rules() -> None:
    checked = subprocess.run(
        ["promtool", "check", "rules", *map(str, RULES)], capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@NEEDS_PROMTOOL
@pytest.mark.parametrize("path", RULE_TESTS, ids=lambda path: path.stem)
@pytest.mark.slow
def test_alerts_fire_when_they_should_and_only_then(path) -> None:
    tested = subprocess.run(["promtool", "test", "rules", str(path)], capture_output=True, text=True, check=False)
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_each_alert_has_a_test_that_fires_and_one_that_does_not() -> None:
    tested = {True: set(), False: set()}
    for path in RULE_TESTS:
        for case in (case for group in yaml.safe_load(path.read_text())["tests"] for case in group["alert_rule_test"]):
            tested[bool(case["exp_alerts"])].add(case["alertname"])
    assert tested[True] == tested[False] == set(alerts())


def test_each_alert_has_its_entry_in_the_runbook_and_each_entry_its_alert() -> None:
    headings = re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE)
    assert sorted(headings) == sorted(alerts())
    entries = dict(zip(headings, re.split(r"^### \w+$", RUNBOOK, flags=re.MULTILINE)[1:], strict=True))
    for name, rule in alerts().items():
        assert rule["annotations"]["runbook_url"] == "{{ $externalURL }}/user/runbook.html#" + name.lower()
        assert f'<h3 id="{name.lower()}">' in PAGE.read_text()
        assert rule["annotations"]["summary"]
        assert f"*{rule['labels']['severity']}*" in entries[name]
        assert re.findall(r"^- \*\*(\w+)\*\*: ", entries[name], re.MULTILINE) == ["Means", "See", "Do"], name


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is not installed")
@pytest.mark.slow
def test_an_alert_links_to_its_entry_in_the_runbook(tmp_path: Path) -> None:
    """At the Prometheus that raises it, with the files and flags of the image; no gateway runs."""
    dockerfile = (PROJECT_ROOT / "ops/deploy/prometheus/Dockerfile").read_text()
    for source, target in re.findall(r"^COPY (\S+) /etc/prometheus/(\S+)$", dockerfile, re.MULTILINE):
        copy = shutil.copytree if (PROJECT_ROOT / source).is_dir() else shutil.copy
        copy(PROJECT_ROOT / source, tmp_path / target)
    found = re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.MULTILINE)
    assert found
    flags = [
        flag.replace("/etc/prometheus", str(tmp_path)).replace("/var/lib/quire", str(tmp_path / "data"))
        for flag in json.loads(found[1])[1:]
    ]
    port = free_port()
    (command,) = STACK["services"]["prometheus"]["command"]
    flags += [command.replace("${PROMETHEUS_PORT:-9090}", str(port)), f"--web.listen-address=127.0.0.1:{port}"]
    url = f"http://127.0.0.1:{port}"
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            dying_with_parent([shutil.which("prometheus") or "", *flags]), stdout=log, stderr=log
        )
    try:
        deadline = time.monotonic() + 60
        while "QuireNoGateway" not in (links := links_of_alerts(url)):
            assert process.poll() is None, (tmp_path / "log").read_text()
            assert time.monotonic() < deadline, f"no alert: {links}"
            time.sleep(0.2)
        page, _, anchor = links["QuireNoGateway"].partition("#")
        with urllib.request.urlopen(page, timeout=10) as response:
            assert response.headers["Content-Type"].startswith("text/html")
            assert f'id="{anchor}"' in response.read().decode()
    finally:
        process.terminate()
        process.wait(20)


def links_of_alerts(url: str) -> dict[str, str]:
    """The link of each alert that fires or is about to; none while Prometheus does not answer."""
    try:
        with urllib.request.urlopen(f"{url}/api/v1/alerts", timeout=10) as response:
            found = json.load(response)["data"]["alerts"]
    except OSError:
        return {}
    return {one["labels"]["alertname"]: one["annotations"]["runbook_url"] for one in found}
