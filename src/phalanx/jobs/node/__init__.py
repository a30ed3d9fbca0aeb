"""The agent that runs on every node of an attempt: `python -m phalanx.jobs.node`.

In: the folder of an attempt and a node's number. Out: code and data in place, a launcher that was watched to its end,
an exit record. Start with `agent`.
"""
