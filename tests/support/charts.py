"""Renders the chart of ops/deploy/kubernetes with Helm's own library. Has schemas for the objects of other operators.

Objects of KEDA and of the Prometheus operator are checked by strict schemas of the fields that the chart uses, as these
projects document them; they are not the projects' own schemas.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

import pytest
import yaml

from quire.ops.paths import PROJECT_ROOT

CHART = PROJECT_ROOT / "ops/deploy/kubernetes/quire"
EXAMPLES = PROJECT_ROOT / "ops/deploy/kubernetes/examples"
# Ten times as fast as the one in Python, where it is there.
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
RELEASE, NAMESPACE = "demo", "models"

Object = dict[str, Any]

# The oldest that the chart allows, and the newest that the validator knows.
KUBERNETES = ("1.27", "1.37")

# A release with as few objects as possible.
BARE = (
    "--set=gateway.autoscaling.enabled=false,networkPolicy.enabled=false,podDisruptionBudget.enabled=false",
    "--set=redis.enabled=false,redis.external.host=redis",
)
# Every example, all of them together, and as little as can be.
CASES: dict[str, tuple[str, ...]] = {
    "default": (),
    "gpu": ("gpu",),
    "gpus": ("gpus",),
    "scale-to-zero": ("scale-to-zero",),
    "external-redis": ("external-redis",),
    "monitoring": ("monitoring",),
    "several-models": ("several-models",),
    "all": ("gpu", "scale-to-zero", "external-redis", "monitoring"),
    "bare": BARE,
}
SETTINGS = (
    "--set-string=settings.QUIRE_LOG_LEVEL=debug,worker.settings.QUIRE_LOG_LEVEL=error,worker.settings.QUIRE_THREADS=3",
)
every_case = pytest.mark.parametrize("case", CASES)


def helm() -> Any:
    """Return the module of Helm's library, which must be there in CI; elsewhere tests are skipped without it."""
    try:
        import helm_python
    except ImportError:
        why = "Helm's library is not installed: pip install -c constraints.txt helm-python-sdk"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    return helm_python


def merged_values(*arguments: str) -> Object:
    """Return the values of these arguments of `helm`: --set and the like, or the name of an example.

    Later arguments win, and Helm's order is kept: first the files, then --set, --set-string and --set-file.
    """
    parsers = {"set": helm().parse_set_string, "set-string": helm().parse_set_string_values}
    parsers["set-file"] = helm().parse_set_file
    values: Object = {}
    for name in (argument for argument in arguments if not argument.startswith("--")):
        _merge(values, yaml.load((EXAMPLES / f"{name}.yaml").read_text(), LOADER))
    for flag, parse in parsers.items():
        for argument in arguments:
            if argument.startswith(f"--{flag}="):
                _merge(values, parse(argument.partition("=")[2]))
    return values


def _merge(values: Object, others: Object) -> None:
    for name, value in others.items():
        if isinstance(value, dict) and isinstance(values.get(name), dict):
            _merge(values[name], value)
        else:
            values[name] = value


def template(values: Object, release: str = RELEASE) -> tuple[Object, ...]:
    """Return the objects of `helm template`. Raises HelmError for wrong values, as helm ends with an error."""
    chart = helm().Chart.load(CHART)
    chart.validate_schema(chart.merge_values(values))
    files = chart.render(values, name=release, namespace=NAMESPACE)
    texts = [text for name, text in sorted(files.items()) if name.endswith(".yaml")]
    return tuple(item for text in texts for item in yaml.load_all(text, LOADER) if item)


@cache
def render(*arguments: str) -> tuple[Object, ...]:
    """Return the objects of `helm template` with these arguments; the name of an example stands for its file."""
    return template(merged_values(*arguments))


def of_kind(objects: tuple[Object, ...], kind: str) -> dict[str, Object]:
    """By name, without the release's part of it."""
    found = {item["metadata"]["name"]: item for item in objects if item["kind"] == kind}
    assert len(found) == sum(item["kind"] == kind for item in objects), f"two of {kind} have one name"
    return {name.removeprefix(f"{RELEASE}-quire").removeprefix("-"): item for name, item in found.items()}


def pods(objects: tuple[Object, ...]) -> dict[str, Object]:
    """The pod templates, by component."""
    templates = [item["spec"]["template"] for item in objects if item["kind"] in ("Deployment", "StatefulSet")]
    return {item["metadata"]["labels"]["app.kubernetes.io/component"]: item for item in templates}


def container_of(component: str, *arguments: str) -> Object:
    """The only container of a component's pods."""
    (container,) = pods(render(*arguments))[component]["spec"]["containers"]
    assert isinstance(container, dict)
    return container


def environment(container: Object) -> dict[str, Any]:
    """The variables of a container by name: their values, or the objects that name the source of the value."""
    entries = container["env"]
    assert len({entry["name"] for entry in entries}) == len(entries), "a variable is given twice"
    return {entry["name"]: entry.get("value", entry.get("valueFrom")) for entry in entries}


def _closed(required: str, **properties: Any) -> Object:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": required.split(),
        "properties": properties,
    }


_TEXT = {"type": "string", "minLength": 1}
_TEXTS = {"type": "object", "additionalProperties": _TEXT}
_WHOLE = {"type": "integer", "minimum": 0}
_LABELS = _closed("matchLabels", matchLabels=_TEXTS)


def _custom(version: str, spec: Object) -> Object:
    metadata = _closed("name labels", name=_TEXT, labels=_TEXTS)
    return _closed(
        "apiVersion kind metadata spec", apiVersion={"const": version}, kind=_TEXT, metadata=metadata, spec=spec
    )


CUSTOM: dict[str, Object] = {
    "ScaledObject": _custom(
        "keda.sh/v1alpha1",
        _closed(
            "scaleTargetRef minReplicaCount maxReplicaCount triggers",
            scaleTargetRef=_closed("name", apiVersion=_TEXT, kind=_TEXT, name=_TEXT),
            minReplicaCount=_WHOLE,
            maxReplicaCount=_WHOLE,
            pollingInterval=_WHOLE,
            cooldownPeriod=_WHOLE,
            advanced=_closed(
                "",
                scalingModifiers=_closed(
                    "formula target",
                    formula=_TEXT,
                    target=_TEXT,
                    activationTarget=_TEXT,
                    metricType={"enum": ["AverageValue", "Value"]},
                ),
                horizontalPodAutoscalerConfig={"type": "object"},
            ),
            triggers={
                "type": "array",
                "minItems": 1,
                "items": _closed(
                    "type metadata",
                    type={"const": "redis-streams"},
                    name=_TEXT,
                    # KEDA takes texts only.
                    metadata=_closed(
                        "address stream streamLength",
                        address={"type": "string", "pattern": "^[^/:]+:[0-9]+$"},
                        stream=_TEXT,
                        streamLength={"type": "string", "pattern": "^[0-9]+$"},
                        databaseIndex={"type": "string", "pattern": "^[0-9]+$"},
                        enableTLS={"enum": ["true", "false"]},
                        username=_TEXT,
                    ),
                    authenticationRef=_closed("name", name=_TEXT),
                ),
            },
        ),
    ),
    "TriggerAuthentication": _custom(
        "keda.sh/v1alpha1",
        _closed(
            "secretTargetRef",
            secretTargetRef={
                "type": "array",
                "items": _closed("parameter name key", parameter={"const": "password"}, name=_TEXT, key=_TEXT),
            },
        ),
    ),
    "ServiceMonitor": _custom(
        "monitoring.coreos.com/v1",
        _closed(
            "selector endpoints",
            selector=_LABELS,
            namespaceSelector=_closed("matchNames", matchNames={"type": "array", "items": _TEXT}),
            endpoints={
                "type": "array",
                "minItems": 1,
                "items": _closed(
                    "port",
                    port=_TEXT,
                    path=_TEXT,
                    interval={"type": "string", "pattern": "^[0-9]+s$"},
                    relabelings={
                        "type": "array",
                        "items": _closed("targetLabel", targetLabel=_TEXT, replacement=_TEXT),
                    },
                ),
            },
        ),
    ),
    "PrometheusRule": _custom(
        "monitoring.coreos.com/v1",
        _closed(
            "groups",
            groups={
                "type": "array",
                "minItems": 1,
                "items": _closed(
                    "name rules",
                    name=_TEXT,
                    interval=_TEXT,
                    rules={
                        "type": "array",
                        "items": {
                            "type": "object",
                            "required": ["expr"],
                            "properties": {"expr": _TEXT, "alert": _TEXT, "record": _TEXT},
                        },
                    },
                ),
            },
        ),
    ),
}
