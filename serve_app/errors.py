"""Every error this package raises, with the HTTP status a client sees and a hint when to come back.

ServeAppError
├── ConfigError            a setting is wrong; nothing was started
├── ModelUnavailable       the model's files cannot be had
├── BadCheckpoint          a weight file is not what its header, index or manifest says; nothing serves it
│   └── ChecksumMismatch   its bytes are not those that `serve-app prepare` saw
├── UnfitNode              a node cannot run the slot as configured; no engine process was started
│   └── InterfaceNotFound  no network interface of the node is the one that NCCL is told to use
├── EngineError            an engine did not do what it was told
│   ├── StageTimeout       a stage went beyond its deadline
│   ├── OutOfMemory        an engine found too little GPU memory to wake up
│   ├── GoldenMismatch     the engine answers, but not what the verified one answers
│   ├── GpuNotFree         somebody else holds memory of a GPU that Ray gave to this slot
│   ├── MemoryNotReturned  a sleeping engine holds more GPU memory than it may
│   └── NodeCacheFull      a model's weights have no place in the node's shared memory
├── PlacementSplit         Ray placed a slot's GPUs so that a tensor parallel group spans nodes; nothing was started
├── IllegalTransition      an event that a slot's state does not allow
├── Refused                an operator's order that the pool cannot carry out now; nothing was changed
├── UnusableFile           a file named on the command line is not what the command reads, or cannot be written
├── NotRunning             no Ray cluster, application or coordinator to talk to (command line only)
├── UnknownModel           a request names a model that the pool does not have
└── Overloaded             no capacity within the bounds for holding requests (503 with Retry-After)
"""

from __future__ import annotations


class ServeAppError(Exception):
    """Base of all errors of this package.

    Attributes:
        http_status: what a client sees when the error ends its request.
    """

    http_status = 500


class ConfigError(ServeAppError):
    """A setting is wrong; the message names the key and the allowed values."""

    http_status = 400


class ModelUnavailable(ServeAppError):
    """The model's files are neither here nor reachable; the message says where it was looked for."""

    http_status = 503


class BadCheckpoint(ServeAppError):
    """A model's weights cannot be trusted; no engine serves them.

    Attributes:
        file: its path. tensor: its name; empty where the file as a whole is meant.
    """

    http_status = 503

    def __init__(self, file: str, problem: str, tensor: str = "") -> None:
        super().__init__(file, problem, tensor)
        self.file, self.problem, self.tensor = file, problem, tensor

    def __str__(self) -> str:
        return f"weights file {self.file}{f', tensor {self.tensor}' if self.tensor else ''}: {self.problem}"


class ChecksumMismatch(BadCheckpoint):
    """Bytes of a weight file differ from those that the manifest's checksum was made of."""


class UnfitNode(ServeAppError):
    """A node, or what is installed there, cannot run the slot as configured; no engine process was started.

    Attributes:
        node: its host name; problems: each says what is wrong and what to do.
    """

    http_status = 503

    def __init__(self, node: str, problems: tuple[str, ...]) -> None:
        super().__init__(node, problems)
        self.node, self.problems = node, problems

    def __str__(self) -> str:
        return f"node {self.node} cannot run this slot: {'; '.join(self.problems)}"


class InterfaceNotFound(UnfitNode):
    """No network interface of the node matches; without this check the ranks would wait for each other for minutes.

    Attributes:
        wanted: the interface, or NCCL's pattern for it; setting: where that was said.
    """

    def __init__(self, node: str, wanted: str, setting: str, present: tuple[str, ...]) -> None:
        problem = (
            f"no network interface '{wanted}' ({setting}), only {', '.join(present) or 'none that is up'}: "
            "set slot.nccl.interface to one that every node has"
        )
        super().__init__(node, (problem,))
        self.args = (node, wanted, setting, present)  # what it is pickled with
        self.wanted, self.setting = wanted, setting


class EngineError(ServeAppError):
    """An engine failed; the message says which slot, in which stage."""

    http_status = 503


class StageTimeout(EngineError):
    """A stage went beyond its deadline."""

    def __init__(self, stage: str, deadline_s: float) -> None:
        super().__init__(stage, deadline_s)
        self.stage = stage
        self.deadline_s = deadline_s

    def __str__(self) -> str:
        return f"stage {self.stage} took longer than its deadline of {self.deadline_s:g} s"


class OutOfMemory(EngineError):
    """An engine found too little memory to wake up; the message says who holds what."""


class GoldenMismatch(EngineError):
    """The golden prompt's log probabilities differ from the verified ones by more than the tolerance."""

    def __init__(self, difference: float, tolerance: float) -> None:
        super().__init__(difference, tolerance)
        self.difference = difference
        self.tolerance = tolerance

    def __str__(self) -> str:
        return (
            f"golden check: differs by {self.difference:.4f} from the first verified slot, allowed {self.tolerance:g}"
        )


class GpuNotFree(EngineError):
    """A GPU that Ray gave to this slot is in use; the slot does not start on it, and keeps it from others meanwhile."""

    def __init__(self, holders: str, waited_s: float) -> None:
        super().__init__(holders, waited_s)
        self.holders = holders
        self.waited_s = waited_s

    def __str__(self) -> str:
        return (
            f"GPU in use by others after {self.waited_s:g} s: {self.holders}; end these processes, "
            "or take the GPU from Ray (ray start --num-gpus); until it is free it is fenced"
        )


class MemoryNotReturned(EngineError):
    """After falling asleep an engine still holds more of a GPU than `slot.asleep_gpu_gb`."""

    def __init__(self, rank: int, held_bytes: int, allowed_bytes: float) -> None:
        super().__init__(rank, held_bytes, allowed_bytes)
        self.rank, self.held_bytes, self.allowed_bytes = rank, held_bytes, allowed_bytes

    def __str__(self) -> str:
        return (
            f"rank {self.rank} holds {self.held_bytes / 1e9:.2f} GB of its GPU asleep, allowed "
            f"{self.allowed_bytes / 1e9:g} GB (slot.asleep_gpu_gb)"
        )


class NodeCacheFull(EngineError):
    """The node's weight cache has no room for a model, also without what no engine uses.

    Attributes:
        needed, used: bytes of the model, and of the other models that have to stay. limit: what forbids it.
    """

    def __init__(self, needed: int, used: int, limit: str) -> None:
        super().__init__(needed, used, limit)
        self.needed, self.used, self.limit = needed, used, limit

    def __str__(self) -> str:
        return (
            f"the node's weight cache has no room for {self.needed / 1e9:.2f} GB: {self.limit}, and "
            f"{self.used / 1e9:.2f} GB of other models are there; raise slot.node_cache.max_bytes, give /dev/shm more "
            "room (docker: --shm-size; Kubernetes: an emptyDir of medium Memory there), or set slot.node_cache.enabled "
            "to false"
        )


class PlacementSplit(ServeAppError):
    """Ray placed a slot's GPUs on other nodes than its shape wants; its engine was not started.

    Attributes:
        found: GPUs of the slot on each node, by node name.
        split: one phrase for each tensor parallel group that spans nodes; empty if only the number of nodes is wrong.
        nodes, gpus_each: what the shape wants.
    """

    http_status = 503

    def __init__(self, found: dict[str, int], split: list[str], nodes: int, gpus_each: int) -> None:
        super().__init__(found, split, nodes, gpus_each)
        self.found, self.split, self.nodes, self.gpus_each = found, split, nodes, gpus_each

    def __str__(self) -> str:
        placed = ", ".join(f"{name} {count}" for name, count in self.found.items())
        advice = (
            "free whole nodes, or keep some for these slots alone, by a label of theirs (slot.labels)"
            if self.split or len(self.found) > self.nodes
            else f"set slot.nodes to {len(self.found)}"
        )
        return "; ".join(
            [
                f"Ray placed the slot's GPUs as {placed}",
                *self.split,
                f"wanted: {self.nodes} nodes with {self.gpus_each} GPUs each",
                advice,
            ]
        )


class IllegalTransition(ServeAppError):
    """An event that the slot's state does not allow; nothing was changed."""

    def __init__(self, slot: str, state: str, event: str, history: str) -> None:
        super().__init__(slot, state, event, history)
        self.slot, self.state, self.event, self.history = slot, state, event, history

    def __str__(self) -> str:
        return f"slot {self.slot} is {self.state}: '{self.event}' is not allowed there; history: {self.history}"


class Refused(ServeAppError):
    """An operator's order that the pool cannot carry out now; nothing was changed. The message says why."""

    http_status = 409


class UnusableFile(ServeAppError):
    """A file named on the command line; the message says which one and what is wrong with it."""


class NotRunning(ServeAppError):
    """There is no Ray cluster, application or coordinator to talk to; the message says what was looked for."""

    http_status = 503


class UnknownModel(ServeAppError):
    """A request names a model that the pool does not have; the message names those that it has."""

    http_status = 404


class Overloaded(ServeAppError):
    """No capacity within `max_held_requests` and `max_hold_s`.

    Attributes:
        retry_after_s: seconds after which a client should try again.
    """

    http_status = 503

    def __init__(self, reason: str, retry_after_s: float) -> None:
        super().__init__(reason, retry_after_s)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.reason}; try again in {self.retry_after_s:g} s"
