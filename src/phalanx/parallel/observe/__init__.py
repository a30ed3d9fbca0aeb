"""What a script trains, observed by hooks that torch offers: losses, samples, gradients, weights.

Nothing in such a script need be ours.
"""
