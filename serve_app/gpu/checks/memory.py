"""Host memory: what sleeping weights take of it, and what processes share."""

from __future__ import annotations

from serve_app.config import SlotConfig, Tier
from serve_app.gpu.facts import Finding, Level, NodeFacts, Wanted

# vLLM's message queues between EngineCore and workers, in shared memory: one for orders, one for the answers of every
# rank, one for the tensor parallel group (MessageQueue in vllm/distributed/device_communicators/shm_broadcast.py and
# its callers, 0.32: chunks of 16, 24 and 4 MiB, ten or six of them). NCCL's own segments come on top.
_ORDERS_BYTES, _ANSWERS_BYTES, _GROUP_BYTES = 10 * (16 << 20), 10 * (24 << 20), 6 * (4 << 20)


def check_host_ram(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Tier `host` pins the weights of every slot on the node; vLLM keeps them pinned for the next sleep.

    Trusted are the container's limit, and Ray's memory where it has been configured: where slots reserve it
    (`slot.host_ram_gb`), or where it is more than MemTotal shows. Ray's own guess is not, nor is MemTotal itself, as
    that grows on some virtual machines (31 GiB shown of 256): what exceeds only these is a warning.
    """
    slot, weights = wanted.slot, facts.weights_bytes
    if not slot.gpus or not facts.ray.gpus or not wanted.sleeps or wanted.tier is not Tier.HOST:
        return Finding("host_ram", Level.OK, "no slot's weights sleep here in host memory")
    if weights is None:
        what = "how much host memory sleeping engines take is not known"
        return Finding("host_ram", Level.WARNING, what, "look again once the model's files are on this node")
    if slot.host_ram_gb is not None and weights > slot.host_ram_gb * 1e9 * max(1.0, slot.gpus / facts.ray.gpus):
        what = f"a slot reserves {slot.host_ram_gb:g} GB, its sleeping weights take {weights / 1e9:.1f} GB"
        return Finding("host_ram", Level.ERROR, what, "raise slot.host_ram_gb, or use tier: disk")
    here = wanted.slots_on(facts)
    needed = here * weights
    what = f"{here:g} slots' sleeping weights take {needed / 1e9:.1f} GB of host memory"
    for limit, whose, trusted in _memory_limits(facts, slot):
        if needed > limit:
            more = "" if trusted else f"; MemTotal shows {facts.total_bytes / 1e9:.1f} GB, which may be too little"
            level = Level.ERROR if trusted else Level.WARNING
            todo = "give more memory, lower slots.max, or use tier: disk"
            return Finding("host_ram", level, f"{what}, {whose} is {limit / 1e9:.1f} GB{more}", todo)
    return Finding("host_ram", Level.OK, what)


def check_shm(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Ranks of one node talk through /dev/shm, of which a container has 64 MB unless told otherwise: what does not fit
    ends a process (SIGBUS). Ray's object store takes its share first.
    """
    if facts.survey is None:
        return Finding("shm", Level.OK, "not looked at")
    ranks = wanted.slot.gpus_on_a_node if wanted.runs_on_gpus_of(facts) else 0
    slots = wanted.slots_on(facts) if ranks else 0
    queues = int(slots * (_ORDERS_BYTES + ranks * _ANSWERS_BYTES + _GROUP_BYTES)) if ranks > 1 else 0
    needed, there = queues + facts.ray.object_store_bytes, facts.survey.shm_bytes
    store = f"Ray's object store {facts.ray.object_store_bytes / 1e9:.1f} GB"
    what = f"/dev/shm has {there / 1e9:.1f} GB; queues of {slots:g} slots take {queues / 1e9:.1f} GB, {store}"
    if needed <= there:
        return Finding("shm", Level.OK, what)
    todo = "give the container more (Docker: --shm-size; Kubernetes: an emptyDir with medium: Memory at /dev/shm)"
    if queues > there:
        return Finding("shm", Level.ERROR, what, todo)
    return Finding("shm", Level.WARNING, what, f"{todo}, or start Ray with a smaller --object-store-memory")


def _memory_limits(facts: NodeFacts, slot: SlotConfig) -> list[tuple[float, str, bool]]:
    """(bytes, whose, trusted): what may be used before Ray's memory monitor or the kernel kills."""
    limits: list[tuple[float, str, bool]] = []
    percent = f"{facts.threshold:.0%}"
    if facts.container_bytes is not None:
        limits.append((facts.container_bytes * facts.threshold, f"{percent} of the container's limit", True))
    if facts.ray.memory_bytes is not None:
        trusted = slot.host_ram_gb is not None or facts.ray.memory_bytes > facts.total_bytes
        limits.append((facts.ray.memory_bytes * facts.threshold, f"{percent} of Ray's memory", trusted))
    return limits
