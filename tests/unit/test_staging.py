"""How tensors are cut for pinned buffers; that the copies arrive needs a GPU."""

from __future__ import annotations

import pytest
import torch

from serve_app.weights.staging import pieces


@pytest.mark.parametrize("shape", [(), (0, 3), (1,), (100,), (7, 9), (3, 5, 7), (1, 64), (64, 1)])
@pytest.mark.parametrize("most_bytes", [4, 40, 1 << 20])
def test_pieces_are_the_whole_and_none_is_too_large(shape: tuple[int, ...], most_bytes: int) -> None:
    """Copied piece by piece the target is the source, also where that is a rank's column slice of a larger tensor."""
    whole = torch.randn(*shape[:-1], 2 * shape[-1]) if shape else torch.randn(())
    source = whole.narrow(-1, shape[-1], shape[-1]) if shape else whole
    target = torch.full(shape, torch.nan)
    for into, piece in pieces(target, source, most_bytes):
        assert piece.numel() * piece.element_size() <= most_bytes
        into.copy_(piece)
    assert target.equal(source)
