"""Elastic training: ranks leave and join while the others continue, with the same result.

In: the launcher's views (`comm.elastic.membership`) and the logical replicas of the job. Out: global batches that are
computed once, by whoever is left, joiners with the state of a peer, and the shards of a lost rank's optimizer state.
Start with `recovery`.
"""
