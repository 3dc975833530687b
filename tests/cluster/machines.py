"""Machines of our own on this one: each with a network, processes, /tmp, home and ssh server that nobody else has.

Made with namespaces, so they need root and what a container may lack; `why_not` says what. `ray stop` in one of them
ends that one's Ray only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Debian: openssh-server, openssh-client, rsync, iproute2, util-linux.
PROGRAMS = ("sshd", "ssh", "ssh-keygen", "rsync", "ip", "unshare", "nsenter")
# As a machine's first process: what is below /tmp, /home and /run elsewhere is hidden, so copy it first.
BOOT = """
set -e
mount -t tmpfs tmpfs /home && mkdir -p /home/root/serve-app && cp -r {files} /home/files
ln -s {prefix} /home/root/serve-app/.venv && touch /home/root/.bashrc
mount -t tmpfs tmpfs /tmp && mount -t tmpfs tmpfs /run && mount -t tmpfs tmpfs /dev/shm && mkdir /run/sshd
mount --bind /home/files/passwd /etc/passwd && mount --bind /home/files/profile /etc/profile
exec {sshd} -D -f /home/files/sshd_config -o ListenAddress={address}
"""
SSHD = """
HostKey /home/files/host
AuthorizedKeysFile /home/files/key.pub
PermitRootLogin prohibit-password
StrictModes no
UsePAM no
PidFile none
MaxStartups 100
"""


def why_not() -> str:
    """Why there can be no machines here; empty if there can."""
    missing = [name for name in PROGRAMS if shutil.which(name, path=PATH) is None]
    if missing:
        return f"not installed: {', '.join(missing)} (apt: openssh-server rsync iproute2)"
    tried = subprocess.run(
        ["unshare", "--net", "--mount", "--pid", "--fork", "--mount-proc", "mount", "-t", "tmpfs", "tmpfs", "/home"],
        capture_output=True,
        text=True,
    )
    return f"no namespaces here (root with CAP_SYS_ADMIN is needed): {tried.stderr.strip()}" if tried.returncode else ""


PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass
class Machine:
    """One of them.

    Attributes:
        network: name of its network namespace, and of its end of the wire in ours.
    """

    network: str
    address: str
    process: subprocess.Popen[bytes]

    def run(self, command: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """A command in it, as its root user's login shell would run it."""
        first = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()[0]
        enter = ["nsenter", "--target", first, "--net", "--mount", "--pid", "--root"]
        shell = ["bash", "--login", "-c", f". /home/root/serve-app/.venv/bin/activate && {command}"]
        env = {"HOME": "/home/root", "USER": "root"}
        return subprocess.run([*enter, *shell], capture_output=True, text=True, timeout=timeout_s, env=env)

    def plugged(self, on: bool) -> None:
        """Pull its network cable, or put it back."""
        call("ip", "link", "set", self.network, "up" if on else "down")


class Machines:
    """Some machines on one network, which this process is on too; `boot` starts them.

    Attributes:
        key: private key that lets root into each of them.
        address: ours.
    """

    def __init__(self, count: int) -> None:
        self._files = Path(tempfile.mkdtemp(prefix="machines-"))
        self.key = self._files / "key"
        self._write_files()
        number = os.getpid() % 250
        self._bridge = f"sa{os.getpid()}"
        self._subnet = f"10.77.{number}"
        self.address = f"{self._subnet}.254"
        self.machines: list[Machine] = []
        call("ip", "link", "add", self._bridge, "type", "bridge")
        call("ip", "address", "add", f"{self.address}/24", "dev", self._bridge)
        call("ip", "link", "set", self._bridge, "up")
        self._count = count

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def environment(self, **variables: str) -> None:
        """What a login on any of them has in its environment."""
        with (self._files / "profile").open("a") as profile:
            profile.writelines(f"export {key}={value}\n" for key, value in variables.items())

    def boot(self) -> None:
        """Start them, and wait until each lets us in."""
        for index in range(self._count):
            self.machines.append(self._boot(index))
        self._wait_for_ssh()

    def _write_files(self) -> None:
        for name in ("key", "host"):
            call("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(self._files / name))
        (self._files / "sshd_config").write_text(SSHD)
        passwd = Path("/etc/passwd").read_text().replace(":/root:", ":/home/root:")
        (self._files / "passwd").write_text(passwd)
        self.environment(PATH=PATH, PYTHONPATH=str(ROOT), RAY_USAGE_STATS_ENABLED="0")

    def _boot(self, index: int) -> Machine:
        network, address = f"{self._bridge}n{index}", f"{self._subnet}.{index + 1}"
        call("ip", "netns", "add", network)
        call("ip", "link", "add", network, "type", "veth", "peer", "name", "eth0", "netns", network)
        call("ip", "link", "set", network, "master", self._bridge, "up")
        call("ip", "-n", network, "address", "add", f"{address}/24", "dev", "eth0")
        for link in ("lo", "eth0"):
            call("ip", "-n", network, "link", "set", link, "up")
        boot = BOOT.format(files=self._files, prefix=sys.prefix, sshd=shutil.which("sshd", path=PATH), address=address)
        isolated = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", boot]
        # Not through `ip netns exec`, which would be between us and the process to kill.
        enter = ["nsenter", f"--net=/run/netns/{network}"]
        return Machine(network, address, subprocess.Popen([*enter, *isolated], env={"PATH": PATH}))

    def _wait_for_ssh(self, timeout_s: float = 20) -> None:
        deadline = time.monotonic() + timeout_s
        for machine in self.machines:
            options = ["-i", str(self.key), "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
            while True:
                done = subprocess.run(["ssh", *options, f"root@{machine.address}", "true"], capture_output=True)
                if done.returncode == 0:
                    break
                assert time.monotonic() < deadline, done.stderr.decode()
                time.sleep(0.2)

    def _close(self) -> None:
        """Also when only some of it could be made."""
        for machine in self.machines:
            machine.process.kill()  # and with it, in its process namespace, everything
            machine.process.wait()
        for index in range(self._count):
            network = f"{self._bridge}n{index}"
            for what in ("link", "netns"):
                subprocess.run(["ip", what, "delete", network], capture_output=True)
        call("ip", "link", "delete", self._bridge)
        shutil.rmtree(self._files)


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
