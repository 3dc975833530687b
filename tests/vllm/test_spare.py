"""The process that waits with vLLM imported for a node's next slot."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


def test_the_next_process_of_a_node_has_vllm_imported() -> None:
    """One spare however often it is asked for; Ray gives that very process to an actor that starts later."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.vllm.spare"],
        cwd=REPOSITORY,
        env=environment | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert "SPARE 1 False True /chosen" in done.stdout, done.stdout + done.stderr


def test_with_vllm_imported_it_gets_the_same_forkserver_as_without() -> None:
    """vLLM sets variables as it is imported; a second server would have to import everything again, for 20 s."""
    program = (
        "from serve_app.engine import forkserver, imports\n"
        "before = forkserver.address_of_server()\n"
        "imports.import_vllm()\n"
        "assert forkserver.address_of_server() == before"
    )
    subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, check=True)
