"""What `serve-app doctor` alone looks at: every check has a node that fails it; and how the looking works."""

from __future__ import annotations

import http.server
import os
import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import save_file

from serve_app import SERVE_ENVIRONMENT
from serve_app.config import ModelConfig
from serve_app.gpu import disk, survey
from serve_app.gpu.facts import Clock, Disk, Finding, Gpu, Holder, HttpPort, Level, NodeFacts, RayNode, Survey, Wanted
from serve_app.gpu.requirements import CHECKS, SURVEY_CHECKS, check, check_cluster
from serve_app.models import problems
from serve_app.slot.probes import Probe

from .test_requirements import FACTS, GB, WANTED, slot, software

GPU = Gpu("GPU-0", generation=5, width=16, full_generation=5, full_width=16, numa=0)
SURVEY = Survey(
    gpus=(GPU,) * 8,
    numa_nodes=2,
    shm_bytes=64 * GB,
    open_files=1 << 20,
    locked_bytes=None,
    disk=Disk("/models", 3e9),
    models={"m": ()},
    caches=("vLLM 0.26.0, torch 2.11.0+cu130",),
    http=HttpPort.OURS,
    rays_environment=SERVE_ENVIRONMENT,
)
SIMULATED = replace(WANTED, models=(ModelConfig(id="m", engine="simulated"),))


def surveyed(facts: NodeFacts = FACTS, **changes: Any) -> NodeFacts:
    return replace(facts, survey=replace(SURVEY, **changes))


def gpu(**changes: Any) -> NodeFacts:
    return surveyed(gpus=(replace(GPU, **changes), *SURVEY.gpus[1:]))


def found(name: str, facts: NodeFacts, wanted: Wanted = WANTED) -> Finding:
    [finding] = [finding for finding in check(facts, wanted) if finding.check == name]
    return finding


def test_a_good_node_passes_every_check() -> None:
    """Also one of several that a slot spans, and one that has no GPU."""
    spans = slot(nodes=2, gpus=16)
    head = surveyed(replace(FACTS, ray=RayNode("10.0.0.7")), gpus=(), caches=())
    for facts, wanted in ((surveyed(), WANTED), (surveyed(), spans), (head, WANTED)):
        levels = [finding.level for finding in check(facts, wanted)]
        assert levels == [Level.OK] * len(CHECKS + SURVEY_CHECKS)


STRANGER = Holder(4711, 20 * GB, "python train.py")
ERRORS = [
    ("leftovers", gpu(used=20 * GB, holders=(STRANGER,)), WANTED, ["GPU-0", "pid 4711 (python train.py, 20.0 GB)"]),
    ("leftovers", gpu(used=20 * GB, holders=(Holder(9, 20 * GB),)), WANTED, ["pid 9 (not of this container"]),
    ("leftovers", gpu(used=20 * GB), WANTED, ["a process that the driver does not name"]),
    ("shm", surveyed(shm_bytes=64 << 20), WANTED, ["0.1 GB", "4 slots", "--shm-size", "emptyDir"]),
    (
        "model",
        surveyed(models={"m": ("a is missing", "b", "c", "d"), "n": None}),
        WANTED,
        ["a is missing", "and 1 more"],
    ),
    ("disk", surveyed(disk=Disk("/models", 10e6)), WANTED, ["1600 s", "slot.start_deadline_s is 900"]),
    ("port", surveyed(http=HttpPort.TAKEN), WANTED, ["port 8000", "http_options.port"]),
    ("port", surveyed(http=HttpPort.PLAIN), WANTED, ["does not run serve_app's middleware"]),
    ("environment", surveyed(http=HttpPort.FREE, rays_environment={}), WANTED, ["RAY_SERVE_HTTP_PROXY_CALLBACK"]),
    ("api_keys", surveyed(unreadable_keys="/keys"), WANTED, ["/keys cannot be read", "let nobody in"]),
]
WARNINGS = [
    # Ray was given seven of eight GPUs: the busy one may be somebody's.
    (
        "leftovers",
        replace(gpu(used=20 * GB, holders=(STRANGER,)), ray=RayNode("10.0.0.7", 7, 400 * GB)),
        WANTED,
        ["pid 4711"],
    ),
    ("pcie", gpu(width=8), WANTED, ["generation 5 x8, possible are 5 x16"]),
    ("pcie", gpu(generation=4), WANTED, ["generation 4 x16"]),
    ("numa", gpu(numa=None), WANTED, ["2 NUMA nodes", "GPU-0"]),
    ("limits", surveyed(open_files=1024), WANTED, ["1024 files", "ulimit -n"]),
    ("limits", surveyed(locked_bytes=8 << 20), slot(nodes=2, gpus=16), ["8 MB", "RDMA", "ulimit -l"]),
    ("shm", replace(surveyed(shm_bytes=10 * GB), ray=replace(FACTS.ray, object_store_bytes=20 * GB)), WANTED, ["20.0"]),
    ("model", surveyed(models={"m": None, "n": ()}), WANTED, ["m is not on this node", "serve-app prepare m"]),
    ("disk", surveyed(disk=Disk("/models", 40e6)), WANTED, ["400 s"]),
    ("disk", surveyed(disk=Disk("/models", trouble="Permission denied")), WANTED, ["Permission denied"]),
    ("caches", surveyed(caches=()), WANTED, ["never filled by vLLM 0.26.0", "prepare --caches"]),
    ("caches", replace(software(vllm="0.27.0"), survey=SURVEY), WANTED, ["vLLM 0.27.0", "only by vLLM 0.26.0"]),
    (
        "environment",
        surveyed(rays_environment={**SERVE_ENVIRONMENT, "RAY_SERVE_PROXY_USE_GRPC": "0"}),
        WANTED,
        ["RAY_SERVE_PROXY_USE_GRPC=1"],
    ),
]


@pytest.mark.parametrize(
    ("name", "facts", "wanted", "words", "level"),
    [(*case, Level.ERROR) for case in ERRORS] + [(*case, Level.WARNING) for case in WARNINGS],
)
def test_what_is_wrong_is_told_with_a_remedy(
    name: str, facts: NodeFacts, wanted: Wanted, words: list[str], level: Level
) -> None:
    """Nothing else is wrong with that node."""
    bad = [finding for finding in check(facts, wanted) if finding.level is not Level.OK]
    assert [(finding.check, finding.level) for finding in bad] == [(name, level)]
    assert bad[0].todo
    for word in words:
        assert word in f"{bad[0].what}: {bad[0].todo}"


def test_every_check_has_a_node_that_fails_it() -> None:
    """So that nobody adds one that cannot fail."""
    names = {found.check for found in check(surveyed(), WANTED)} - {found.check for found in check(FACTS, WANTED)}
    assert names == {name for name, *_ in ERRORS + WARNINGS}


@pytest.mark.parametrize(
    ("name", "facts", "wanted"),
    [
        ("leftovers", gpu(used=100 * GB, holders=(Holder(7, 100 * GB, "VLLM::EngineCore", ours=True),)), WANTED),
        ("leftovers", gpu(used=GB // 2), WANTED),  # the driver's own
        ("numa", surveyed(gpus=(replace(GPU, numa=None),), numa_nodes=1), WANTED),
        ("limits", surveyed(locked_bytes=8 << 20), WANTED),  # on one node no RDMA
        ("shm", surveyed(shm_bytes=64 << 20), slot(gpus=1)),  # one rank talks to nobody
        ("model", surveyed(models={}), SIMULATED),
        ("caches", surveyed(caches=()), slot(nodes=2, gpus=16)),
        ("environment", surveyed(rays_environment=None), WANTED),
        ("environment", surveyed(rays_environment={}), replace(WANTED, serve_environment=SERVE_ENVIRONMENT)),
        ("port", surveyed(http=HttpPort.FREE), WANTED),
    ],
)
def test_what_is_right_is_not_complained_about(name: str, facts: NodeFacts, wanted: Wanted) -> None:
    """Cases next to those that are."""
    assert found(name, facts, wanted).level is Level.OK


def test_interface_that_leads_to_no_other_node_is_an_error() -> None:
    """Where a slot spans nodes; inside one, loopback will do."""
    inward = replace(FACTS, environment={"NCCL_SOCKET_IFNAME": "lo"})
    assert found("interface", inward, slot(gpus=16, nodes=2)).level is Level.ERROR
    assert found("interface", inward).level is Level.OK


def test_clocks_apart_are_told() -> None:
    """Only beyond what the way of the answer leaves open."""
    clocks = {"a": Clock(0.4, 0.001), "b": Clock(-3.0, 0.01), "c": Clock(0.9, 0.5)}
    told = check_cluster([FACTS], WANTED, clocks)[2]
    assert (told.check, told.level) == ("clocks", Level.WARNING)
    assert "b is -3.0 s" in told.what and "a is" not in told.what and "c is" not in told.what
    assert check_cluster([FACTS], WANTED, {"a": clocks["a"]})[2].level is Level.OK


def test_nodes_that_do_not_reach_each_other_are_told() -> None:
    """With direction: a firewall is often open one way."""
    [*_, told] = check_cluster([FACTS], WANTED, unreachable={"a": ("b", "c")})
    assert (told.check, told.level) == ("ports", Level.ERROR)
    assert "a gets no connection to b, c" in told.what and "security group" in told.todo
    assert check_cluster([FACTS], WANTED)[-1].level is Level.OK


def test_probe_tells_an_open_port_from_a_closed_one() -> None:
    """Without anybody accepting; this machine's own addresses."""
    probe, other = Probe(), Probe()
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, not listening
        targets = {"open": ("127.0.0.1", other.port()), "closed": closed.getsockname()}
        assert probe.cannot_reach(targets) == ("closed",)


def test_nodes_of_different_versions_are_told() -> None:
    """Fatal for a slot that spans them; nodes without GPUs do not count."""
    other = software(vllm="0.27.0")
    levels = [check_cluster([FACTS, other], wanted)[1].level for wanted in (WANTED, slot(gpus=16, nodes=2))]
    assert levels == [Level.WARNING, Level.ERROR]
    assert check_cluster([FACTS, replace(other, ray=RayNode("10.0.0.8"))], WANTED)[1].level is Level.OK


# How the looking works.


def test_incomplete_model_is_found(tmp_path: Path) -> None:
    """A file that the index names and that is not there, one that ends early, one that is something else."""
    model = ModelConfig(id="m", source=str(tmp_path))
    save_file({"a": torch.zeros(100)}, tmp_path / "model-1.safetensors")
    assert problems(model) == ("config.json is missing",)
    (tmp_path / "config.json").write_text("{}")
    assert problems(model) == ()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}')
    whole = (tmp_path / "model-1.safetensors").read_bytes()
    for broken, words in (
        (whole, r"model-2\.safetensors.* missing, though model\.safetensors\.index\.json names it"),
        (whole[:-1], r"model-1\.safetensors.* truncated"),
        (b"version https://git-lfs.github.com/spec/v1", r"model-1\.safetensors.* no\s+safetensors file"),
    ):
        (tmp_path / "model-1.safetensors").write_bytes(broken)
        told = problems(model)
        assert told is not None and len(told) == 1 and re.search(words, told[0]), told
        (tmp_path / "model-2.safetensors").write_bytes(whole)
    index.write_text("[]")
    assert "no index of safetensors files" in str(problems(model))
    assert problems(ModelConfig(id="m", source=str(tmp_path / "nowhere"))) is None


def test_disk_is_read_within_its_bounds(tmp_path: Path) -> None:
    """The model's largest file where there is one; a file of its own, removed again, where there is none."""
    (tmp_path / "model.safetensors").write_bytes(b"0" * (9 << 20))
    there = disk.measure([tmp_path / "model.safetensors"], tmp_path / "scratch")
    assert there.path == str(tmp_path)
    scratch = disk.measure([], tmp_path / "scratch")
    assert scratch.path == str(tmp_path / "scratch") and list((tmp_path / "scratch").iterdir()) == []
    for one in (there, scratch):  # some file systems know no O_DIRECT, and are told so
        assert one.bytes_per_s > 0 or one.trouble
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert disk.measure([], blocked / "below").trouble


@contextmanager
def answering(path: str, text: str) -> Iterator[int]:
    """A server that says `text` at `path`, and nothing elsewhere; yields its port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == path else 404)
            self.end_headers()
            self.wfile.write(text.encode() if self.path == path else b"")

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_who_answers_is_told_apart() -> None:
    """Our middleware, a proxy without it, somebody else, nobody."""
    with answering("/health/live", '{"status": "live"}') as port:
        assert survey.who_answers(port) is HttpPort.OURS
    with answering("/-/healthz", "success") as port:
        assert survey.who_answers(port) is HttpPort.PLAIN
    with answering("/", "hello") as port:
        assert survey.who_answers(port) is HttpPort.TAKEN
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # bound, not listening
        assert survey.who_answers(free.getsockname()[1]) is HttpPort.FREE


def test_holder_is_known_by_those_that_started_it(tmp_path: Path) -> None:
    """A process below the forkserver's keeper is ours, this one is not, and one that is gone is not visible."""
    keeper = tmp_path / "engine" / "keeper.py"
    keeper.parent.mkdir()
    keeper.write_text("import subprocess; subprocess.run(['sleep', '60'])")
    with subprocess.Popen([sys.executable, str(keeper)]) as started:
        try:
            while not (children := psutil.Process(started.pid).children()):
                pass
            assert survey.holder(children[0].pid, 5).ours
        finally:
            children[0].kill()
    here = survey.holder(os.getpid(), 5)
    assert (here.ours, bool(here.command)) == (False, True)
    assert survey.holder(started.pid, 5) == Holder(started.pid, 5)


@pytest.mark.parametrize(("file", "unreadable"), [("keys", ""), ("nowhere", "nowhere"), ("", "")])
def test_file_with_keys_is_tried(tmp_path: Path, file: str, unreadable: str) -> None:
    """A node where it is missing would let nobody in; most nodes need none."""
    (tmp_path / "keys").write_text("sk-1")
    path = str(tmp_path / file) if file else ""
    looked = survey.survey(models={}, files=[], scratch=tmp_path, caches=(), http_port=1, keys_file=path)
    assert looked.unreadable_keys == (path if unreadable else "")
    assert looked.numa_nodes >= 1 and looked.open_files > 0


def test_rays_environment_is_the_one_it_was_started_with(tmp_path: Path) -> None:
    """Not that of the process which asks; None where there is no Ray above it."""
    (tmp_path / "raylet").mkdir()
    raylet = tmp_path / "raylet" / "raylet"
    raylet.symlink_to("/bin/sleep")
    with subprocess.Popen([str(raylet), "60"], env={"RAY_SERVE_PROXY_USE_GRPC": "1"}) as started:
        try:
            process = psutil.Process(started.pid)
            while not process.cmdline() or not process.environ():  # an instant after exec both are still empty
                pass
            assert survey.rays_environment([process]) == {"RAY_SERVE_PROXY_USE_GRPC": "1"}
        finally:
            started.kill()
    assert survey.rays_environment([psutil.Process()]) is None
