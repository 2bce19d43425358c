"""Expressions of a face, of either animal. A head has radius 1 around the origin."""

from dataclasses import dataclass
from random import Random

from catdog.drawings.coats import Coat
from catdog.drawings.pen import Pen, path


@dataclass(frozen=True)
class Look:
    """The expression of an animal."""

    turn: float  # -1 left to 1 right
    ears: float  # -1 to 1: how they are held
    asleep: bool
    tongue: bool  # dogs only
    young: float  # 0.95 to 1.2: the size of the head for the body

    @classmethod
    def drawn(cls, random: Random) -> "Look":
        """Return a look by chance."""
        return cls(
            turn=random.uniform(-1, 1),
            ears=random.uniform(-1, 1),
            asleep=random.random() < 0.1,
            tongue=random.random() < 0.5,
            young=random.uniform(0.95, 1.2),
        )

    def eye(self, side: int, apart: float) -> float:
        """Return x of the left (-1) or right (1) eye of a turned head, `apart` from the middle."""
        return side * apart * (1 - 0.12 * side * self.turn) + 0.2 * self.turn


def closed_eye(pen: Pen, x: float, y: float, coat: Coat) -> None:
    """Draw a sleeping eye."""
    pen.stroke(path("-.2,-.03 0,.09 .2,-.03") + (x, y), 0.06, coat.line)
