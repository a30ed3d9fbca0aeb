"""What a search found: the Plan with its figures, as a table and as a picture.

In: candidates of a search. Out: `PlanResult`, and that as text, JSON and SVG. Pure. Start with `result`.
"""
