"""`phalanx.fleet` under its old name: the very module, not a copy."""

import sys

import phalanx.fleet

sys.modules[__name__] = phalanx.fleet
