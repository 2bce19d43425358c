"""python -m rackrun.convert: raw data sets become folders of shards."""

from typing import NoReturn

from rackrun.convert.signals import while_importing


def main(args: list[str]) -> None:
    """Run the command that the command line names."""
    from rackrun.convert.commands import read

    read(args).run()


def run_script(command: str) -> NoReturn:
    """Run one command with the given arguments: `python convert/imagenet.py SRC OUT`."""
    from rackrun.commandline.program import run

    run(lambda args: main([command, *args]))


if __name__ == "__main__":
    with while_importing():
        import rackrun.convert.commands  # noqa: F401
        from rackrun.commandline.program import run
    run(main)
