"""`strategy_of`: the modes that are measured, as a strategy."""

from phalanx import fleet

SETTINGS = {"async": {}, "hybrid": {"dense": "all_reduce"}}


def strategy_of(mode: str) -> fleet.DistributedStrategy:
    """Return the strategy of mode async, hybrid or sync."""
    if mode == "sync":
        return fleet.DistributedStrategy(a_sync=False)
    return fleet.DistributedStrategy(a_sync=True, a_sync_configs=SETTINGS[mode])
