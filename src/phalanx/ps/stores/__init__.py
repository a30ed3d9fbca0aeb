"""Pull and push on tables, in this process or on parameter servers, behind one interface.

In: pulls and pushes of any number of tables. Out: the same through one interface: here (`local`) or on servers
(`remote`), where ids are deduplicated and dealt out. Start with `base`.
"""
