"""A job whose server and workers are on two hosts, for which network namespaces stand."""

from __future__ import annotations

import select
import socket
import threading

import pytest

from benchmarks.bench_rate_limits import Jobs
from benchmarks.network_spaces import are_possible
from phalanx.ps.wire.frame import MAGIC

pytestmark = [
    pytest.mark.fault,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not are_possible(), reason="network namespaces need root and ip"),
]

EVERY_PROTOCOL = 3
SERVER_PORT = (6170).to_bytes(2, "big")


class Listening:
    """Reads every packet of the network between the hosts, as anybody on it could."""

    def __init__(self) -> None:
        self.packets = self.greetings = 0
        self._done, self._far = socket.socketpair()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Listening:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.close()
        self._thread.join()
        self._far.close()

    def _run(self) -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(EVERY_PROTOCOL)) as wire:
            while self._far not in select.select([wire, self._far], [], [])[0]:
                packet, (device, *_) = wire.recvfrom(1 << 17)
                if device != "lo" and SERVER_PORT in packet[34:38]:
                    self.packets += 1
                    self.greetings += MAGIC in packet


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_job_on_two_hosts_trains_the_weights_of_one_host_and_nobody_between_reads_along(dtype):
    jobs = Jobs(dtype, steps=3)
    with Listening() as listening:
        assert jobs.run_on_two_hosts("1gbit") > 0
    assert listening.packets > 100
    assert listening.greetings == 0
    assert jobs.run_on_one_host() > 0  # raises if it trained other weights
