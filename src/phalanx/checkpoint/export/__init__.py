"""Models for use elsewhere: weights, programs, ONNX; and weights loaded from anywhere.

Start with `export`.
"""
