"""Arrivals from Prometheus: how many requests came in each step, over its HTTP API."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

import httpx

from serve_app.errors import ConfigError

# Serve's own counter of requests at its proxies.
METRIC = "ray_serve_num_http_requests_total"
# Prometheus answers at most 11,000 points of a series.
MOST_POINTS = 10_000
# An increase takes two points of the counter, so a step must be longer than twice the time between scrapes.
LEAST_STEP_S = 60
TIMEOUT_S = 60.0
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


@dataclass(frozen=True)
class Counts:
    """Requests that came in each step of `step_s` seconds, the oldest first."""

    step_s: float
    counts: list[float]


def seconds(since: str) -> float:
    """`90m` or `7d` in seconds. Raises ConfigError."""
    match = re.fullmatch(r"(\d+)([smhdw])", since)
    if match is None or not int(match[1]):
        raise ConfigError(f"--since is {since!r}; a number and one of {', '.join(_UNITS)} is wanted, as in 7d")
    return float(match[1]) * _UNITS[match[2]]


def arrivals(url: str, since: str, metric: str = METRIC) -> Counts:
    """Ask for the increase of a counter over the last while, summed over its series. Raises ConfigError."""
    whole_s = seconds(since)
    step_s = max(LEAST_STEP_S, int(whole_s / MOST_POINTS) + 1)
    end_s = time.time()
    asked = {
        "query": f"sum(increase({metric}[{step_s}s]))",
        "start": f"{end_s - whole_s + step_s:.3f}",
        "end": f"{end_s:.3f}",
        "step": str(step_s),
    }
    try:
        answer = httpx.get(f"{url.rstrip('/')}/api/v1/query_range", params=asked, timeout=TIMEOUT_S)
        content = answer.json()
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ConfigError(f"--prometheus {url}: no answer: {error}") from None
    if answer.status_code != httpx.codes.OK or content.get("status") != "success":
        raise ConfigError(f"--prometheus {url}: status {answer.status_code}: {content.get('error', 'no reason given')}")
    return _counts(content["data"]["result"], float(asked["start"]), step_s, int(whole_s / step_s), url, metric)


def _counts(series: list[dict[str, object]], start_s: float, step_s: int, steps: int, url: str, metric: str) -> Counts:
    """Steps without a point had no requests."""
    counts = [0.0] * max(1, steps)
    for one in series:
        values = one["values"]
        assert isinstance(values, list)
        for at_s, value in values:
            index = round((float(at_s) - start_s) / step_s)
            if 0 <= index < len(counts) and float(value) > 0:
                counts[index] += float(value)
    if not any(counts):
        raise ConfigError(
            f"--prometheus {url}: {metric} has not grown in that time; name another by --metric, or a longer "
            f"--since if it is scraped less often than every {step_s // 2} s"
        )
    return Counts(float(step_s), counts)
