"""The agent that runs on every node of an attempt: `python -m phalanx.jobs.node`.

Start with `agent`.
"""
