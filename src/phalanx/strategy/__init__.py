"""`DistributedStrategy`: what the user asks for, with Fleet's names; rules turn it into a Plan (`plan/rules/rules`)."""

from phalanx.strategy.settings import DistributedStrategy, check_strategy

__all__ = ["DistributedStrategy", "check_strategy"]
