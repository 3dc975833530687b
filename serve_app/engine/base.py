"""What a slot asks of an engine, whichever library is behind it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from serve_app.config import ModelConfig, Tier
from serve_app.telemetry.tracing import StageRecord

# An ASGI 3 application: scope, receive, send.
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Message, Receive, Send], Awaitable[None]]


@dataclass(frozen=True)
class EngineLoad:
    """What an engine is busy with now.

    Attributes:
        running: requests in the current batch.
        waiting: requests the engine's own scheduler has not started yet.
        kv_use: share of the KV cache in use, 0 to 1.
        prefill_tokens: prompt tokens of requests that have no first token yet.
    """

    running: int = 0
    waiting: int = 0
    kv_use: float = 0.0
    prefill_tokens: int = 0


@dataclass(frozen=True)
class Siblings:
    """The other engines of the same slot: those that started before this one, and those that will after it."""

    started: int = 0
    to_come: int = 0

    @property
    def count(self) -> int:
        return self.started + self.to_come


ALONE = Siblings()


class Unused(NamedTuple):
    """What PyTorch's allocator has reserved of a GPU and no tensor uses, in bytes.

    Attributes:
        cached: all of it. fragmented: what of it lies between tensors, so that it cannot be given back.
    """

    cached: int
    fragmented: int


@dataclass(frozen=True)
class EngineMemory:
    """What an engine's processes hold now.

    Attributes:
        host_bytes: of all of them on this node, in bytes.
        device_bytes: per rank, of its GPU; empty on CPU. unused: what of that its allocator keeps for nothing.
        pids: the processes on this node.
    """

    host_bytes: int = 0
    device_bytes: tuple[int, ...] = ()
    pids: tuple[int, ...] = ()
    unused: tuple[Unused, ...] = ()


class Fingerprint(NamedTuple):
    """What an engine computes for the golden prompt.

    Attributes:
        kind: log probabilities of a fixed prompt's tokens (generating models), or an embedding (pooling models).
    """

    kind: Literal["logprobs", "embedding"]
    values: tuple[float, ...]


class Engine(Protocol):
    """One model's engine. Every coroutine runs on the slot's event loop and must never block it.

    An engine is awake after `start`. `sleep` may be called only with no request in flight (the slot's gate sees to
    that); `wake` brings it back in full from any tier. Each method records its own stages with `telemetry.stage`.
    """

    async def start(self) -> None:
        """Build the engine until it can serve. Slow: seconds to minutes. Raises EngineError."""
        ...

    @property
    def app(self) -> AsgiApp:
        """The OpenAI-compatible ASGI application of this engine; valid after `start`."""
        ...

    @property
    def lent(self) -> bool:
        """Whether another model, which shares this engine's processes, has its weights loaded there now."""
        ...

    def variant(self, model: ModelConfig) -> Engine:
        """Another model of the same shape on the processes of this engine, which has started before it.

        Whichever of them starts or wakes puts its own weights in place of the other's, from any tier and also from one
        that is awake (with no request in flight). Shutting this one down ends them all.
        """
        ...

    async def warm_up(self) -> None:
        """Serve a few requests of the shapes that users hit first, so that no user pays for lazy work."""
        ...

    async def fingerprint(self) -> Fingerprint:
        """Run the golden prompt on the awake engine: one prefill, past any prefix cache."""
        ...

    async def sleep(self, tier: Tier) -> None:
        """Free what `tier` frees: nothing (`ready`), KV cache and device weights (`host`), weights too (`disk`)."""
        ...

    async def wake(self) -> None:
        """Bring weights and KV cache back, whatever the tier was. Idempotent on an awake engine.

        Raises:
            OutOfMemory: the memory was not there; the engine can only be shut down.
        """
        ...

    async def read_gpus(self) -> None:
        """Ask the ranks what they hold of their GPUs, for `memory`; nothing while asleep, when that does not change."""
        ...

    async def worker_stages(self) -> list[StageRecord]:
        """The stages that ran in the engine's worker processes since the last call, each with its rank.

        Their spans are exported by this call, below those of the driver-side stages in which they ran.
        """
        ...

    async def rank_nodes(self) -> tuple[str, ...]:
        """Id of the Ray node on which each rank's process runs, in rank order; only of a slot that spans nodes."""
        ...

    def load(self) -> EngineLoad:
        """A cheap reading of the current load; safe from any thread."""
        ...

    def memory(self, *, host: bool = True) -> EngineMemory:
        """What the engine's processes hold, read from the operating system; safe from any thread.

        Args:
            host: read host memory too; else it is what was read last. The kernel looks at every page for it: a tenth of
                a second for a gigabyte, during which page faults of the engine wait.
        """
        ...

    async def check_health(self) -> None:
        """Raise EngineError if the engine can never serve again (its process died). Busy is not dead."""
        ...

    async def shutdown(self) -> None:
        """End all of the engine's processes. Idempotent."""
        ...
