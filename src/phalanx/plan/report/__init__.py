"""Reports on Plans: tables, pictures, differences.

In: one Plan, or two. Out: tables, SVG, and the rules that differ. Start with `explain`.
"""
