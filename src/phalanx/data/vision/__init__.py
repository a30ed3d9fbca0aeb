"""Image transforms, vectorised over a batch.

In: uint8 or float images, shape (..., height, width, channels) or channels first. Out: the same batch, resized,
cropped, flipped, normalised, with random numbers of the row. Start with `transform`, then `compose`.
"""

from phalanx.data.vision.compose import Chain
from phalanx.data.vision.crop import CenterCrop, RandomCrop, RandomResizedCrop
from phalanx.data.vision.flip import RandomHorizontalFlip
from phalanx.data.vision.pointwise import HWC2CHW, Normalize, Rescale, ToTensor
from phalanx.data.vision.resize import Resize
from phalanx.data.vision.transform import Transform
from phalanx.data.vision.type_cast import TypeCast

__all__ = [
    "HWC2CHW",
    "CenterCrop",
    "Chain",
    "Normalize",
    "RandomCrop",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "Rescale",
    "Resize",
    "ToTensor",
    "Transform",
    "TypeCast",
]
