"""`python -m phalanx.distributed.launch_ps`: the launcher, for parameter-server jobs only."""

from phalanx.launch.cli.command import main

if __name__ == "__main__":
    main(name="python -m phalanx.distributed.launch_ps", wants_servers=True)
