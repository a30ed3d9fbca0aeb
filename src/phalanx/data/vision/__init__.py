"""Transforms of images, vectorised over a batch."""

from phalanx.data.vision.base import Transform
from phalanx.data.vision.chain import Chain

__all__ = ["Chain", "Transform"]
