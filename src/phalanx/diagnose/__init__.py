"""Diagnostics: `phalanx doctor`, `phalanx env`, `phalanx calibrate`."""
