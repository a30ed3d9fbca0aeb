"""`DistributedStrategy`: the user's settings, in Fleet's names; `plan/rules/rules` turns them into a Plan.

In: attributes, YAML or TOML. Out: a checked `DistributedStrategy`, or an error that says what to write. Start with
`settings`, then `configs`.
"""

from phalanx.strategy.settings import DistributedStrategy, check_strategy

__all__ = ["DistributedStrategy", "check_strategy"]
