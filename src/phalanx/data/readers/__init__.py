"""Readers of standard datasets (MNIST, CIFAR-10, Flowers) and file formats.

In: files as they are published, perhaps still to be downloaded. Out: map-style datasets of arrays and images. Start
with `image_dataset`.
"""
