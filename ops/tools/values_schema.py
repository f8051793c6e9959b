"""Prints values.schema.json of the chart, by which helm refuses unknown and invalid values.

The settings and their allowed values come from the gateway and the worker. A test checks that the file is up to date.

python -m quire.ops.tools.values_schema > ops/deploy/kubernetes/quire/values.schema.json
"""

from __future__ import annotations

import json
from typing import Any

from quire.gateway.settings import GatewaySettings
from quire.shared.config.settings import Option, options
from quire.worker.settings import WorkerSettings

# Settings that the chart sets itself, from other values or differently for each pod.
DECIDED = {
    "QUIRE_DEVICE",
    "QUIRE_DRAIN_S",
    "QUIRE_GATEWAY_ID",
    "QUIRE_HOST",
    "QUIRE_INTERNAL_HOST",
    "QUIRE_INTERNAL_PORT",
    "QUIRE_MODEL",
    "QUIRE_PORT",
    "QUIRE_REDIS_URL",
    "QUIRE_REUSE_PORT",
    "QUIRE_SERVED_MODEL_NAME",
    "QUIRE_WORKER_ID",
}

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
NAME: Schema = {"type": "string", "minLength": 1}
FLAG: Schema = {"type": "boolean"}
TEXTS: Schema = {"type": "object", "additionalProperties": TEXT}
ANYTHING: Schema = {"type": "object"}
LIST: Schema = {"type": "array", "items": {"type": "object"}}
# The name of a Kubernetes object, or an empty text.
OBJECT_NAME: Schema = {"type": "string", "pattern": r"^([a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?)?$"}
# The URL of a page, or an empty text.
URL: Schema = {"type": "string", "pattern": r"^(https?://[^\s#]+)?$"}
KEY: Schema = {"type": "string", "pattern": r"^[A-Za-z0-9._-]+$"}
QUANTITY: Schema = {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|Ki|M|Mi|G|Gi|T|Ti|P|Pi)?$"}
QUANTITIES: Schema = {
    "type": "object",
    "additionalProperties": {"anyOf": [QUANTITY, {"type": "number", "minimum": 0}]},
}


def count(minimum: int, maximum: int | None = None) -> Schema:
    """Return an integer from `minimum` to `maximum`."""
    return {"type": "integer", "minimum": minimum} | ({} if maximum is None else {"maximum": maximum})


def group(**properties: Schema) -> Schema:
    """Return an object that allows only these keys. All keys are optional."""
    return {"type": "object", "additionalProperties": False, "properties": properties}


def setting(item: Option) -> Schema:
    """Return the schema of a setting. The value is a string, because helm would write the number 2000000 as 2e+06."""
    schema: Schema = {"type": "string", "description": item.help}
    if item.kind is bool:
        return schema | {"enum": ["true", "false"]}
    if item.choices:
        return schema | {"enum": [str(choice) for choice in item.choices]}
    if item.kind is int:
        return schema | {"pattern": "^[0-9]+$"}
    if item.kind is float:
        return schema | {"pattern": r"^[0-9]+(\.[0-9]+)?$"}
    return schema


def settings(*classes: Any) -> Schema:
    """Return the settings that all of these classes have, except those that the chart sets itself."""
    by_variable = [{item.variable: item for item in options(cls)} for cls in classes]
    names = set.intersection(*(set(entry) for entry in by_variable)) - DECIDED
    return group(**{name: setting(by_variable[0][name]) for name in sorted(names)})


def image() -> Schema:
    policies = {"type": "string", "enum": ["Always", "IfNotPresent", "Never"]}
    return group(repository=NAME, tag=TEXT, pullPolicy=policies)


RESOURCES = group(requests=QUANTITIES, limits=QUANTITIES)
PLACEMENT = {"nodeSelector": TEXTS, "tolerations": LIST, "affinity": ANYTHING, "priorityClassName": OBJECT_NAME}
DRAIN = count(0, 86400)
SECONDS = count(1, 86400)


def gateway() -> Schema:
    return group(
        image=image(),
        replicas=count(0),
        autoscaling=group(enabled=FLAG, minReplicas=count(1), maxReplicas=count(1), targetCPUUtilization=count(1, 100)),
        settings=settings(GatewaySettings),
        files=group(existingClaim=OBJECT_NAME, s3=group(url=TEXT, endpoint=TEXT, secret=OBJECT_NAME)),
        drainSeconds=DRAIN,
        preStopSeconds=count(0, 300),
        startSeconds=SECONDS,
        service=group(
            type={"type": "string", "enum": ["ClusterIP", "NodePort", "LoadBalancer"]},
            port=count(1, 65535),
            annotations=TEXTS,
        ),
        resources=RESOURCES,
        podAnnotations=TEXTS,
        **PLACEMENT,
    )


def worker() -> Schema:
    return group(
        image=image(),
        device={"type": "string", "enum": ["cpu", "cuda"]},
        gpus=count(1, 64),
        gpuResource=NAME,
        runtimeClassName=OBJECT_NAME,
        replicas=count(0),
        autoscaling=group(
            enabled=FLAG,
            minReplicas=count(0),
            maxReplicas=count(1),
            requestsPerWorker=count(1),
            pollingSeconds=SECONDS,
            cooldownSeconds=count(0, 86400),
            # The longest window that a HorizontalPodAutoscaler allows.
            scaleDownSeconds=count(0, 3600),
            kedaNamespace=NAME,
        ),
        settings=settings(WorkerSettings),
        drainSeconds=DRAIN,
        startSeconds=SECONDS,
        maxSurge=count(0),
        sharedMemory=QUANTITY,
        resources=RESOURCES,
        podAnnotations=TEXTS,
        **PLACEMENT,
    )


def redis() -> Schema:
    return group(
        enabled=FLAG,
        image=image(),
        maxMemory={"type": "string", "pattern": "^[1-9][0-9]*(kb|mb|gb)$"},
        persistence=group(size=QUANTITY, storageClass=OBJECT_NAME),
        resources=RESOURCES,
        nodeSelector=TEXTS,
        tolerations=LIST,
        existingSecret=OBJECT_NAME,
        existingSecretKey=KEY,
        external=group(
            host={"type": "string", "pattern": r"^[A-Za-z0-9.:\[\]-]*$"},
            port=count(1, 65535),
            database=count(0, 1_000_000),
            username={"type": "string", "pattern": "^[A-Za-z0-9_-]*$"},
            tls=FLAG,
        ),
    )


def schema() -> Schema:
    """Return the whole schema. Helm itself adds the key `global`."""
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart quire; made by python -m quire.ops.tools.values_schema",
        **group(
            nameOverride={"type": "string", "pattern": "^([a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?)?$"},
            imagePullSecrets=LIST,
            model=group(
                name={"type": "string", "pattern": "^[A-Za-z0-9._/:@+-]{1,256}$"},
                path=NAME,
                existingClaim=OBJECT_NAME,
                cache=group(existingClaim=OBJECT_NAME, sizeLimit=QUANTITY),
                huggingFaceSecret=OBJECT_NAME,
                huggingFaceKey=KEY,
            ),
            settings=settings(GatewaySettings, WorkerSettings),
            userId=count(1),
            gateway=gateway(),
            worker=worker(),
            redis=redis(),
            networkPolicy=group(enabled=FLAG, clients=LIST, monitoring=LIST, externalRedis=LIST, dns=LIST),
            podDisruptionBudget=group(enabled=FLAG),
            monitoring=group(enabled=FLAG, labels=TEXTS, intervalSeconds=SECONDS, rules=TEXT, runbookUrl=URL),
            **{"global": ANYTHING},
        ),
    }


def render() -> str:
    """Return the text of the file."""
    return json.dumps(schema(), indent=2) + "\n"


if __name__ == "__main__":
    print(render(), end="")
