"""NCCL's variables: its own rule for interfaces, what the settings become, and what a node without them answers."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from serve_app.config import NcclConfig, parse_app
from serve_app.errors import ConfigError, InterfaceNotFound
from serve_app.gpu.nccl import Network, environment, matching, of_rank, overridden

INTERFACES = {
    "lo": ("127.0.0.1", "::1"),
    "eth0": ("10.0.0.7", "fe80::1"),
    "eth01": ("10.1.0.7",),
    "ib0": ("10.2.0.7",),
    "docker0": ("172.17.0.1",),
    "bond0": (),
    "lo6": ("::1",),
}
NETWORK = Network("gpu-7", "10.0.0.7", INTERFACES)


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("eth", ["eth0", "eth01"]),
        ("eth0", ["eth0", "eth01"]),  # a plain name is a prefix
        ("=eth0", ["eth0"]),
        ("=eth0,ib0", ["eth0", "ib0"]),  # `=` is said once, for the whole list
        ("ib,eth01", ["eth01", "ib0"]),
        ("^docker", ["lo", "eth0", "eth01", "ib0"]),
        ("^docker,lo", ["eth0", "eth01", "ib0"]),  # `^` too
        ("^=eth0", ["lo", "eth01", "ib0", "docker0"]),
        ("bond", []),  # no address: nothing to connect to
        ("lo6", []),  # NCCL skips IPv6's loopback
        ("eno", []),
    ],
)
def test_matching_is_nccls_own_rule(pattern: str, names: list[str]) -> None:
    """Prefixes, exact names and exclusions, as in NCCL's user guide."""
    assert matching(pattern, INTERFACES) == names


def test_default_is_exactly_the_interface_of_rays_address() -> None:
    """`eth01` begins with `eth0` and is another network; gloo and vLLM get the same one."""
    assert environment(NcclConfig(), NETWORK, {}) == {
        "NCCL_SOCKET_IFNAME": "=eth0",
        "GLOO_SOCKET_IFNAME": "eth0",
        "VLLM_HOST_IP": "10.0.0.7",
    }


def test_every_setting_becomes_its_variable() -> None:
    """All of the block, by NCCL's and PyTorch's names."""
    settings = NcclConfig(
        interface="ib", gpu_direct_level="PHB", nvls=False, topo_file="/topo.xml", timeout_s=120, debug="WARN"
    )
    assert environment(settings, NETWORK, {}) == {
        "NCCL_SOCKET_IFNAME": "ib",
        "GLOO_SOCKET_IFNAME": "ib0",
        "NCCL_NET_GDR_LEVEL": "PHB",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_TOPO_FILE": "/topo.xml",
        "NCCL_DEBUG": "WARN",
        "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC": "120",
        "VLLM_HOST_IP": "10.0.0.7",
    }


def test_a_short_timeout_leaves_the_watchdog_its_time() -> None:
    """Pinning host memory blocks PyTorch's watchdog for seconds: its own heartbeat is never below a minute."""
    assert environment(NcclConfig(timeout_s=5), NETWORK, {})["TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"] == "60"


def test_what_the_environment_says_stays() -> None:
    """A node's own variables are not touched, and `overridden` says which settings do nothing because of them."""
    present = {"NCCL_SOCKET_IFNAME": "ib0", "NCCL_NVLS_ENABLE": "0", "VLLM_HOST_IP": "1.2.3.4"}
    settings = NcclConfig(interface="eth", nvls=True)
    assert environment(settings, NETWORK, present) == {"GLOO_SOCKET_IFNAME": "ib0"}
    assert overridden(settings, present) == ["NCCL_NVLS_ENABLE=0", "NCCL_SOCKET_IFNAME=ib0"]
    assert overridden(NcclConfig(nvls=False), present) == []


@pytest.mark.parametrize(
    ("settings", "network", "present", "words"),
    [
        (NcclConfig(interface="eno"), NETWORK, {}, ["'eno'", "slot.nccl.interface"]),
        (NcclConfig(), NETWORK, {"NCCL_SOCKET_IFNAME": "eno"}, ["'eno'", "NCCL_SOCKET_IFNAME in its environment"]),
        (NcclConfig(), NETWORK, {"GLOO_SOCKET_IFNAME": "eth"}, ["'eth'", "GLOO_SOCKET_IFNAME in its environment"]),
        (NcclConfig(), Network("gpu-7", "10.9.9.9", INTERFACES), {}, ["'10.9.9.9'", "Ray's node address"]),
        (NcclConfig(interface="eth"), Network("gpu-7", "", {}), {}, ["none that is up"]),
    ],
)
def test_missing_interface_names_interface_and_node(
    settings: NcclConfig, network: Network, present: dict[str, str], words: list[str]
) -> None:
    """Who asked for it, what the node has instead, and what to do."""
    with pytest.raises(InterfaceNotFound) as raised:
        environment(settings, network, present)
    for word in [*words, "node gpu-7", "set slot.nccl.interface"]:
        assert word in str(raised.value)
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


def test_rank_on_another_node_finds_its_own_gloo_interface() -> None:
    """The driver's node has ib0, this one ib1: the prefix fits both, gloo's exact name does not."""
    network = Network("gpu-8", "", {"lo": ("127.0.0.1",), "ib1": ("10.2.0.8",)})
    driver = environment(NcclConfig(interface="ib"), NETWORK, {})
    assert of_rank(network, driver) == {"GLOO_SOCKET_IFNAME": "ib1"}
    assert of_rank(NETWORK, driver) == {}
    assert of_rank(network, {}) == {}


def test_rank_on_a_node_without_the_interface_is_an_error() -> None:
    """Before a communicator is built, which would only wait."""
    network = Network("gpu-8", "", {"eno1": ("10.0.0.8",)})
    with pytest.raises(InterfaceNotFound, match=r"node gpu-8 .*'=eth0' \(NCCL_SOCKET_IFNAME\), only eno1"):
        of_rank(network, environment(NcclConfig(), NETWORK, {}))


@pytest.mark.parametrize(
    ("nccl", "words"),
    [
        ({"interface": ""}, ["args.slot.nccl.interface"]),
        ({"interface": "eth0, ib0"}, ["args.slot.nccl.interface", "'eth0, ib0'"]),
        ({"interface": "=^eth0"}, ["args.slot.nccl.interface"]),
        ({"gpu_direct_level": "NODE"}, ["args.slot.nccl.gpu_direct_level", "'LOC', 'PIX', 'PXB', 'PHB' or 'SYS'"]),
        ({"timeout_s": 0}, ["args.slot.nccl.timeout_s", "greater than or equal to 1"]),
        ({"iface": "eth0"}, ["args.slot.nccl.iface: unknown key", "allowed: debug, gpu_direct_level, interface"]),
    ],
)
def test_wrong_settings_name_their_key(nccl: dict[str, Any], words: list[str]) -> None:
    """Before anything starts."""
    with pytest.raises(ConfigError) as raised:
        parse_app({"slot": {"nccl": nccl}})
    for word in words:
        assert word in str(raised.value)


def test_timeout_is_set_in_one_place() -> None:
    """vLLM's own argument and ours would contradict each other."""
    models = [{"id": "m", "engine_kwargs": {"distributed_timeout_seconds": 60}}]
    with pytest.raises(
        ConfigError, match=r"slot.nccl.timeout_s and models.m.engine_kwargs.distributed_timeout_seconds"
    ):
        parse_app({"models": models, "slot": {"nccl": {"timeout_s": 60}}})
