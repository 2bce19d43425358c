"""A compromised host: our own program, which lies according to its address."""

import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from rackrun.launcher.remote import program, service

FIRST = "127.1.0."


def main() -> None:
    """Read the program that was sent, and be another one."""
    lies = json.loads(Path(sys.argv[1]).read_text())
    number = os.environ["SSH_CONNECTION"].split()[2].removeprefix(FIRST)
    lie = lies[int(number)]
    if not lie:
        os.execlp("sh", "sh", "-c", os.environ["SSH_ORIGINAL_COMMAND"])
    sys.stdin.buffer.read(int(sys.stdin.buffer.readline().split()[0]))
    for question in lie:
        if question == "raw":
            service.reply = raw(lie["raw"])
        elif question == "agent":
            program.agent.carry_out = instead_of_an_agent(lie["agent"])
        else:
            program.ORDERS[question] = told(program.ORDERS[question], lie[question])
    program.serve()


def told(honest, change):
    """Send the honest answer with a part changed, or another one."""

    def lie(**words):
        return {**honest(**words), **change} if isinstance(change, dict) else change[0]

    return lie


def raw(text):
    """Send other bytes in place of any answer."""

    def tell(reply):
        sys.stdout.buffer.write(text.encode("latin-1"))
        sys.stdout.buffer.flush()

    return tell


def instead_of_an_agent(text):
    """Send bytes in place of what an agent says, and stay until the launcher has closed."""

    def carry_out(order):
        raw(text)(order)
        sys.stdin.buffer.read()

    return carry_out


if __name__ == "__main__":
    main()
