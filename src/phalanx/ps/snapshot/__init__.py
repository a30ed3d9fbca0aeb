"""Tables and dense state as files: written at one moment, read by any number of servers or by none."""
