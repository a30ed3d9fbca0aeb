"""The nodes of an elastic job: how their launchers connect, agree on the next view, and look at all ranks at once.

In: launchers of other nodes, which come and go. Out: connections to each of them, and views that all nodes agree on.
Start with `node_group`, then `mesh`.
"""
