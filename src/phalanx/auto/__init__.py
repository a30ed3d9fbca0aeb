"""Automatic parallelism: capture, cost model, planner, prediction and simulation (no devices needed)."""
