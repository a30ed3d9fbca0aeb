"""Image transforms, vectorised over a batch."""

from phalanx.data.vision.base import Transform
from phalanx.data.vision.cast import TypeCast
from phalanx.data.vision.chain import Chain
from phalanx.data.vision.crop import CenterCrop, RandomCrop, RandomResizedCrop
from phalanx.data.vision.flip import RandomHorizontalFlip
from phalanx.data.vision.pointwise import HWC2CHW, Normalize, Rescale, ToTensor
from phalanx.data.vision.resize import Resize

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
