"""Readers of standard datasets (MNIST, CIFAR-10, Flowers) and file formats.

Start with `image_dataset`.
"""
