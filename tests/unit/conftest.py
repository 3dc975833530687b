"""Hypothesis profiles: `ci` for every run, `deep` (HYPOTHESIS_PROFILE=deep) for some minutes of searching."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

# Time limits per example would measure this machine's neighbours, not our code.
SLOW_IS_FINE = [HealthCheck.too_slow]
settings.register_profile(
    "ci", max_examples=40, stateful_step_count=50, deadline=None, suppress_health_check=SLOW_IS_FINE
)
settings.register_profile(
    "deep", max_examples=300, stateful_step_count=100, deadline=None, suppress_health_check=SLOW_IS_FINE
)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))
