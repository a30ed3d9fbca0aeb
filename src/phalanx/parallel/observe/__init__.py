"""What a script trains, observed by hooks that torch offers: losses, samples, gradients, weights.

In: any script that trains with torch. Out: losses, sample ids, sketches of gradients and weights, of each step; nothing
in such a script need be ours. Start with `recorder`.
"""
