"""The pods of the chart in ops/deploy/kubernetes: what they may do, what they are told, and how they stop."""

from __future__ import annotations

import json
import re

import pytest
import yaml

from quire.gateway.settings import GatewaySettings
from quire.gateway.telemetry.access_log import PROBES
from quire.ops.tools import values_schema
from quire.shared.settings import options
from quire.worker.settings import WorkerSettings
from tests.support.charts import (
    CASES,
    CHART,
    SETTINGS,
    container_of,
    environment,
    every_case,
    of_kind,
    pods,
    render,
)

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())


@every_case
def test_pods_meet_the_restricted_standard(case: str) -> None:
    for component, pod in pods(render(*CASES[case])).items():
        spec = pod["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
        security = spec["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        allowed = {"emptyDir", "persistentVolumeClaim", "configMap"}
        assert all(volume.keys() - {"name"} <= allowed for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, component
            assert container["resources"]["limits"]["memory"]
            assert container["resources"]["requests"]["cpu"]
            assert re.search(r":[\w.-]+$", container["image"])
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            # The claim with the data of Redis is not among the volumes of the template.
            assert mounted - ({"data"} if component == "redis" else set()) == {item["name"] for item in spec["volumes"]}


@every_case
def test_kubernetes_adds_no_variables_of_its_own(case: str) -> None:
    # For a service called quire it would add QUIRE_PORT=tcp://..., and the processes refuse wrong or unknown settings.
    assert all(pod["spec"]["enableServiceLinks"] is False for pod in pods(render(*CASES[case])).values())


@every_case
@pytest.mark.parametrize(("component", "cls"), [("gateway", GatewaySettings), ("worker", WorkerSettings)])
def test_settings_exist_and_can_be_read(case: str, component: str, cls: type) -> None:
    (container,) = pods(render(*CASES[case]))[component]["spec"]["containers"]
    given = {name: value for name, value in environment(container).items() if name.startswith("QUIRE_")}
    known = {item.variable: item for item in (*options(WorkerSettings), *options(GatewaySettings), *options(cls))}
    assert given.keys() <= known.keys()
    for name, value in given.items():
        if isinstance(value, str):
            known[name].parse(value, name)
    own = {item.variable for item in options(cls)}
    assert {"QUIRE_REDIS_URL", "QUIRE_MODEL", "QUIRE_SERVED_MODEL_NAME", "QUIRE_DRAIN_S"} <= own & given.keys()
    assert container["args"] == [component]


def test_what_the_chart_decides_is_no_value_but_reaches_the_process() -> None:
    given = {name for component in ("gateway", "worker") for name in environment(container_of(component))}
    # One process of its own has each of these, and a pod has only one process.
    assert values_schema.DECIDED - given == {"QUIRE_REUSE_PORT", "QUIRE_GATEWAY_ID"}


def test_settings_of_one_process_beat_those_of_both() -> None:
    assert environment(container_of("gateway", *SETTINGS))["QUIRE_LOG_LEVEL"] == "debug"
    assert environment(container_of("worker", *SETTINGS))["QUIRE_LOG_LEVEL"] == "error"


def test_a_worker_has_the_name_of_its_pod_and_the_threads_it_was_given() -> None:
    given = environment(container_of("worker"))
    assert given["QUIRE_WORKER_ID"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert given["QUIRE_THREADS"] == {"resourceFieldRef": {"resource": "requests.cpu"}}
    case = ("--set=worker.resources.limits.cpu=4",)
    assert environment(container_of("worker", *case))["QUIRE_THREADS"] == {
        "resourceFieldRef": {"resource": "limits.cpu"}
    }
    own = environment(container_of("worker", *SETTINGS))
    assert own["QUIRE_THREADS"] == "3"


def test_a_gpu_is_asked_for_only_where_one_is_used() -> None:
    limits = container_of("worker", "gpu")["resources"]["limits"]
    assert limits == {"memory": "32Gi", "nvidia.com/gpu": 1}
    assert environment(container_of("worker", "gpu"))["QUIRE_DEVICE"] == "cuda"
    assert pods(render("gpu"))["worker"]["spec"]["runtimeClassName"] == "nvidia"
    assert "nvidia" not in json.dumps(render())
    assert environment(container_of("worker"))["QUIRE_DEVICE"] == "cpu"


def test_the_gpus_of_a_worker_share_its_model() -> None:
    worker = container_of("worker", "gpus")
    assert worker["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert environment(worker)["QUIRE_TENSOR_PARALLEL_SIZE"] == "4"
    assert "QUIRE_TENSOR_PARALLEL_SIZE" not in environment(container_of("worker"))
    own = environment(container_of("worker", "gpus", "--set-string=worker.settings.QUIRE_TENSOR_PARALLEL_SIZE=2"))
    assert own["QUIRE_TENSOR_PARALLEL_SIZE"] == "2"


@every_case
def test_stopping_waits_for_longer_than_what_runs_is_given(case: str) -> None:
    for component in ("gateway", "worker"):
        spec = pods(render(*CASES[case]))[component]["spec"]
        (container,) = spec["containers"]
        drain = float(environment(container)["QUIRE_DRAIN_S"])
        sleep = int(container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["sleep", 0])[1])
        assert spec["terminationGracePeriodSeconds"] >= sleep + drain + GatewaySettings().shutdown_delay_s + 10
    assert container_of("gateway", *CASES[case])["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]


def test_probes_ask_what_is_served() -> None:
    served = {"http": set(PROBES), "internal": {"/health"}}
    gateway, worker = container_of("gateway"), container_of("worker")
    for container in (gateway, worker):
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert str(ports["internal"]) == environment(container)["QUIRE_INTERNAL_PORT"]
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            asked = container[probe]["httpGet"]
            assert asked["port"] in ports
            assert asked["path"] in served[asked["port"]]
    assert {port["name"]: str(port["containerPort"]) for port in gateway["ports"]}["http"] == environment(gateway)[
        "QUIRE_PORT"
    ]
    startup = worker["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] == VALUES["worker"]["startSeconds"]


def test_gateways_stay_ready_without_workers() -> None:
    # /readyz wants a worker: at none, no request would ever come in to start one.
    assert container_of("gateway", "scale-to-zero")["readinessProbe"]["httpGet"] == {
        "path": "/health",
        "port": "internal",
    }


def test_a_rollout_takes_nothing_away_before_its_replacement_is_ready() -> None:
    deployments = of_kind(render(), "Deployment")
    for deployment in deployments.values():
        assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxSurge": 1, "maxUnavailable": 0}
    in_place = of_kind(render("gpu"), "Deployment")["worker"]["spec"]["strategy"]["rollingUpdate"]
    assert in_place == {"maxSurge": 0, "maxUnavailable": 1}
