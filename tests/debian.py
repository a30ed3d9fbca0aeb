"""How tests install the Debian packages that they need."""

WAIT_FOR_APT = "DPkg::Lock::Timeout=100"
"""An option of apt-get install: `make test` runs two processes, and the other one may be installing something."""
