"""Eyes of the tests inside the application's cluster: every line of standard input is answered by the pool's status.

Run as `python -m tests.vllm.observer GCS_ADDRESS`: a process of its own, since the tests' may have another Ray.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import ray

from serve_app.pool import naming


def status() -> dict[str, Any]:
    """The newest coordinator's status; {} while there is none."""
    try:
        calls = [naming.coordinator(name).status.remote() for name in naming.coordinator_names("default")]
        return max(ray.get(calls, timeout=10), key=lambda answer: answer["epoch"], default={})
    except (ValueError, ray.exceptions.RayError):
        return {}


def main(address: str) -> None:
    ray.init(address=address, namespace="serve", log_to_driver=False, logging_level="ERROR")
    for _ in sys.stdin:
        print("STATUS", json.dumps(status(), default=str), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
