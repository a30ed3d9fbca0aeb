"""What a cluster is made of: nodes, devices, links.

Start with `cluster`.
"""
