"""What happens around an update because of the Plan, in one order.

Start with `optimizer_setup`.
"""
