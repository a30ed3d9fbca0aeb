"""`python -m phalanx.launch`: an alias of `phalanx run`."""

from phalanx.launch.cli.command import main

if __name__ == "__main__":
    main(name="python -m phalanx.launch")
