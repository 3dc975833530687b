"""The prefill rate from times by prompt length."""

from __future__ import annotations

import pytest

from serve_app.cli.calibrate import prefill_rate
from serve_app.errors import NotRunning


def test_what_every_request_costs_does_not_count() -> None:
    """Only what each further token adds."""
    assert prefill_rate({256: 1.0256, 1024: 1.1024, 4096: 1.4096}) == pytest.approx(10_000)


def test_times_that_do_not_rise_say_nothing() -> None:
    """Rather than a negative or endless rate."""
    with pytest.raises(NotRunning, match="longer prompts did not take longer"):
        prefill_rate({256: 0.1, 1024: 0.1})
