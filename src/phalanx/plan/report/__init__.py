"""Reports on Plans: tables, pictures, differences.

Start with `explain`.
"""
