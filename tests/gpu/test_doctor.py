"""What `serve-app doctor` reads of a real GPU."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

from serve_app.gpu import nvml, survey
from serve_app.gpu.checks.hardware import check_leftovers
from serve_app.gpu.facts import Level, RayNode, Survey
from tests.unit.test_requirements import FACTS, WANTED

HOLD = (
    "import torch; held = torch.ones(2 * 10**9, dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"
)


def test_link_of_every_gpu_is_known() -> None:
    """Or zeros, where a virtual machine hides it; never more than the GPU itself can do."""
    found = survey.gpus()
    assert [gpu.uuid for gpu in found] == nvml.all_uuids()
    for gpu in found:
        assert 0 <= gpu.generation <= gpu.full_generation and 0 <= gpu.width <= gpu.full_width


def test_process_that_holds_memory_is_an_error_until_it_ends() -> None:
    """It is named by pid where the driver tells."""

    def leftovers() -> tuple[Level, str]:
        gpus = survey.gpus()
        facts = replace(FACTS, survey=Survey(gpus=gpus), ray=RayNode("10.0.0.7", gpus=len(gpus)))
        finding = check_leftovers(facts, WANTED)
        return finding.level, finding.what

    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        level, what = leftovers()
        assert level is Level.ERROR
        assert f"pid {process.pid}" in what or "not of this container" in what or "does not name" in what
        process.communicate(b"\n")
    nvml.wait_until_free(nvml.all_uuids(), 30)
    assert leftovers()[0] is Level.OK
