"""Kill servers and start them again while workers train: `kill_while(made, steps, kills, seed, work)`."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

from ps_servers import Server

WORKERS = 2


class Progress:
    """Counts steps of all workers; a test waits for a number of them, however fast the machine is."""

    def __init__(self) -> None:
        self._count, self._changed = 0, threading.Condition()

    def one(self) -> None:
        with self._changed:
            self._count += 1
            self._changed.notify_all()

    def wait(self, count: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._count >= count, 60), f"stuck at {self._count} of {count}"


def kill_while(
    made: Sequence[Server], steps: int, kills: int, seed: int, work: Callable[[int, Progress], None]
) -> None:
    """Run `work` for each worker in a thread; kill and restart each server at random numbers of steps.

    Args:
        made: The servers.
        steps: How many steps each worker makes, at least.
        kills: How often each server is killed.
        seed: Start of the random numbers.
        work: Trains as a worker, and counts each step.
    """
    progress, errors = Progress(), []

    def run(worker: int) -> None:
        try:
            work(worker, progress)
        except BaseException as e:  # shown by the test's own thread
            errors.append(e)
            raise

    threads = [threading.Thread(target=run, args=(worker,)) for worker in range(WORKERS)]
    for thread in threads:
        thread.start()
    victims = list(made) * kills
    moments = random.Random(seed).sample(range(1, steps * WORKERS - 10), len(victims))
    for moment, server in sorted(zip(moments, victims, strict=True), key=lambda pair: pair[0]):
        progress.wait(moment)
        server.kill()
        server.start()
    for thread in threads:
        thread.join(60)
    assert not errors
