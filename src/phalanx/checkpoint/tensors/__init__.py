"""Tensors of a model and its optimizer as chunks of whole tensors, and files of them.

Start with `local`.
"""
