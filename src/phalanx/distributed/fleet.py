"""`phalanx.distributed.fleet`: an alias of `phalanx.fleet`."""

import sys

import phalanx.fleet

sys.modules[__name__] = phalanx.fleet
