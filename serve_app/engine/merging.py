"""How many tokens one event of a stream carries: one, unless many streams run; the more they are, the more.

A streamed event costs CPU time all along its way (vLLM's API server, Serve's replica, Serve's one proxy a node), the
same for one token as for four. vLLM merges tokens itself (its argument `stream_interval`) and so saves all of it;
merging finished events behind vLLM would save Serve's share alone. What vLLM lacks is to do so only under load: hence
this. Figures: docs/data_path.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from serve_app.config import MergeEvents


def tokens_per_event(running: int, merge: MergeEvents) -> int:
    """For a request that joins `running` others; it keeps the answer for its whole stream.

    One more for every `from_streams` streams, so that a step of the engine makes about as many events however many run.
    """
    return min(merge.tokens, 1 + (running + 1) // merge.from_streams)


def merge_under_load(processor: Any, merge: MergeEvents) -> None:
    """Have vLLM's OutputProcessor (0.26 and 0.32) decide at each new request; call it once, for a generating model.

    A `stream_interval` among the model's `engine_kwargs`, or in a client's request, is never undercut. Not to be used
    for pooling models: vLLM asserts that whatever has an interval has text.
    """
    always, add = processor.stream_interval, processor.add_request

    def add_request(*args: Any, **kwargs: Any) -> Any:
        # Only here: a stream that changed its interval midway would send its first tokens' ids again.
        processor.stream_interval = max(always, tokens_per_event(processor.get_num_unfinished_requests(), merge))
        return add(*args, **kwargs)

    processor.add_request = add_request
