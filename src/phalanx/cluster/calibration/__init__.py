"""Measured speed of machines.

In: the file that `phalanx calibrate` wrote. Out: seconds of an operator or collective of any size. Pure. Start with
`figures`.
"""
