"""The console script `megalite`, also `python -m megalite`: the commands are in `megalite.extras.command`."""

from megalite.extras.command import main

if __name__ == "__main__":
    main()
