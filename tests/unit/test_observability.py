"""cluster/observability/ and docs/traces.md: what they name exists, in each other and in the code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.telemetry.stages import REQUEST_HOLD, Stage

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cluster" / "observability"
FILES = sorted(FOLDER.rglob("*.yaml"))
TRACES = (ROOT / "docs" / "traces.md").read_text()
SPANS = {str(stage) for stage in Stage} | {REQUEST_HOLD}
OTLP_PORTS = {4317, 4318}


class Loader(yaml.SafeLoader):
    """YAML with Compose's own tag, which empties what an earlier file says."""


Loader.add_constructor("!reset", lambda loader, node: None)


def load(name: str | Path) -> list[dict[str, Any]]:
    return [document for document in yaml.load_all((FOLDER / name).read_text(), Loader) if document]


def merged(base: Any, over: Any) -> Any:
    """As the collector merges its files: maps key by key, everything else is replaced."""
    if not (isinstance(base, dict) and isinstance(over, dict)):
        return over
    return base | {key: merged(base[key], value) if key in base else value for key, value in over.items()}


def collector(*files: str) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for file in files:
        [one] = load(file)
        whole = merged(whole, one)
    return whole


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(FOLDER)))
def test_every_file_is_yaml(file: Path) -> None:
    """And says something."""
    assert load(file)


@pytest.mark.parametrize(
    ("files", "exporter"),
    [
        (["collector.yaml"], "otlp/jaeger"),
        (["collector.yaml", "collector-signoz.yaml"], "otlp/signoz"),
    ],
)
def test_collector_uses_what_it_defines(files: list[str], exporter: str) -> None:
    """Each part of a pipeline has a section; memory is limited first, batches are made after sampling."""
    config = collector(*files)
    [pipeline] = config["service"]["pipelines"].values()
    for kind, names in pipeline.items():
        assert set(names) <= set(config[kind]), kind
    assert set(config["service"]["extensions"]) == set(config["extensions"])
    assert pipeline["processors"] == ["memory_limiter", "tail_sampling", "batch"]
    assert pipeline["exporters"] == [exporter]


def test_collector_keeps_every_stage_every_error_and_what_was_held() -> None:
    """A stage with a name that the collector does not know would be sampled away."""
    policies = {
        policy["name"]: policy for policy in collector("collector.yaml")["processors"]["tail_sampling"]["policies"]
    }
    named = {
        kind: re.findall(r'name == "([^"]+)"', " ".join(policies[kind]["ottl_condition"]["span"]))
        for kind in ("stages", "held")
    }
    assert sorted(named["stages"]) == sorted(map(str, Stage))
    assert named["held"] == [REQUEST_HOLD]
    assert policies["errors"]["status_code"] == {"status_codes": ["ERROR"]}


def test_late_spans_of_a_cold_start_follow_its_decision() -> None:
    """It is longer than the wait, so decisions must be remembered, and for longer than the spans are."""
    sampling = collector("collector.yaml")["processors"]["tail_sampling"]
    assert sampling["decision_cache"]["sampled_cache_size"] > sampling["num_traces"]


def test_ports_and_names_are_the_same_everywhere() -> None:
    """What the collector listens on is published, and where it sends to is there: with Compose and on Kubernetes."""
    config = collector("collector.yaml")
    listens = {int(one["endpoint"].split(":")[1]) for one in config["receivers"]["otlp"]["protocols"].values()}
    assert listens == OTLP_PORTS
    [compose] = load("compose.yaml")
    published = {port.split(":")[1] for port in compose["services"]["collector"]["ports"]}
    assert {str(port) for port in OTLP_PORTS} < published
    assert all(port.startswith("127.0.0.1:") for one in compose["services"].values() for port in one.get("ports", []))
    services = {
        one["metadata"]["name"]: {port["port"] for port in one["spec"]["ports"]}
        for file in ("kubernetes/collector.yaml", "kubernetes/jaeger.yaml")
        for one in load(file)
        if one["kind"] == "Service"
    }
    assert services["collector"] > OTLP_PORTS
    host, port = config["exporters"]["otlp/jaeger"]["endpoint"].split(":")
    assert host in compose["services"] and int(port) in services[host]


def test_images_are_pinned_and_the_same_everywhere() -> None:
    """A version to the last digit; Compose and Kubernetes run the same."""
    [compose] = load("compose.yaml")
    images = {name: one["image"] for name, one in compose["services"].items()}
    assert all(re.search(r":v?\d+\.\d+\.\d+$", image) for image in images.values())
    for name in ("collector", "jaeger"):
        [deployment] = [one for one in load(f"kubernetes/{name}.yaml") if one["kind"] == "Deployment"]
        [container] = deployment["spec"]["template"]["spec"]["containers"]
        assert container["image"] == images[name]


def test_kubernetes_resources_are_there_and_select_each_other() -> None:
    """Every file that is listed exists; services and policies select the pods of a deployment."""
    [customization] = load("kustomization.yaml")
    listed = customization["resources"] + [file for one in customization["configMapGenerator"] for file in one["files"]]
    assert all((FOLDER / file).is_file() for file in listed)
    assert {f"kubernetes/{file.name}" for file in (FOLDER / "kubernetes").iterdir()} == set(customization["resources"])
    found = [one for file in customization["resources"] for one in load(file)]
    pods = [one["spec"]["template"]["metadata"]["labels"] for one in found if one["kind"] == "Deployment"]
    selected = [one["spec"]["selector"] for one in found if one["kind"] == "Service"]
    selected += [one["spec"]["podSelector"]["matchLabels"] for one in found if one["kind"] == "NetworkPolicy"]
    assert all(selector in pods for selector in selected) and len(selected) == 4


def test_mounted_files_exist() -> None:
    """What Compose mounts from this folder is here."""
    for file in ("compose.yaml", "compose.signoz.yaml"):
        [compose] = load(file)
        mounts = [mount.split(":")[0] for one in compose["services"].values() for mount in one.get("volumes", [])]
        assert all((FOLDER / mount).exists() for mount in mounts if mount.startswith("./"))


def test_documentation_has_every_span_and_no_other() -> None:
    """The table of spans is that of stages.py, and searches name only what is in it."""
    table = TRACES.split("## Spans")[1]
    assert sorted(re.findall(r"^\| `([\w.]+)` \|", table, re.MULTILINE)) == sorted(SPANS)
    searches = TRACES.split("## What to search for")[1].split("## Spans")[0]
    rows = [line.split("|") for line in searches.splitlines() if line.startswith("|")]
    named = {name for row in rows for name in re.findall(r"`([a-z_]+\.[a-z_.]+|[a-z_]+)`", row[2])}
    assert named and named <= SPANS


def test_documentation_names_attributes_that_the_code_sets() -> None:
    """An attribute that nobody sets finds nothing."""
    code = "\n".join(file.read_text() for file in (ROOT / "serve_app").rglob("*.py"))
    named = set(re.findall(r"serve_app\.(\w+)(?:=|`| =)", TRACES)) - {"role"}
    assert {"model", "tier", "rank", "slot"} <= named
    for name in named:
        assert re.search(rf'\b{name}=|"{name}"', code), name


def test_documentation_names_tests_that_exist() -> None:
    """Claims point at what holds them."""
    assert all((ROOT / file).is_file() for file in re.findall(r"`(tests/[\w/.]+)`", TRACES))
