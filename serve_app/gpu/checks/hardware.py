"""The GPUs and how they hang on the machine, and what the kernel lets a process have."""

from __future__ import annotations

from serve_app.gpu.facts import Finding, Gpu, Level, NodeFacts, Wanted
from serve_app.gpu.nvml import IDLE_BYTES

# What vLLM's own server asks for (vllm/utils/system_utils.py, set_ulimit): a descriptor for each connection.
OPEN_FILES = 65535


def check_leftovers(facts: NodeFacts, wanted: Wanted) -> Finding:
    """A slot does not start on a GPU of which somebody else holds memory."""
    if facts.survey is None:
        return Finding("leftovers", Level.OK, "not looked at")
    held = [said for gpu in facts.survey.gpus if gpu.used > IDLE_BYTES and (said := _strangers(gpu))]
    if not held:
        return Finding("leftovers", Level.OK, f"{len(facts.survey.gpus)} GPUs, nobody else's memory on them")
    todo = "end these processes (`kill PID`), or keep the GPU from Ray (ray start --num-gpus)"
    # Where Ray has been given fewer GPUs than there are, the others may be somebody's.
    all_rays = facts.ray.gpus >= len(facts.survey.gpus)
    return Finding("leftovers", Level.ERROR if all_rays else Level.WARNING, "; ".join(held), todo)


def _strangers(gpu: Gpu) -> str:
    strangers = [holder for holder in gpu.holders if not holder.ours]
    if gpu.holders and not strangers:
        return ""
    named = ", ".join(
        f"pid {holder.pid} ({holder.command or 'not of this container'}, {holder.bytes / 1e9:.1f} GB)"
        for holder in strangers
    )
    return f"{gpu.uuid}: {gpu.used / 1e9:.1f} GB held by {named or 'a process that the driver does not name'}"


def check_pcie(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Waking up copies all weights over PCIe: half the lanes, twice the time.

    The generation that counts is the highest that GPU and machine manage together; an idle GPU runs at a lower one.
    """
    gpus = facts.survey.gpus if facts.survey else ()
    narrow = [
        f"{gpu.uuid}: generation {gpu.generation} x{gpu.width}, possible are {gpu.full_generation} x{gpu.full_width}"
        for gpu in gpus
        if gpu.generation < gpu.full_generation or gpu.width < gpu.full_width
    ]
    if narrow:
        todo = "look at the slot, riser and BIOS of that GPU; engines on it wake up more slowly"
        return Finding("pcie", Level.WARNING, "; ".join(narrow), todo)
    links = sorted({f"generation {gpu.generation} x{gpu.width}" for gpu in gpus})
    return Finding("pcie", Level.OK, ", ".join(links) or "no GPU")


def check_numa(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Ranks run on the processors beside their GPU; that needs the system to say which these are."""
    survey = facts.survey
    if survey is None or survey.numa_nodes < 2 or not survey.gpus:
        return Finding("numa", Level.OK, "one node, or no GPU")
    unknown = [gpu.uuid for gpu in survey.gpus if gpu.numa is None]
    if unknown:
        what = f"{survey.numa_nodes} NUMA nodes, and not known on which {', '.join(unknown)} is"
        todo = (
            "a virtual machine must pass the topology on; without it ranks are not bound, and weights may cross nodes"
        )
        return Finding("numa", Level.WARNING, what, todo)
    return Finding("numa", Level.OK, f"GPUs on nodes {', '.join(str(gpu.numa) for gpu in survey.gpus)}")


def check_limits(facts: NodeFacts, wanted: Wanted) -> Finding:
    """Every connection is a file descriptor; InfiniBand and EFA register memory, which counts as locked."""
    survey = facts.survey
    if survey is None:
        return Finding("limits", Level.OK, "not looked at")
    if survey.open_files < OPEN_FILES:
        what = f"a process may open {survey.open_files} files, streams need one each in proxy and slot"
        return Finding("limits", Level.WARNING, what, f"raise it to {OPEN_FILES} where Ray starts (`ulimit -n`)")
    if wanted.slot.nodes > 1 and wanted.runs_on_gpus_of(facts) and survey.locked_bytes is not None:
        what = f"a process may lock {survey.locked_bytes / 1e6:.0f} MB: RDMA between nodes needs more"
        return Finding("limits", Level.WARNING, what, "set memlock to unlimited where Ray starts (`ulimit -l`)")
    locked = "any memory" if survey.locked_bytes is None else f"{survey.locked_bytes / 1e6:.0f} MB"
    return Finding("limits", Level.OK, f"{survey.open_files} open files, {locked} locked")
