"""Launch configuration: options, machine, nodes, devices, topology.

In: flags, settings, a scheduler's variables, a rank table, the machine. Out: one checked `LaunchRequest`, and the
`Topology` of its processes. Start with `request`.
"""
