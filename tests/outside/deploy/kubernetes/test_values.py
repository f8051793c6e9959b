"""The values of the chart in ops/deploy/kubernetes: the schema and helm refuse wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from quire.ops.tools import values_schema
from tests.support.charts import CHART, EXAMPLES, RELEASE, Object, helm

VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())


def test_the_schema_is_that_of_the_settings() -> None:
    remedy = "python -m quire.ops.tools.values_schema > ops/deploy/kubernetes/quire/values.schema.json"
    assert (CHART / "values.schema.json").read_text() == values_schema.render(), remedy


def test_values_and_schema_name_the_same() -> None:
    def compare(values: Any, schema: Object, path: str) -> None:
        if not isinstance(values, dict) or schema.get("additionalProperties") is not False or path.endswith("ettings"):
            return
        assert values.keys() == schema["properties"].keys() - {"global", "requests", "limits"}, path
        for name, value in values.items():
            compare(value, schema["properties"][name], f"{path}.{name}")

    def is_closed(schema: Object, path: str) -> None:
        if "properties" in schema:
            assert schema["additionalProperties"] is False, path
            for name, item in schema["properties"].items():
                is_closed(item, f"{path}.{name}")

    jsonschema.Draft7Validator.check_schema(SCHEMA)
    without_resources = json.loads(json.dumps(VALUES))
    for component in ("gateway", "worker", "redis"):
        assert without_resources[component].pop("resources").keys() == {"requests", "limits"}
        without_resources[component]["resources"] = {}
    compare(without_resources, SCHEMA, "values")
    is_closed(SCHEMA, "values")


@pytest.mark.parametrize("path", [CHART / "values.yaml", *EXAMPLES.iterdir()], ids=lambda path: path.stem)
def test_good_values_pass(path: Path) -> None:
    jsonschema.Draft7Validator(SCHEMA).validate(yaml.safe_load(path.read_text()))


BAD = {
    "unknown": ({"gateway": {"replica": 3}}, "replica"),
    "unknown at the top": ({"gatway": {}}, "gatway"),
    "type": ({"gateway": {"replicas": "3"}}, "replicas"),
    "range": ({"gateway": {"service": {"port": 70000}}}, "port"),
    "choice": ({"worker": {"device": "tpu"}}, "device"),
    "no GPU for an engine": ({"worker": {"gpus": 0}}, "gpus"),
    "name of a model": ({"model": {"name": "a model"}}, "name"),
    "address of the runbook": ({"monitoring": {"runbookUrl": "docs/runbook.md"}}, "runbookUrl"),
    "quantity": ({"redis": {"persistence": {"size": "many"}}}, "size"),
    "no setting": ({"settings": {"QUIRE_LOGLEVEL": "debug"}}, "QUIRE_LOGLEVEL"),
    "setting of the other": ({"gateway": {"settings": {"QUIRE_BLOCK_SIZE": "16"}}}, "QUIRE_BLOCK_SIZE"),
    "setting of the chart": ({"worker": {"settings": {"QUIRE_WORKER_ID": "me"}}}, "QUIRE_WORKER_ID"),
    "number where helm would spoil it": ({"gateway": {"settings": {"QUIRE_MAX_QUEUED_TOKENS": 2000000}}}, "QUEUED"),
    "value of a setting": ({"settings": {"QUIRE_LOG_LEVEL": "loud"}}, "QUIRE_LOG_LEVEL"),
}


@pytest.mark.parametrize(("values", "name"), BAD.values(), ids=BAD)
def test_bad_values_are_refused(values: Object, name: str) -> None:
    with pytest.raises(jsonschema.ValidationError) as refusal:
        jsonschema.Draft7Validator(SCHEMA).validate(values)
    assert name in f"{refusal.value.json_path} {refusal.value.message}"


def test_helm_refuses_what_the_schema_refuses(tmp_path: Path) -> None:
    values = {"gatway": {}, "worker": {"device": "tpu"}, "settings": {"QUIRE_LOGLEVEL": "debug"}}
    (tmp_path / "values.yaml").write_text(yaml.safe_dump(values))
    done = helm("template", RELEASE, str(CHART), "--values", str(tmp_path / "values.yaml"))
    assert done.returncode != 0
    assert all(name in done.stderr for name in ("'gatway'", "/worker/device", "QUIRE_LOGLEVEL"))


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ("redis.enabled=false", "redis.external.host: it is not set; give"),
        (
            "gateway.autoscaling.minReplicas=9",
            "gateway.autoscaling.minReplicas: 9 is more than maxReplicas, 8; lower it",
        ),
        (
            "worker.autoscaling.enabled=true,worker.autoscaling.minReplicas=5",
            "worker.autoscaling.minReplicas: 5 is more than maxReplicas, 4; lower it",
        ),
        # A file name instead of the text of the file, and invalid YAML.
        ("monitoring.enabled=true,monitoring.rules=rules.yml", "monitoring.rules: there are no groups in it; give"),
        ("monitoring.enabled=true,monitoring.rules=groups: [", "monitoring.rules: error converting YAML"),
    ],
)
def test_values_that_do_not_fit_each_other_are_refused(values: str, complaint: str) -> None:
    done = helm("template", RELEASE, str(CHART), f"--set={values}")
    assert done.returncode != 0
    assert complaint in done.stderr
