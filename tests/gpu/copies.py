"""Copies from a registered weight cache to the GPU, as a program: a process that has used CUDA holds memory.

    python -m tests.gpu.copies

Ends with 0 if all arrive.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from serve_app.weights import checkpoint, views
from serve_app.weights.cache import NodeCache
from serve_app.weights.registered import DirectCopies


def main() -> None:
    device = torch.device("cuda:0")
    whole = {"matrix": torch.randn(3000, 2048), "experts": torch.randn(4, 300, 200).bfloat16(), "one": torch.randn(1)}
    with tempfile.TemporaryDirectory() as folder:
        save_file(whole, Path(folder) / "model.safetensors")
        weights = NodeCache(None, 0).acquire(checkpoint.load(checkpoint.find(Path(folder))))
        copies = DirectCopies(device)
        registered, image = copies.add(weights), weights.mapped()
        registered.hand_out(image)
        found = {name: tensor for _, name, tensor in views.tensors(weights, image)}
        matrix, experts, one = found["matrix"], found["experts"], found["one"]
        parts = [matrix, matrix[100:2100], matrix.narrow(1, 1024, 1024), experts, experts.narrow(2, 100, 100), one]
        assert all(registered.find(part) for part in parts), "not registered"
        for part in parts:
            target = torch.zeros(part.shape, dtype=part.dtype, device=device)
            with copies:
                target.copy_(part)
                doubled = target * 2  # what is launched next sees what was copied
            assert target.cpu().equal(part) and doubled.cpu().equal(part * 2), part.shape
        matrix[0, 0] = 7  # now the view is no longer what lies in the cache
        assert not registered.find(matrix)
        with copies:
            target = torch.zeros(matrix.shape, device=device)
            target.copy_(matrix)
        assert target[0, 0].item() == 7
        copies.remove(registered)
        weights.close()


if __name__ == "__main__":
    main()
