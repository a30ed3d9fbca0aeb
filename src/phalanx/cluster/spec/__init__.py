"""Description of a cluster: nodes, devices, links.

Start with `cluster`.
"""
