"""Tensors of a model and its optimizer as chunks of full tensors, and files of them.

Start with `local`.
"""
