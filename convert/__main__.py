"""python -m rackrun.convert: raw data sets become folders of shards."""

from rackrun.commandline.program import run
from rackrun.convert.commands import read


def main(args: list[str]) -> None:
    """Run the command that the command line names."""
    read(args).run()


if __name__ == "__main__":
    run(main)
