"""What a Plan and a strategy add to optimizer steps: LocalSGD, top-k compression, clipping, scaling.

Start with `optimizer_setup`.
"""
