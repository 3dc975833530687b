"""How close an active slot is to making its next request wait, beyond the number of requests it has. Pure.

Counting requests is too late where prompts are long: ten of 30,000 tokens each keep an 8B engine busy for many seconds
before any of them has a first token.
"""

from __future__ import annotations

from serve_app.live import PromoteWhen
from serve_app.pool.view import SlotView


def crowded(slot: SlotView, when: PromoteWhen, share: float = 1.0) -> str:
    """Why the next request on this slot would be slow, empty if it would not.

    Args:
        share: of the limits; below 1 it says what is not quiet yet.
    """
    predicted_s = predicted_first_token_s(slot, when)
    if when.predicted_ttft_s is not None and predicted_s > share * when.predicted_ttft_s:
        return f"a first token would take {predicted_s:.2f} s"
    if when.engine_waiting is not None and slot.engine_waiting >= max(1, share * when.engine_waiting):
        return f"{slot.engine_waiting} requests wait in the engine"
    if when.kv_use is not None and slot.kv_use >= share * when.kv_use:
        return f"{slot.kv_use:.0%} of the KV cache are in use"
    return ""


def predicted_first_token_s(slot: SlotView, when: PromoteWhen) -> float:
    """When a new request would have its first token: after all prompt tokens before it; 0 if the rate is not known."""
    return slot.prefill_tokens / when.prefill_tokens_per_s if when.prefill_tokens_per_s else 0.0
