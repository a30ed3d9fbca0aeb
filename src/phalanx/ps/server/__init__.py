"""The parameter server: tables, exactly-once pushes, write-ahead log, snapshots.

Requests enter at `service`. Pulls and pushes go to the native engine (`csrc/server_engine.h`); the others become
entries of the log that `state` checks and applies. Start with `service`, then `state`; `main` is the process around
them.
"""

from phalanx.errors import ConfigError
from phalanx.versions import HAS_NATIVE

if not HAS_NATIVE:
    raise ConfigError(
        "A parameter server needs the native core (phalanx._core), which is not installed here. Install phalanx with a "
        "C++ compiler at hand, or from a wheel; tables in the training process work without it."
    )
