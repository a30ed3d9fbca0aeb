"""`python -m phalanx.launch`."""

from phalanx.launch.command import main

if __name__ == "__main__":
    main(name="python -m phalanx.launch")
