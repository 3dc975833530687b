"""Merging under load in vLLM's own OutputProcessor, which needs no engine for it."""

from __future__ import annotations

from typing import Any

import pytest

from serve_app.config import MergeEvents
from serve_app.engine.merging import merge_under_load

TOKENS = 10


def requests(processor: Any, count: int, interval: int | None = None) -> list[tuple[str, Any]]:
    """Add `count` streaming requests, as AsyncLLM does; returns their ids and queues."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestOutputCollector

    added = []
    for index in range(count):
        params = SamplingParams(max_tokens=TOKENS, output_kind=RequestOutputKind.DELTA, detokenize=False)
        name = f"r{index}"
        request = EngineCoreRequest(
            request_id=name,
            external_req_id=name,
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        queue = RequestOutputCollector(params.output_kind, name)
        processor.add_request(request, None, None, 0, queue)
        added.append((name, queue))
    return added


def decode(processor: Any, added: list[tuple[str, Any]]) -> dict[str, list[list[int]]]:
    """Run all to their end, one token a step; returns the tokens of every event, by request."""
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    events: dict[str, list[list[int]]] = {name: [] for name, _ in added}
    for step in range(TOKENS):
        reason = FinishReason.LENGTH if step == TOKENS - 1 else None
        outputs = [EngineCoreOutput(request_id=name, new_token_ids=[step], finish_reason=reason) for name, _ in added]
        processor.process_outputs(outputs)
        for name, queue in added:
            found = queue.get_nowait()
            if found is not None:
                events[name].append(list(found.outputs[0].token_ids))
    return events


@pytest.fixture
def processor() -> Any:
    """vLLM's, without a tokenizer: tokens only."""
    from vllm.v1.engine.output_processor import OutputProcessor

    return OutputProcessor(None, log_stats=False)


def test_merge_under_load_merges_only_streams_that_come_under_load(processor: Any) -> None:
    """The first two of four keep an event a token; no token of the others is lost, doubled or out of order."""
    merge_under_load(processor, MergeEvents(from_streams=3, tokens=4))
    events = decode(processor, requests(processor, 4))
    assert [[len(tokens) for tokens in stream] for stream in events.values()] == [
        *([1] * 10, [1] * 10),
        *([1, 2, 2, 2, 2, 1], [1, 2, 2, 2, 2, 1]),
    ]
    assert all([token for event in stream for token in event] == list(range(TOKENS)) for stream in events.values())
    assert [len(stream) for stream in decode(processor, requests(processor, 1)).values()] == [TOKENS]


def test_merge_under_load_never_undercuts_the_engines_own_interval(processor: Any) -> None:
    """`stream_interval: 5` among the engine's arguments stays in force for everybody."""
    processor.stream_interval = 5
    merge_under_load(processor, MergeEvents(from_streams=2, tokens=4))
    events = decode(processor, requests(processor, 2))
    assert [[len(tokens) for tokens in stream] for stream in events.values()] == [[1, 5, 4]] * 2
