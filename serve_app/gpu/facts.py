"""What is known of a node and of what is to run there, and how a check says what it found. Values only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serve_app.config import ModelConfig, SlotConfig, Tier
from serve_app.gpu.nccl import Network


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    """A slot starts, but look at it."""
    ERROR = "error"
    """A slot on this node would fail, or a tier would."""


@dataclass(frozen=True)
class Finding:
    """What one check found; `todo` says what to do, empty where all is well."""

    check: str
    level: Level
    what: str
    todo: str = ""


@dataclass(frozen=True)
class RayNode:
    """What Ray says of a node.

    Attributes:
        address: its IP address in the cluster; empty where Ray does not run.
        gpus: how many it offers. memory_bytes: what it offers as the resource `memory`; None where Ray does not run.
        object_store_bytes: what its object store may grow to, in /dev/shm.
    """

    address: str = ""
    gpus: float = 0
    memory_bytes: int | None = None
    object_store_bytes: int = 0


@dataclass(frozen=True)
class Software:
    """Versions; empty or None: not there.

    Attributes:
        driver_cuda: newest CUDA that the driver supports, major and minor. gpus: how many the driver shows.
        torch_cuda: CUDA that torch is built for. vllm_wants_torch: vLLM's own pin, as a version specifier.
        bytecode: whether Python keeps what it has made of vLLM's modules (`.pyc` files).
    """

    driver: str = ""
    driver_cuda: tuple[int, int] | None = None
    gpus: int = 0
    torch: str = ""
    torch_cuda: str = ""
    vllm: str = ""
    vllm_wants_torch: str = ""
    bytecode: bool = True

    @property
    def versions(self) -> str:
        """What compiled code depends on, as one word for people and for the caches' record."""
        return f"vLLM {self.vllm}, torch {self.torch}"


@dataclass(frozen=True)
class Holder:
    """A process that holds memory of a GPU; `command`: empty where it is not visible; `ours`: Ray's or an engine's."""

    pid: int
    bytes: int
    command: str = ""
    ours: bool = False


@dataclass(frozen=True)
class Gpu:
    """One GPU, as NVML shows it.

    Attributes:
        used: bytes.
        generation, width: of its PCIe link: the highest generation that GPU and machine manage together, and the lanes
            in use now. full_generation: what the GPU could do; full_width: lanes that GPU and machine have.
        numa: the NUMA node it hangs on; None: the system does not say.
    """

    uuid: str
    used: int = 0
    holders: tuple[Holder, ...] = ()
    generation: int = 0
    width: int = 0
    full_generation: int = 0
    full_width: int = 0
    numa: int | None = None


@dataclass(frozen=True)
class Disk:
    """How fast `path` was read past the page cache; 0 and why where that could not be tried."""

    path: str
    bytes_per_s: float = 0.0
    trouble: str = ""


class HttpPort(StrEnum):
    """Who answers on the port of Serve's proxies."""

    FREE = "free"
    OURS = "ours"
    PLAIN = "plain"
    """A Serve proxy without our middleware."""
    TAKEN = "taken"


@dataclass(frozen=True)
class Clock:
    """How far another machine's clock is ahead of ours, and how exactly that is known; seconds."""

    ahead_s: float
    error_s: float


@dataclass(frozen=True)
class Survey:
    """What takes too long, or does not matter enough, to be looked at before each start of a slot.

    Attributes:
        numa_nodes: of the machine. shm_bytes: size of /dev/shm.
        open_files: most that a process may have. locked_bytes: most that it may lock; None: any.
        models: what is wrong with the files of each model that needs some, by its source; None: they are not here.
        caches: versions by which the caches here were filled.
        rays_environment: of Ray on this node, without what this process has added; None: not known.
        unreadable_keys: the file with API keys that proxies here are told to read, if it cannot be read.
    """

    gpus: tuple[Gpu, ...] = ()
    numa_nodes: int = 1
    shm_bytes: int = 0
    open_files: int = 0
    locked_bytes: int | None = None
    disk: Disk | None = None
    models: Mapping[str, tuple[str, ...] | None] = field(default_factory=dict)
    caches: tuple[str, ...] = ()
    http: HttpPort = HttpPort.FREE
    rays_environment: Mapping[str, str] | None = None
    unreadable_keys: str = ""


@dataclass(frozen=True)
class NodeFacts:
    """One node, as `gpu.node.gather` found it; memory in bytes.

    Attributes:
        environment: the variables of the processes there that matter here.
        container_bytes: memory limit of the container; None: none.
        total_bytes: MemTotal, which on some virtual machines begins low and grows with use.
        threshold: share of the memory from which on Ray's memory monitor kills.
        topo_file_found: None: none is configured.
        weights_bytes: of all models and ranks together; None: not known.
        survey: None: nobody has asked for it.
    """

    ray: RayNode
    network: Network
    environment: Mapping[str, str]
    container_bytes: int | None
    total_bytes: int
    threshold: float
    software: Software
    topo_file_found: bool | None
    weights_bytes: int | None
    survey: Survey | None = None


@dataclass(frozen=True)
class Wanted:
    """What is to run.

    Attributes:
        models: those that a slot may serve, in turns.
        tier: of the standbys; READY also where nothing ever sleeps.
        slots: as many as there may be at once, on all nodes; least_slots: as many as there always are.
        http_port: of Serve's proxies. serve_environment: what the config file gives Serve's processes.
    """

    slot: SlotConfig
    models: tuple[ModelConfig, ...]
    tier: Tier
    slots: int
    least_slots: int = 1
    http_port: int = 8000
    serve_environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def sleeps(self) -> bool:
        """vLLM is told to use its sleep mode, whatever the tier is now: the tier is live."""
        return self.uses_vllm and any(
            model.engine_kwargs.get("enable_sleep_mode", True) is not False for model in self.models
        )

    @property
    def uses_vllm(self) -> bool:
        return any(model.engine == "vllm" for model in self.models)

    def runs_on_gpus_of(self, facts: NodeFacts) -> bool:
        """A node of a GPU cluster may have none; a simulated engine counts GPUs without using them."""
        return facts.ray.gpus > 0 and self.uses_vllm

    def slots_on(self, facts: NodeFacts) -> float:
        """Slots that a node may come to hold: whole ones, or its share of one that spans nodes."""
        fitting = facts.ray.gpus / self.slot.gpus
        return min(float(self.slots), fitting // 1 if fitting >= 1 else fitting)
