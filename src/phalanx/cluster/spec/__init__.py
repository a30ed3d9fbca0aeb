"""Description of a cluster: nodes, devices, links.

In: a YAML file, or this machine. Out: a `Cluster`: devices, memory, links, and calibration if there is one. Start with
`cluster`.
"""
