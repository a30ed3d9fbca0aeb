"""`phalanx replay`: do a step of a run again from its flight log, and compare."""
