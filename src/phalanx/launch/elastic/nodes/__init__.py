"""The nodes of an elastic job: how their launchers connect, agree on the next view, and look at all ranks at once.

Start with `node_group`, then `mesh`.
"""
