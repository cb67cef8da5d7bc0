"""A Ray cluster for the time of a block: the one at an address, or one of our own that leaves nothing behind.

An address comes from the caller or from RAY_ADDRESS (which `ray job submit` sets). Without one, a cluster that happens
to run on this machine is never joined. Import ray after the block is entered: our own cluster is open to this machine
only (on the loopback address), and Ray reads that when it is imported.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["ray_cluster"]

_EXAMPLES = Path(__file__).resolve().parent.parent
_OBJECT_STORE_BYTES = 200 * 2**20
_QUIET = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # else a warning with every actor that takes no GPU
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # no idle workers before there is work
}


@contextmanager
def ray_cluster(address: str | None = None) -> Iterator[None]:
    """Join the cluster, or start one on this machine; the processes of it can import what is beside this package.

    ConnectionError if there is none at the address. Leaving the block leaves the cluster, or ends our own.
    """
    os.environ |= _QUIET | os.environ
    address = address or os.environ.get("RAY_ADDRESS")
    with _joined(address) if address else _started():
        yield


@contextmanager
def _joined(address: str) -> Iterator[None]:
    import ray

    host, _, port = address.rpartition(":")
    if host and port.isdigit() and "/" not in host:  # Ray itself would try for minutes
        try:
            socket.create_connection((host, int(port)), timeout=10).close()
        except OSError as error:
            raise ConnectionError(f"no Ray at {address}: {error}") from error
    # Its other machines get a copy of the examples.
    runtime_env = {"working_dir": str(_EXAMPLES), "excludes": ["runs/", "**/__pycache__/"]}
    try:
        ray.init(address, runtime_env=runtime_env, log_to_driver=False, logging_level=logging.ERROR)
        yield
    finally:
        ray.shutdown()


@contextmanager
def _started() -> Iterator[None]:
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # its name misleads: Ray then takes the loopback address
    import ray

    parent = Path(os.environ.get("RAY_TMPDIR", "/tmp"))  # short: there will be sockets, whose paths have a limit
    files = tempfile.mkdtemp(prefix="forebay-ray-", dir=parent if parent.is_dir() else None)
    path = os.pathsep.join(filter(None, [str(_EXAMPLES), os.environ.get("PYTHONPATH")]))
    os.environ |= {"PYTHONPATH": path, "RAY_TMPDIR": files}  # its processes inherit both
    try:
        ray.init(
            "local",
            include_dashboard=False,
            object_store_memory=_OBJECT_STORE_BYTES,
            log_to_driver=False,
            logging_level=logging.ERROR,
            _node_ip_address="127.0.0.1",
        )
        yield
    finally:
        ray.shutdown()
        shutil.rmtree(files, ignore_errors=True)
