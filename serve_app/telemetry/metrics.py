"""Every metric of serve_app: its name, labels and meaning. `docs/metrics.md` is made from this file.

They go out through Ray: each process hands its values to its node's agent, which serves them to Prometheus. Ray puts
`ray_` before every name, and `WorkerId`, `NodeAddress` and more beside the labels. Setting one costs 2-3 microseconds
(measured on 2 cores, Ray 2.60). A gauge that is not set again is forgotten by the agent after a while, so what is gone
goes from Prometheus too; counters begin again with their process.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cached_property
from typing import Any

PREFIX = "ray_"
# Seconds, from a warm slot's first token to the cold start of a large model.
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class Kind(StrEnum):
    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric:
    """One metric; nothing of Ray is touched before its first value.

    Args:
        labels: beside `application`, which all have, as the first one. All are bounded: by the configuration, by a
            list in this package, or, for `slot` and `node`, by what lives now.
    """

    def __init__(self, kind: Kind, name: str, text: str, *labels: str) -> None:
        self.kind, self.text = kind, text
        self.name = f"serve_app_{name}"
        self.labels = ("application", *labels)
        ALL.append(self)

    @property
    def exported(self) -> str:
        """As Prometheus has it."""
        return PREFIX + self.name

    @cached_property
    def _ray(self) -> Any:
        from ray.util import metrics

        match self.kind:
            case Kind.COUNTER:
                return metrics.Counter(self.name, self.text, tag_keys=self.labels)
            case Kind.GAUGE:
                return metrics.Gauge(self.name, self.text, tag_keys=self.labels)
            case Kind.HISTOGRAM:
                return metrics.Histogram(self.name, self.text, boundaries=list(SECONDS), tag_keys=self.labels)

    def _tags(self, values: tuple[str, ...]) -> dict[str, str]:
        return dict(zip(self.labels, values, strict=True))

    def set(self, value: float, *labels: str) -> None:
        """A gauge's value now; labels in the order of `self.labels`."""
        self._ray.set(value, self._tags(labels))

    def add(self, amount: float, *labels: str) -> None:
        """Count; nothing is done for 0."""
        if amount > 0:
            self._ray.inc(amount, self._tags(labels))

    def observe(self, seconds: float, *labels: str) -> None:
        """One more value of a histogram."""
        self._ray.observe(seconds, self._tags(labels))


ALL: list[Metric] = []
_C, _G, _H = Kind.COUNTER, Kind.GAUGE, Kind.HISTOGRAM

# Of the coordinator.
SLOTS = Metric(
    _G,
    "slots",
    "Slots by role (a state of the lifecycle, or `leaving`) and model (empty for roles that serve none).",
    "role",
    "model",
)
SLOTS_WANTED = Metric(_G, "slots_wanted", "Slots that the pool wants now.")
PROMOTIONS = Metric(
    _C,
    "promotions_total",
    "Finished promotions by outcome (`ok`, `failed`) and what they were for.",
    "outcome",
    "reason",
    "model",
)
PROMOTION_SECONDS = Metric(_H, "promotion_seconds", "From the need to the moment when every router knows.", "model")
COLD_STARTS = Metric(_C, "cold_starts_total", "Finished cold starts of slots by outcome (`ok`, `failed`).", "outcome")
STAGE_SECONDS = Metric(
    _H,
    "stage_seconds",
    "Stages of cold starts, promotions and demotions (`path`); of ranks, the slowest; the whole is a stage too.",
    "stage",
    "path",
)
LAST_STAGE_SECONDS = Metric(
    _G,
    "last_stage_seconds",
    "Each living slot's last cold start and promotion by stage; of ranks, the slowest.",
    "slot",
    "node",
    "stage",
    "path",
)
NODE_CACHE_LOADS = Metric(
    _C,
    "node_cache_loads_total",
    "Times that a starting engine asked its node's weight cache: `hit` (all was there), `miss` (files were read).",
    "result",
)
NODE_CACHE_READ = Metric(_C, "node_cache_read_bytes_total", "Bytes read from files into node weight caches.")
NODE_CACHE_BYTES = Metric(
    _G,
    "node_cache_bytes",
    "Shared memory that the node's weight cache takes; each slot of the node that uses it says the same.",
    "slot",
    "node",
)
SLOT_PENDING_SECONDS = Metric(
    _G,
    "slot_pending_seconds",
    "For how long slots that Serve wants have had no place, by reason (`waiting` for what others hold; `infeasible`: "
    "the nodes could never hold it); 0 if none.",
    "reason",
)
GPUS = Metric(
    _G,
    "gpus",
    "GPUs of slots by state: `active`, `standby`, `lent` (of a standby that serves `service_tier: flex` just now), "
    "`starting`, `fenced` (of a slot that cannot start, since others hold memory of them), `changing` (between those), "
    "`leaving`.",
    "state",
)
SLEEPING_BYTES = Metric(
    _G,
    "sleeping_memory_bytes",
    "Memory that a sleeping engine holds, by kind: `host`, or `gpu` (of the GPU where it holds most).",
    "slot",
    "model",
    "kind",
)
UNUSED_BYTES = Metric(
    _G,
    "allocator_unused_bytes",
    "GPU memory that PyTorch's allocator keeps and no tensor uses, on the GPU where it is most: `cached` (all of it), "
    "`fragmented` (what of it lies between tensors: it cannot be given back). Every minute while an engine is awake.",
    "slot",
    "model",
    "kind",
)
STANDBY_SECONDS = Metric(
    _C, "standby_slot_seconds_total", "Time that slots stood by, split among the models they hold.", "model"
)
STANDBY_GPU_SECONDS = Metric(
    _C, "standby_gpu_seconds_total", "The same times the GPUs of a slot; not there where slots have none.", "model"
)
GOLDEN_FAILED = Metric(
    _G, "golden_failed_slots", "Slots on different GPUs that failed the golden check within an hour."
)
BREAKER_OPEN = Metric(_G, "breaker_open", "1 if so many slots failed it that the check no longer stops slots.")
FROZEN = Metric(_G, "frozen", "1 while an operator has stopped automatic role changes.")
SLOT_DEATHS = Metric(_C, "slot_deaths_total", "Slots whose process died without Serve having removed it.")
COORDINATOR_START = Metric(
    _G, "coordinator_start_time_seconds", "Unix time at which the coordinator started; a change is a restart."
)

# Of the router in every proxy.
TTFT = Metric(
    _H,
    "ttft_seconds",
    "From a request's arrival at the proxy to the first bytes of a good answer's body. Path: `active` (placed at "
    "once), `held` (it waited for room or for a promotion), `cold` (it waited, and there was neither a slot for its "
    "model nor a standby), `flex` (by a standby).",
    "path",
    "model",
)
HELD_REQUESTS = Metric(_G, "held_requests", "Requests that this proxy holds now.", "model")
HELD_OLDEST = Metric(_G, "held_oldest_seconds", "How long the oldest of them has been held; 0 if none.", "model")
SHED = Metric(
    _C,
    "shed_total",
    "Requests refused with 503: `deadline` (no room in time), `queue_full`, `fair_share` (its API key holds more than "
    "others do), `starting` (the proxy did not know its models yet); with 429: `flex` (no awake standby had room).",
    "reason",
    "model",
)
VIEW_AGE = Metric(
    _G,
    "router_view_age_seconds",
    "Since the router last heard from the coordinator; up to 5 s where nothing changes.",
)

# Of each slot's process.
HEADROOM = Metric(
    _G,
    "memory_headroom_bytes",
    "Memory nobody uses: `host` (of the slot's node), `gpu` (the fullest of the slot's GPUs).",
    "slot",
    "node",
    "kind",
)


def table() -> str:
    """What `docs/metrics.md` shows."""
    rows = [
        f"| `{metric.exported}` | {metric.kind} | {', '.join(f'`{name}`' for name in metric.labels[1:]) or '-'} "
        f"| {metric.text} |"
        for metric in ALL
    ]
    return "\n".join(["| name | kind | labels | meaning |", "|---|---|---|---|", *rows])
