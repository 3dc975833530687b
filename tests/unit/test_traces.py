"""Traces: reading, cutting, scaling; and the sample that is shipped."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app import traces
from serve_app.errors import ConfigError
from serve_app.traces import TEMPLATE_TOKENS, TraceRequest

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "configs" / "sample-trace.csv"
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    return path


def test_azure_trace_is_read_as_it_is(tmp_path: Path) -> None:
    """Seven digits of a second, Windows line ends; times count from the first arrival, whatever the order."""
    rows = "2023-11-16 18:15:50.9951690,396,109\r\n2023-11-16 18:15:46.6805900,374,44\r\n"
    first, second = traces.read(written(tmp_path, HEAD + rows))
    assert first == TraceRequest(0.0, 374, 44)
    assert second == TraceRequest(pytest.approx(4.314579), 396, 109)  # type: ignore[arg-type]


def test_model_column_is_optional(tmp_path: Path) -> None:
    """Where it is, every request says which model it is for."""
    text = "TIMESTAMP,ContextTokens,GeneratedTokens,Model\n2024-01-01 00:00:00,1,2,chat\n2024-01-01 00:00:01,3,4,\n"
    assert [request.model for request in traces.read(written(tmp_path, text))] == ["chat", ""]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a,b\n1,2\n", "no column TIMESTAMP, ContextTokens, GeneratedTokens"),
        ("TIMESTAMP,ContextTokens\n", "no column GeneratedTokens"),
        (HEAD, "no requests in it"),
        ("", "no column"),
        (HEAD + "yesterday,1,2\n", "line 2: TIMESTAMP is 'yesterday', no date and time"),
        (HEAD + "2024-01-01,1,2\n2024-01-01,-1,2\n", "line 3: ContextTokens is '-1', no number of tokens"),
        (HEAD + "2024-01-01,1\n", "line 2: GeneratedTokens is '', no number of tokens"),
    ],
)
def test_bad_trace_is_refused_with_the_place(tmp_path: Path, text: str, told: str) -> None:
    with pytest.raises(ConfigError) as refused:
        traces.read(written(tmp_path, text))
    assert told in str(refused.value) and "trace.csv" in str(refused.value)


def test_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere.csv: cannot be read: No such file"):
        traces.read(tmp_path / "nowhere.csv")


def test_window_keeps_the_gaps_between_arrivals() -> None:
    """Ten times as fast, from the second second on, for half a second of replay: five seconds of the trace."""
    trace = [TraceRequest(at_s, 1, 1) for at_s in (0.0, 2.0, 3.0, 6.9, 7.0)]
    assert [request.at_s for request in traces.window(trace, 2.0, 0.5, 10.0)] == pytest.approx([0.0, 0.1, 0.49])


requests = st.builds(TraceRequest, st.just(0.0), st.integers(0, 20_000), st.integers(0, 20_000))


@given(st.lists(requests, min_size=1, max_size=20), st.integers(TEMPLATE_TOKENS + 2, 30_000))
def test_scaled_requests_fit_the_context(trace: list[TraceRequest], context: int) -> None:
    """Whatever the trace, each request fits, has something in and out, and none has grown."""
    factor = traces.scale(trace, context)
    for request in trace:
        scaled = traces.scaled(request, factor)
        assert scaled.prompt_tokens >= 1 and scaled.output_tokens >= 1
        assert scaled.prompt_tokens + scaled.output_tokens <= context - TEMPLATE_TOKENS + 1
        assert scaled.prompt_tokens <= max(1, request.prompt_tokens)


def test_scale_keeps_proportions_and_leaves_what_fits() -> None:
    """The longest request just fits; nothing is stretched, and an unknown context scales nothing."""
    trace = [TraceRequest(0.0, 3000, 1000), TraceRequest(0.0, 300, 100)]
    factor = traces.scale(trace, 2000 + TEMPLATE_TOKENS)
    assert [traces.scaled(request, factor) for request in trace] == [
        TraceRequest(0.0, 1500, 500),
        TraceRequest(0.0, 150, 50),
    ]
    assert traces.scale(trace, 8192) == traces.scale(trace, 0) == 1.0
    with pytest.raises(ConfigError, match="no room"):
        traces.scale(trace, TEMPLATE_TOKENS)


def test_sample_trace_is_what_its_script_writes(tmp_path: Path) -> None:
    """The shipped file can be made again, byte for byte, and can be read."""
    spec = importlib.util.spec_from_file_location("sample_trace", ROOT / "tools" / "sample_trace.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    script.write(tmp_path / "made.csv")
    assert (tmp_path / "made.csv").read_bytes() == SAMPLE.read_bytes()
    made = traces.read(SAMPLE)
    assert len(made) > 100 and made[-1].at_s <= script.SECONDS
