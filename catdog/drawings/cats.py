"""A cat's head: pointed ears, large slanted eyes with slits, a little nose, whiskers."""

from catdog.drawings.coats import Area, Coat
from catdog.drawings.colours import INK, PINK, WHITE, contrast, mix, shade, vary
from catdog.drawings.looks import Look, closed_eye
from catdog.drawings.pen import Colour, Pen, both_sides, closed, path

IRISES: tuple[Colour, ...] = ((156, 186, 84), (222, 176, 62), (110, 170, 200), (190, 140, 60))

SKULL = "0,-.8 .4,-.79 .8,-.5 .98,-.05 .98,.3 .7,.66 .32,.82 0,.86"
PROFILE = (
    "-.86,.05 -.68,-.56 -.12,-.84 .4,-.74 .72,-.36 .92,0 1,.12 .98,.34 .8,.52 .5,.68 0,.8 -.6,.62"
)
EAR = "-.4,.1 -.28,-.42 .06,-1 .12,-.96 .34,-.4 .42,.25 0,.35"
INNER_EAR = "-.22,.02 -.14,-.34 .07,-.76 .2,-.34 .24,.1 0,.2"
PROFILE_EAR = "-.34,.2 -.28,-.35 -.06,-.86 .02,-.84 .26,-.3 .4,.15 0,.35"
PROFILE_INNER_EAR = "-.1,0 -.06,-.34 0,-.62 .16,-.24 .24,.06"
LIDS = "-.27,.06 -.12,-.18 .13,-.22 .29,-.1 .14,.16 -.1,.19"
IRIS = "-.22,.05 -.1,-.14 .12,-.17 .24,-.08 .12,.12 -.09,.15"


def front(pen: Pen, coat: Coat, look: Look) -> None:
    """Draw a cat that looks at us."""
    wide = coat.random.uniform(0.98, 1.14)
    iris = vary(coat.random.choice(IRISES), 16, coat.random)
    for side in (-1, 1):
        _ear(pen.at(side * 0.58 * wide, -0.55, 1, side * (8 + 10 * look.ears), side < 0), coat)
    skull = closed(both_sides(path(SKULL))) * (wide, 1)
    coat.patterned(pen, skull, Area(-wide, -0.85, wide, 0.85))
    _muzzle(pen.at(0.26 * look.turn, 0), coat)
    for side in (-1, 1):
        x = look.eye(side, 0.43 * wide)
        if look.asleep:
            closed_eye(pen, x, -0.06, coat)
        else:
            _eye(pen.at(x, -0.08, mirror=side < 0), iris, look)
    _whiskers(pen.at(0.26 * look.turn, 0), coat)


def profile(pen: Pen, coat: Coat, look: Look) -> None:
    """Draw a cat that looks to the right."""
    coat.part(pen.at(0.42, -0.62), closed(path(PROFILE_EAR)), shade(coat.base, 0.7))
    near = pen.at(-0.12, -0.62, tilt=6 * look.ears)
    coat.part(near, closed(path(PROFILE_EAR)))
    near.shape(path(PROFILE_INNER_EAR), mix(PINK, coat.base, 0.3))
    coat.patterned(pen, closed(path(PROFILE)), Area(-0.8, -0.85, 0.7, 0.75))
    pen.oval(0.78, 0.34, 0.22, 0.18, coat.pale)
    if look.asleep:
        closed_eye(pen, 0.48, -0.1, coat)
    else:
        iris = vary(coat.random.choice(IRISES), 16, coat.random)
        _eye(pen.at(0.48, -0.12, size=0.85), iris, look)
    pen.shape(path(".88,.02 1.02,.06 1.02,.2 .9,.16"), mix(PINK, INK, 0.15))
    pen.stroke(path(".98,.24 .86,.4 .66,.38"), 0.045, coat.line)
    for number in range(3):
        drop = 0.26 * number
        hair = [(0.78, 0.3 + drop / 4), (1.15, 0.22 + drop * 0.7), (1.6, 0.2 + drop)]
        pen.stroke(hair, 0.03, _whisker_colour(coat))


def _ear(pen: Pen, coat: Coat) -> None:
    """Draw a pointed ear, pink inside."""
    height = coat.random.uniform(0.85, 1.05)
    fur = coat.second if coat.pattern == "saddle" else coat.base
    coat.part(pen, closed(path(EAR)) * (1, height), fur)
    pen.shape(path(INNER_EAR) * (1, height), mix(PINK, coat.base, 0.3))


def _eye(pen: Pen, iris: Colour, look: Look) -> None:
    """Draw a large slanted eye with an upright slit."""
    pen.shape(path(LIDS), INK)
    pen.shape(path(IRIS), iris)
    pen.oval(0.01, -0.01, 0.08 + 0.03 * look.ears, 0.15, INK)
    pen.oval(0.06, -0.09, 0.045, 0.045, WHITE)


def _muzzle(pen: Pen, coat: Coat) -> None:
    """Draw two small puffs, a little nose, a mouth like a w."""
    for side in (-1, 1):
        pen.oval(side * 0.19, 0.43, 0.26, 0.21, coat.pale)
    pen.oval(0, 0.6, 0.17, 0.13, coat.pale)
    line = contrast(coat.pale)
    pen.stroke(path("0,.3 0,.43"), 0.04, line)
    pen.stroke(path("-.26,.46 -.12,.52 0,.43 .12,.52 .26,.46"), 0.045, line)
    nose = mix(PINK, INK, coat.random.choice((0, 0.1, 0.75)))
    pen.shape(path("-.13,.21 0,.19 .13,.21 .03,.34 -.03,.34"), nose)


def _whiskers(pen: Pen, coat: Coat) -> None:
    """Draw three long whiskers on each side."""
    for side in (-1, 1):
        for number in range(3):
            start = 0.36 + 0.06 * number
            end = 0.22 + 0.24 * number + coat.random.uniform(-0.08, 0.08)
            hair = [(0.3, start), (0.85, (start + end) / 2 - 0.07), (1.42, end)]
            pen.at(0, 0, mirror=side < 0).stroke(hair, 0.03, _whisker_colour(coat))


def _whisker_colour(coat: Coat) -> Colour:
    return WHITE if sum(coat.base) < 480 else shade(coat.base, 0.5)
