"""What all tests share: Hypothesis's settings, a Ray cluster, and which tests run in one process.

`make test` spreads the tests over four processes (pytest-xdist). A file's tests run in one of
them, in order, since they share fixtures; so do the files of a group, since they use something of
which the machine has one.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
import itertools
import os
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

import hatch_build
from hermes_rl.sandboxes import zygote
from hermes_rl.testing import Server

# No deadlines, since machines differ; in CI the same examples each time.
settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")

# What is collected lives as long as the process: no garbage collection looks at it.
gc.disable()

# All Rays of the tests share a token. Ray reads the mode once, when it is imported; without a token
# two of them that start at once would each write one to the same file.
os.environ["RAY_AUTH_MODE"] = "token"
os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))

TESTS = Path(__file__).parent.name
ENGINES = "sandboxes/test_containers.py"
"""Its tests with podman and those with docker share nothing: each engine is a group."""
GROUPS: dict[str, tuple[str, ...]] = {
    "podman": (),
    "docker": (ENGINES,),
    # Two Rays that start at once are too slow for Ray's own limits, and one serves many tests.
    "ray": (
        "batch/test_usage.py",
        "batch/test_interrupt.py",
        "batch/test_kills.py",
        "batch/test_mcp.py",
        "batch/test_pool.py",
        "batch/test_relay.py",
        "batch/test_renewed_keys.py",
        "batch/test_budgets.py",
        "batch/test_workers.py",
        "bench/test_bench.py",
        "cli/test_notebook_kernel.py",
        "rl/test_streams.py",
        "rl/test_live.py",
        "rl/test_weight_updates.py",
        "rollout/test_secrets.py",
    ),
    # Sandboxes of one ordinary user share the limits of that user.
    "ordinary user": (
        "sandboxes/test_conformance.py",
        "sandboxes/test_egress.py",
        "sandboxes/test_escapes.py",
        "sandboxes/test_privilege.py",
    ),
    # They share runs, which take ten seconds.
    "viewer": tuple(
        f"viewer/test_{name}.py" for name in ("access", "commands", "data", "frames", "page")
    ),
    # They parse all files of the project, once.
    "sources": (
        "house/test_cycles.py",
        "house/test_imports.py",
        "house/test_sizes.py",
        "house/test_typed.py",
    ),
}
"""Group -> its files."""
LONG = (
    *("ray", "podman", "docker", "ordinary user", "batch/test_cluster.py", "viewer"),
    *("batch/test_object_store.py", "batch/test_joint.py", "rl/test_api.py", "rl/test_serve.py"),
    *("rl/test_regrade.py", "rl/test_teardown.py", "tools/test_mcp.py"),
    *("sandboxes/test_modal.py", "environments/test_terminal_tasks.py", "sandboxes/test_ssh.py"),
    *("store/test_crash_points.py", "sandboxes/test_apptainer.py", "agent/test_finalisation.py"),
    *("local_model/test_server.py", "images/test_run_builds.py", "images/test_published_forms.py"),
)
"""Groups and files of more than 20 seconds, the longest first. They start first, so that no process
has a long one left when the others have finished."""
GROUP_OF = {f"{TESTS}/{file}": group for group, files in GROUPS.items() for file in files}


CLUSTER = """
import sys, ray
from batch_runner.pool import connect_ray
with connect_ray(2):
    print(ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@contextmanager
def ray_cluster() -> Iterator[dict[str, str]]:
    """Start a Ray cluster; the environment that leads drivers to it. On a very busy machine Ray
    exceeds its own limits, so it has several attempts."""
    command, pipe = [sys.executable, "-c", CLUSTER], subprocess.PIPE
    for _ in range(4):
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
            assert process.stdout
            if address := process.stdout.readline().strip():
                yield {"RAY_ADDRESS": address}
                return
    raise AssertionError("the cluster did not start")


def unused_ports() -> Iterator[int]:
    """Ports for the servers of this process, none of them twice in its time.

    The kernel gives a free port again after a few hundred others. The client of another test that
    still calls a server that has ended would reach the new one, which counts its requests. These
    ports lie below those that the kernel gives (ip_local_port_range) and above Ray's.
    """
    number, size = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")), 3_000
    for n in itertools.count(os.getpid()):
        port = 20_000 + number % 4 * size + n % size
        with socket.socket() as probe:
            taken = probe.connect_ex(("127.0.0.1", port)) == 0
        if not taken:
            yield port


@pytest.fixture(scope="session", autouse=True)
def _servers_have_their_ports_alone() -> Iterator[None]:
    ports, start = unused_ports(), Server.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Server, "__init__", lambda self, port: start(self, port or next(ports)))
        yield


@pytest.fixture(scope="session", autouse=True)
def _zygote_is_built() -> None:
    """A checkout that was updated since it was installed has an older one, or none."""
    digest = hashlib.sha256(hatch_build.SOURCE.read_bytes()).hexdigest()[:16].encode()
    if not (zygote.BINARY.exists() and digest in zygote.BINARY.read_bytes()):
        assert hatch_build.compile_zygote() == "", "install a C compiler"


@pytest.fixture(scope="session")
def cluster() -> Iterator[dict[str, str]]:
    """One Ray for all tests that do not test its start, which costs ten seconds."""
    with ray_cluster() as environment:
        yield environment


@pytest.fixture
async def loop_reports() -> list[dict[str, Any]]:
    """What the event loop of the test reports, such as errors that were never retrieved. What
    earlier tests left to the garbage collector is gone before."""
    reported: list[dict[str, Any]] = []
    for _ in range(3):  # finalizers may start tasks
        gc.collect()
        await asyncio.sleep(0)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    return reported


def group_of(nodeid: str) -> str:
    """What a test runs together with: the group of its file, or the file."""
    file, _, test = nodeid.partition("::")
    if file == f"{TESTS}/{ENGINES}" and "podman" in test:
        return "podman"
    return GROUP_OF.get(file, file)


class Turned(pytest.Dir):
    """The folder of the tests, each process of which begins with another subfolder: pytest compiles
    a file that has changed, and in a fresh clone four processes would each compile all of them."""

    def collect(self) -> list[pytest.Item | pytest.Collector]:
        found = [*super().collect()]
        number, processes = (os.environ[f"PYTEST_XDIST_WORKER{end}"] for end in ("", "_COUNT"))
        first = len(found) * int(number.removeprefix("gw")) // int(processes)
        return found[first:] + found[:first]


def pytest_collect_directory(path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if path == Path(__file__).parent and "PYTEST_XDIST_WORKER" in os.environ:
        return Turned.from_parent(parent, path=path)
    return None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {name: n for n, long in enumerate(LONG) for name in (long, f"{TESTS}/{long}")}
    items.sort(key=lambda item: (places.get(group_of(item.nodeid), len(LONG)), item.path.parts))


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Whole groups, in the order of the collection."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    config.option.loadscopereorder = False
    return Groups(config, log)
