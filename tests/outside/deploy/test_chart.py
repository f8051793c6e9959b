"""The chart of ops/deploy/kubernetes, rendered by Helm's own library: objects that fit together, pods, and values."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from quire.gateway.server.access_log import PROBES
from quire.gateway.settings import GatewaySettings
from quire.ops.paths import PROJECT_ROOT
from quire.ops.tools import values_schema
from quire.shared.config.settings import options
from quire.shared.protocol.keys import GROUP, QUEUES, WAITING_QUEUES, LaneKeys
from quire.worker.settings import WorkerSettings
from tests.support.charts import (
    CASES,
    CHART,
    CUSTOM,
    EXAMPLES,
    KUBERNETES,
    NAMESPACE,
    RELEASE,
    SETTINGS,
    Object,
    container_of,
    environment,
    every_case,
    helm,
    merged_values,
    of_kind,
    pods,
    render,
    template,
)

# --- chart ------------------------------------------------------------------------------------------------------------
# The objects of the chart in ops/deploy/kubernetes, rendered by Helm's own library, are valid and fit together.


@pytest.fixture(scope="module", autouse=True)
def _schemas_are_read_once() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kubernetes_validate.utils, "schema_contents", cache(kubernetes_validate.utils.schema_contents))
        yield


@cache
def check(text: str, version: str) -> None:
    """Raises ValidationError. Equal objects of several cases are checked once."""
    item = json.loads(text)
    if item["kind"] in CUSTOM:
        jsonschema.validate(item, CUSTOM[item["kind"]])
    else:
        kubernetes_validate.validate(item, version, strict=True)


@every_case
def test_every_object_is_valid(case: str) -> None:
    objects = render(*CASES[case])
    assert objects
    for item in objects:
        for version in KUBERNETES:
            check(json.dumps(item, sort_keys=True), version)


def test_the_validator_sees_what_is_wrong() -> None:
    deployment = of_kind(render(), "Deployment")["gateway"]
    wrong = json.loads(json.dumps(deployment))
    wrong["spec"]["template"]["spec"]["containers"][0]["imagePullPolicies"] = "Always"
    with pytest.raises(kubernetes_validate.ValidationError, match="imagePullPolicies"):
        kubernetes_validate.validate(wrong, KUBERNETES[-1], strict=True)


@pytest.mark.parametrize("case", ["default", "all"])
def test_helm_finds_nothing_to_complain_about(case: str) -> None:
    found = helm().lint(CHART, merged_values(*CASES[case]), strict=True)
    assert found["errors"] == []
    assert [one for one in found["messages"] if one["severity"] > 1] == []


def test_every_example_is_a_case() -> None:
    assert {path.stem for path in EXAMPLES.iterdir()} <= CASES.keys()


# --- objects and each other -------------------------------------------------------------------------------------------


@every_case
def test_everything_that_is_named_is_there(case: str) -> None:
    objects = render(*CASES[case])
    names = {(item["kind"], item["metadata"]["name"]) for item in objects}
    assert len(names) == len(objects)
    labels = [pod["metadata"]["labels"] for pod in pods(objects).values()]

    def selects(selector: Object) -> list[Object]:
        wanted = selector.items()
        return [entry for entry in labels if wanted <= entry.items()]

    for item in objects:
        spec = item.get("spec", {})
        if item["kind"] in ("Deployment", "StatefulSet"):
            assert len(selects(spec["selector"]["matchLabels"])) == 1
            assert spec["selector"]["matchLabels"].items() <= spec["template"]["metadata"]["labels"].items()
            assert ("ServiceAccount", spec["template"]["spec"]["serviceAccountName"]) in names
        if item["kind"] == "PodDisruptionBudget":
            assert len(selects(spec["selector"]["matchLabels"])) == 1
            assert spec["maxUnavailable"] == 1
        if item["kind"] in ("HorizontalPodAutoscaler", "ScaledObject"):
            assert (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"]) in names
            (target,) = (
                other
                for other in objects
                if (other["kind"], other["metadata"]["name"])
                == (spec["scaleTargetRef"]["kind"], spec["scaleTargetRef"]["name"])
            )
            assert "replicas" not in target["spec"], "helm and the autoscaler would undo each other's work"
        if item["kind"] == "Service":
            (pod,) = (
                pod for pod in pods(objects).values() if spec["selector"].items() <= pod["metadata"]["labels"].items()
            )
            ports = {port["name"] for port in pod["spec"]["containers"][0]["ports"]}
            assert all(port["targetPort"] in ports for port in spec["ports"])
        if item["kind"] == "ServiceMonitor":
            (service,) = (
                other
                for other in of_kind(objects, "Service").values()
                if spec["selector"]["matchLabels"].items() <= other["metadata"]["labels"].items()
            )
            assert {end["port"] for end in spec["endpoints"]} <= {port["name"] for port in service["spec"]["ports"]}


def test_names_of_the_longest_release_fit() -> None:
    values = merged_values("--set=monitoring.enabled=true,worker.autoscaling.enabled=true")
    names = {item["metadata"]["name"] for item in template(values, "r" * 53)}
    assert max(map(len, names)) <= 63
    # The names of their pods get an ending of up to 17 letters.
    assert all(len(name) + 17 <= 63 for name in names if name.endswith(("-gateway", "-worker", "-redis")))


@every_case
def test_secrets_are_in_secrets_only(case: str) -> None:
    objects = render(*CASES[case])
    secrets = of_kind(objects, "Secret")
    for component in ("gateway", "worker"):
        given = environment(container_of(component, *CASES[case]))
        if case == "bare":
            assert given["QUIRE_REDIS_URL"] == "redis://redis:6379/0"
            assert "REDIS_PASSWORD" not in given
            continue
        source = given["REDIS_PASSWORD"]["secretKeyRef"]
        assert list(given).index("REDIS_PASSWORD") < list(given).index("QUIRE_REDIS_URL"), "else it is not put in"
        assert "$(REDIS_PASSWORD)@" in given["QUIRE_REDIS_URL"]
        if "redis" in secrets:
            assert source == {"name": f"{RELEASE}-quire-redis", "key": "password"}
            assert source["key"] in secrets["redis"]["data"]
        else:
            assert source == {"name": "quire-redis", "key": "password"}
    if "redis" in secrets:
        password = secrets["redis"]["data"]["password"]
        assert json.dumps(objects).count(password) == 1


def test_an_external_redis_is_spoken_to_as_it_wants() -> None:
    given = environment(container_of("worker", "external-redis"))
    assert given["QUIRE_REDIS_URL"] == "rediss://quire:$(REDIS_PASSWORD)@redis.example:6380/2"
    assert not of_kind(render("external-redis"), "StatefulSet")


# --- scaling ----------------------------------------------------------------------------------------------------------


def test_workers_scale_on_every_queue_of_the_lane() -> None:
    model = "org/model@1"
    scaled = of_kind(render("scale-to-zero", f"--set=model.name={model}"), "ScaledObject")["worker"]["spec"]
    streams = {trigger["name"]: trigger["metadata"]["stream"] for trigger in scaled["triggers"]}
    assert streams == {name.replace(":", "_"): LaneKeys(model).queue(name) for name in (*QUEUES, *WAITING_QUEUES)}
    assert set(scaled["advanced"]["scalingModifiers"]["formula"].split(" + ")) == set(streams)
    assert scaled["advanced"]["scalingModifiers"]["target"] == "16"
    assert scaled["advanced"]["scalingModifiers"]["activationTarget"] == "0"
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 8)
    # With a group KEDA would ask for its lag or its pending entries.
    assert GROUP not in json.dumps(scaled["triggers"]).replace("demo-quire-worker", "")
    host = f"{RELEASE}-quire-redis.{NAMESPACE}.svc:6379"
    assert all(trigger["metadata"]["address"] == host for trigger in scaled["triggers"])


def test_the_scaler_logs_in_as_the_workers_do() -> None:
    for case, secret in (("scale-to-zero",), f"{RELEASE}-quire-redis"), (CASES["all"], "quire-redis"):
        objects = render(*case)
        authentication = of_kind(objects, "TriggerAuthentication")["redis"]
        for trigger in of_kind(objects, "ScaledObject")["worker"]["spec"]["triggers"]:
            assert trigger["authenticationRef"]["name"] == authentication["metadata"]["name"]
        assert authentication["spec"]["secretTargetRef"] == [
            {"parameter": "password", "name": secret, "key": "password"}
        ]
    metadata = of_kind(render(*CASES["all"]), "ScaledObject")["worker"]["spec"]["triggers"][0]["metadata"]
    assert metadata["address"] == "redis.example:6380"
    assert (metadata["enableTLS"], metadata["databaseIndex"], metadata["username"]) == ("true", "2", "quire")


# --- the network ------------------------------------------------------------------------------------------------------


def test_nobody_reaches_what_he_need_not() -> None:
    policies = of_kind(render("scale-to-zero"), "NetworkPolicy")
    default = policies["default"]["spec"]
    assert default["policyTypes"] == ["Ingress", "Egress"]
    assert "ingress" not in default
    assert all(
        default["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
        for pod in pods(render()).values()
    )
    assert [port["port"] for rule in default["egress"] for port in rule["ports"]] == [53, 53]

    def components(peers: list[Object]) -> list[str]:
        return [
            peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"]
            if "podSelector" in peer
            else peer["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"]
            for peer in peers
        ]

    (to_redis,) = policies["redis"]["spec"]["ingress"]
    assert components(to_redis["from"]) == ["gateway", "worker", "keda"]
    (without_keda,) = of_kind(render(), "NetworkPolicy")["redis"]["spec"]["ingress"]
    assert components(without_keda["from"]) == ["gateway", "worker"]
    (to_worker,) = policies["worker"]["spec"]["ingress"]
    assert (to_worker["ports"], components(to_worker["from"])) == (
        [{"protocol": "TCP", "port": "internal"}],
        ["monitoring"],
    )
    # Clients reach the public port, and operators the other one.
    public, internal = policies["gateway"]["spec"]["ingress"]
    assert ([port["port"] for port in public["ports"]], "from" in public) == (["http"], False)
    assert [port["port"] for port in internal["ports"]] == ["internal"]
    assert components(internal["from"]) == ["monitoring"]
    for component in ("gateway", "worker"):
        (out,) = policies[component]["spec"]["egress"]
        assert (out["ports"], components(out["to"])) == ([{"protocol": "TCP", "port": 6379}], ["redis"])


def test_the_way_out_is_open_only_to_download_a_model() -> None:
    for case, ports in ((), [6379]), (("gpu",), [6379, 443]), (("external-redis",), [6380]):
        policy = of_kind(render(*case), "NetworkPolicy")["worker"]["spec"]
        assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == ports
    (out,) = of_kind(render("external-redis"), "NetworkPolicy")["worker"]["spec"]["egress"]
    assert out["to"] == [{"ipBlock": {"cidr": "192.0.2.0/24"}}]


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://collector.observe:4318", 4318), ("https://[::1]:43/x", 43), ("https://traces", 443), ("http://c/", 80)],
)
def test_spans_reach_their_collector(url: str, port: int) -> None:
    for setting, components in (("settings", ["gateway", "worker"]), ("worker.settings", ["worker"])):
        policies = of_kind(render(f"--set-string={setting}.QUIRE_OTLP_ENDPOINT={url}"), "NetworkPolicy")
        for component in ("gateway", "worker"):
            ports = [port["port"] for rule in policies[component]["spec"]["egress"] for port in rule["ports"]]
            assert ports == ([6379, port] if component in components else [6379])


# --- monitoring -------------------------------------------------------------------------------------------------------


def test_rules_are_taken_as_they_are(tmp_path: Path) -> None:
    rule = {"alert": "A", "expr": "up == 0", "annotations": {"summary": "{{ $labels.job }} {{ .Values.worker }}"}}
    groups = [{"name": "quire", "rules": [rule]}]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": groups}))
    objects = render("monitoring", f"--set-file=monitoring.rules={tmp_path / 'rules.yml'}")
    (found,) = of_kind(objects, "PrometheusRule").values()
    assert found["spec"]["groups"] == groups
    assert found["metadata"]["labels"]["release"] == "prometheus"
    check(json.dumps(found), KUBERNETES[0])


def test_rules_of_this_project_are_taken() -> None:
    folder = PROJECT_ROOT / "ops/deploy/prometheus/rules"
    for path in [*folder.glob("*.yml"), *folder.glob("*.yaml")]:
        groups = yaml.safe_load(path.read_text())["groups"]
        for rule in (rule for group in groups for rule in group["rules"] if "alert" in rule):
            del rule["annotations"]["runbook_url"]  # a page that nothing in the cluster serves
        (found,) = of_kind(render("monitoring", f"--set-file=monitoring.rules={path}"), "PrometheusRule").values()
        assert found["spec"]["groups"] == groups


def test_alerts_link_to_the_runbook_where_it_is() -> None:
    path, url = PROJECT_ROOT / "ops/deploy/prometheus/rules/quire.yml", "https://wiki.example.com/quire"
    objects = render("monitoring", f"--set-file=monitoring.rules={path}", f"--set=monitoring.runbookUrl={url}")
    (found,) = of_kind(objects, "PrometheusRule").values()
    alerts = [rule for group in found["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert alerts
    assert all(rule["annotations"]["runbook_url"] == f"{url}#{rule['alert'].lower()}" for rule in alerts)


def test_files_of_rules_can_be_given_one_behind_the_other(tmp_path: Path) -> None:
    paths = sorted((PROJECT_ROOT / "ops/deploy/prometheus/rules").glob("*.yml"))
    assert len(paths) > 1
    (tmp_path / "rules.yml").write_text("".join(path.read_text() for path in paths))
    objects = render("monitoring", f"--set-file=monitoring.rules={tmp_path / 'rules.yml'}")
    (found,) = of_kind(objects, "PrometheusRule").values()
    names = [group["name"] for path in paths for group in yaml.safe_load(path.read_text())["groups"]]
    assert [group["name"] for group in found["spec"]["groups"]] == names


# --- pods -------------------------------------------------------------------------------------------------------------
# The pods of the chart in ops/deploy/kubernetes: what they may do, what they are told, and how they stop.


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


# --- values -----------------------------------------------------------------------------------------------------------
# The values of the chart in ops/deploy/kubernetes: the schema and helm refuse wrong ones.


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


def test_helm_refuses_what_the_schema_refuses() -> None:
    values = {"gatway": {}, "worker": {"device": "tpu"}, "settings": {"QUIRE_LOGLEVEL": "debug"}}
    with pytest.raises(helm().HelmError) as refusal:
        template(values)
    assert all(name in str(refusal.value) for name in ("'gatway'", "/worker/device", "QUIRE_LOGLEVEL"))


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
    with pytest.raises(helm().HelmError) as refusal:
        render(f"--set={values}")
    assert complaint in str(refusal.value)
