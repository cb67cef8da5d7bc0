"""A real Ray cluster of several nodes on this machine, for the tests of this folder and for nobody else.

Every pytest process that comes here starts its own cluster (so parallel runs never meet) with the first test of
the folder and ends it with the last. All ports are chosen by the kernel and open on the loopback address only; all
files are in a dedicated directory, which is removed. No dashboard, no metrics, no usage reports.
"""

from __future__ import annotations

import importlib
import itertools
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.processes import HANG_S

if TYPE_CHECKING:
    from tests.ray.hosts import Hosts

# Read by Ray when it is imported and by every process of a cluster that we start.
os.environ.update(
    {
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a misleading name: drivers then take a loopback address as it is
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_metrics_collection": "0",
        "RAY_prestart_worker_first_driver": "0",  # else as many idle workers as there are CPUs start with the first job
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a FutureWarning with every actor that takes no GPU
        "RAY_DISABLE_IMPORT_WARNING": "1",
    }
)

NAMESPACE = "forebay-tests"
CPUS = 8  # declared, not owned: actors of tests hardly compute
OBJECT_STORE_BYTES = 150 * 2**20
_LOOPBACK = "127.0.0.1"
_CHECKOUT = Path(__file__).parents[2]


class LocalCluster:
    """The nodes. Tests may add nodes and kill them; the first three are there for everyone, and stay.

    One of these has a resource `scarce`: two actors that need more than half of it do not run at the same time.
    """

    def __init__(self) -> None:
        cluster_utils = importlib.import_module("ray.cluster_utils")  # costs, and only tests that run need it
        self._cluster = cluster_utils.Cluster()
        # Nodes that are killed are missed after two seconds, not fifteen; slow ones still have ten to answer.
        self.add_node(
            wait=False,
            include_dashboard=False,
            no_monitor=True,  # nothing is scaled here
            dashboard_agent_listen_port=0,
            _system_config={"health_check_initial_delay_ms": 0, "health_check_period_ms": 400},
        )
        for resources in ({"scarce": 1}, {}):
            self.add_node(wait=False, resources=resources)
        self._cluster.wait_for_nodes(timeout=HANG_S)

    @property
    def address(self) -> str:
        return str(self._cluster.address)

    def add_node(self, *, wait: bool = True, **options: Any) -> Any:
        """One more node, e.g. with `resources={"doomed": 1}` to place an actor on it. Its id: `node.node_id`."""
        options = {"num_cpus": CPUS, "object_store_memory": OBJECT_STORE_BYTES, **options}
        return self._cluster.add_node(wait=wait, node_ip_address=_LOOPBACK, include_log_monitor=False, **options)

    def kill_node(self, node: Any) -> None:
        """As when its machine is lost: all its processes end at once, and nothing is said to the others."""
        if node in self._cluster.worker_nodes:
            self._cluster.remove_node(node, allow_graceful=False)

    def wait_until_missed(self, node: Any, timeout_s: float = HANG_S) -> None:
        """Until the cluster knows that a killed node is gone, and places nothing on it any more."""
        ray = importlib.import_module("ray")
        deadline = time.monotonic() + timeout_s
        while any(known["Alive"] for known in ray.nodes() if known["NodeID"] == node.node_id):
            if time.monotonic() > deadline:
                raise TimeoutError(f"node {node.node_id} was killed {timeout_s:g} s ago and counts as alive")
            time.sleep(0.05)

    def shutdown(self) -> None:
        self._cluster.shutdown()


@pytest.fixture(scope="package")
def cluster() -> Iterator[LocalCluster]:
    """Head and two nodes, with this process connected to the head. Ends with the last test of the folder."""
    ray = importlib.import_module("ray")
    # Short: paths of sockets are in it, and those have a limit.
    files = Path(tempfile.mkdtemp(prefix="fb-", dir="/tmp" if Path("/tmp").is_dir() else None))
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("RAY_TMPDIR", str(files))  # also where the address of the newest cluster is written down
        environment.delenv("RAY_ADDRESS", raising=False)
        path = [str(_CHECKOUT), str(_CHECKOUT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment.setenv("PYTHONPATH", os.pathsep.join(path))  # workers inherit it, and import `tests` and `forebay`
        started = None
        try:
            started = LocalCluster()
            ray.init(address=started.address, namespace=NAMESPACE, log_to_driver=False, logging_level="warning")
            yield started
        finally:
            ray.shutdown()
            if started is not None:
                started.shutdown()
            shutil.rmtree(files, ignore_errors=True)


@pytest.fixture(scope="package")
def hosts(cluster: LocalCluster) -> Iterator[Callable[[str], Hosts]]:
    """Actors of one kind ("memory" or "sqlite"), for all tests of the folder that need some."""
    made: dict[str, Hosts] = {}

    def of(kind: str) -> Hosts:
        from tests.ray.hosts import Hosts  # imports ray

        return made.setdefault(kind, Hosts(kind))

    yield of
    for one in made.values():
        one.end()


@pytest.fixture
def doomed_node(cluster: LocalCluster) -> Iterator[Any]:
    """A node for `cluster.kill_node`; actors get there with `resources={"doomed": 1}`."""
    node = cluster.add_node(resources={"doomed": 100})
    yield node
    cluster.kill_node(node)
    cluster.wait_until_missed(node)


@pytest.fixture
def new_name(request: pytest.FixtureRequest) -> Callable[[], str]:
    """Names that no other test uses, and the same ones in every run."""
    numbers = itertools.count(1)
    module = request.module.__name__.rpartition(".")[2]
    return lambda: re.sub(r"[^a-z0-9]+", "-", f"{module}-{request.node.name}".lower()).strip("-") + f"-{next(numbers)}"
