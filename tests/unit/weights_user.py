"""A process that uses the node's weight cache, for a test to kill or to let go: says what it did, then waits.

python -m tests.unit.weights_user MEMORY LOCKS MODEL KEEP_S [slowly]
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from serve_app.weights import cache, checkpoint, reading


def main(memory: Path, locks: Path, model: Path, keep_s: float, slowly: bool) -> None:
    if slowly:
        read = reading.read_piece

        def half(file: int, piece: reading.Piece, into: memoryview, hashed: bool = True) -> str:
            read(file, piece, into, hashed)
            print("reading", flush=True)  # noqa: T201
            time.sleep(600)
            return ""

        cache.read_piece = half
    weights = cache.NodeCache(None, keep_s, memory, locks).acquire(checkpoint.load(checkpoint.find(model)))
    print(json.dumps(weights.attributes), flush=True)  # noqa: T201
    sys.stdin.read()


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:4]), float(sys.argv[4]), sys.argv[5:] == ["slowly"])
