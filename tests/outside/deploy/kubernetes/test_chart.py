"""The objects of the chart in ops/deploy/kubernetes, rendered by the real helm, are valid and fit together."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import kubernetes_validate.utils
import pytest
import yaml

from quire.ops.paths import PROJECT_ROOT
from quire.shared.keys import GROUP, QUEUES, WAITING_QUEUES, LaneKeys
from tests.support.charts import (
    CASES,
    CHART,
    CUSTOM,
    EXAMPLES,
    KUBERNETES,
    LOADER,
    NAMESPACE,
    RELEASE,
    Object,
    container_of,
    environment,
    every_case,
    helm,
    of_kind,
    pods,
    render,
)


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
    words = [word for name in CASES[case] for word in ("--values", str(EXAMPLES / f"{name}.yaml"))]
    done = helm("lint", "--strict", str(CHART), *words)
    assert done.returncode == 0, done.stdout + done.stderr


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
    done = helm("template", "r" * 53, str(CHART), "--set=monitoring.enabled=true,worker.autoscaling.enabled=true")
    assert done.returncode == 0, done.stderr
    names = {item["metadata"]["name"] for item in yaml.load_all(done.stdout, LOADER) if item}
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
