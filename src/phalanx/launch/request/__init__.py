"""Launch configuration: options, machine, nodes, devices, topology.

Start with `request`.
"""
