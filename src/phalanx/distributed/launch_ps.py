"""`python -m phalanx.distributed.launch_ps`: `phalanx run` for parameter-server jobs."""

from phalanx.launch.cli.command import main

if __name__ == "__main__":
    main(name="python -m phalanx.distributed.launch_ps", wants_servers=True)
