"""A rank as the launcher sees it, without torch: reports, lines, and a given end."""

import json
import os
import random
import socket
import sys
import time

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def report(**fields):
    ear = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    ear.connect(os.environ["RACKRUN_REPORTS"])
    ear.send(json.dumps({"rank": RANK, **fields}).encode())
    ear.close()


def say(text):
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def train(epochs=3, epoch_steps=60, step_seconds=0.05):
    """Report a whole training at the pace of a real one."""
    steps = epochs * epoch_steps
    report(phase="start", epochs=epochs, steps=steps)
    time.sleep(1)
    for step in range(1, steps + 1):
        time.sleep(step_seconds)
        epoch, within = divmod(step - 1, epoch_steps)
        loss = 0.7 * 0.99**step + random.random() * 0.02
        report(
            phase="train",
            epoch=epoch + 1,
            step=step,
            epoch_step=within + 1,
            epoch_steps=epoch_steps,
            loss=loss,
            accuracy=1 - loss / 1.5,
            images_per_second=800 + random.random() * 30,
        )
        if within + 1 == epoch_steps:
            report(phase="evaluate")
            time.sleep(0.5)
            if RANK == 0:
                say(f"epoch {epoch + 1}: validation accuracy {1 - loss / 1.6:.1%}")
    say("all pictures seen")
    report(
        phase="done",
        accuracy=0.9434,
        images_per_second=812.0,
        final="final.pt",
        report="report.html",
    )


if __name__ == "__main__":
    train(*(float(word) if "." in word else int(word) for word in sys.argv[1:]))
