"""The names of all stages and spans: nothing else may invent one.

A stage is one named step of a cold start, a promotion or a demotion. Each is an OpenTelemetry span and a row of the
ledger.
"""

from __future__ import annotations

from enum import StrEnum

# Of a request, not of a slot: the time for which no active slot could take it.
REQUEST_HOLD = "request.hold"


class Stage(StrEnum):
    """Stage names, in the order in which they usually happen."""

    # A cold start: from "Serve wants one more slot" to "it is standby".
    COLD_START = "cold_start"
    SCHEDULE = "slot.schedule"
    SPAWN = "process.spawn"
    PREFLIGHT = "slot.preflight"
    FENCE = "gpu.fence"
    IMPORT = "runtime.import"
    MODEL_FILES = "model.files"
    WEIGHTS_CACHE = "weights.cache"
    ENGINE_CORE = "engine.core"
    DEVICE_CONTEXT = "device.context"
    COMM_INIT = "comm.init"
    WEIGHTS_LOAD = "weights.load"
    WEIGHTS_COPY = "weights.copy"
    MEMORY_PROFILE = "memory.profile"
    KV_ALLOCATE = "kv_cache.allocate"
    GRAPH_CAPTURE = "graph.capture"
    COMM_CHECK = "comm.check"
    API_SERVER = "engine.api_server"
    WARM_UP = "engine.warmup"
    VERIFY = "engine.verify"
    FIRST_SLEEP = "engine.first_sleep"

    # A promotion: from need to a routable slot.
    PROMOTION = "promotion"
    DECIDE = "promotion.decide"
    WAKE_WEIGHTS = "engine.wake.weights"
    WAKE_KV = "engine.wake.kv_cache"
    PUBLISH = "promotion.publish"

    # A demotion: from quiet to standby.
    DEMOTION = "demotion"
    DRAIN = "demotion.drain"
    SLEEP = "engine.sleep"
