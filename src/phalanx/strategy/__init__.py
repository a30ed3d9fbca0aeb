"""`DistributedStrategy`: the user's settings, in Fleet's names; `plan/rules/rules` turns them into a Plan."""

from phalanx.strategy.settings import DistributedStrategy, check_strategy

__all__ = ["DistributedStrategy", "check_strategy"]
