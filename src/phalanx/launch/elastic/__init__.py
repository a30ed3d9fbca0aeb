"""Elastic membership: which ranks belong to a running job, and how they are started, judged and told.

In: processes that end, join or are suspected, and `phalanx scale`. Out: views: which ranks belong to the job from one
epoch on, told to all of them. Start with `agent`, then `membership`, which decides.
"""

from __future__ import annotations
