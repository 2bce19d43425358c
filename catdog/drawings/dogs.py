"""A dog's head: ears that fall, round eyes, a long snout with a large nose, often a tongue."""

from catdog.drawings.coats import Area, Coat
from catdog.drawings.colours import INK, PINK, WHITE, contrast, mix, shade, vary
from catdog.drawings.looks import Look, closed_eye
from catdog.drawings.pen import Colour, Pen, both_sides, closed, path

IRISES: tuple[Colour, ...] = ((92, 58, 34), (126, 82, 44), (60, 42, 34), (126, 170, 200))

SKULL = "0,-.85 .42,-.82 .72,-.48 .75,-.02 .64,.36 .48,.72 .28,.94 0,1"
BLAZE = "-.08,-.8 .08,-.8 .12,-.2 .3,.4 -.3,.4 -.12,-.2"
JOWLS = "0,.02 .3,.12 .46,.45 .44,.74 .22,.84 0,.8"
SNOUT = "0,.05 .28,.14 .42,.45 .4,.7 .2,.79 0,.73"
NOSE = "0,.14 .17,.16 .25,.27 .14,.4 0,.44"

# The right ear, from where it grows on the head.
HANGING = "-.16,-.06 .2,-.14 .5,.2 .64,.75 .5,1.12 .22,1.02 .1,.5"  # beagle
LONG = "-.1,0 .22,-.1 .5,.3 .68,1 .62,1.5 .3,1.6 .06,1.3 .12,.6"  # spaniel
FOLDED = "-.14,-.32 .32,-.4 .52,.1 .38,.42 .12,.1"  # terrier: the tip falls forward
FOLD = "-.24,0 -.1,-.34 .3,-.4 .46,0 .3,.2"
PRICKED = "-.36,.1 -.26,-.3 .02,-.74 .1,-.7 .26,-.3 .3,.2 0,.3"  # husky: upright as a cat's
INNER_PRICKED = "-.18,0 -.1,-.26 .03,-.52 .14,-.26 .16,.1"


def front(pen: Pen, coat: Coat, look: Look) -> None:
    """Draw a dog that looks at us."""
    wide = coat.random.uniform(0.95, 1.2)
    ears = coat.random.choice((HANGING, HANGING, LONG, FOLDED, FOLDED, PRICKED))
    if ears == PRICKED:
        _ears(pen, coat, look, ears, wide)
    skull = closed(both_sides(path(SKULL))) * (wide, 1)
    coat.patterned(pen, skull, Area(-0.8 * wide, -0.85, 0.8 * wide, 0.9))
    if coat.random.random() < 0.35:
        pen.shape(path(BLAZE) + (0.2 * look.turn, 0), coat.pale)
    _eyes(pen, coat, look, 0.36 * wide)
    _snout(pen.at(0.32 * look.turn, 0), coat, look)
    if ears != PRICKED:
        _ears(pen, coat, look, ears, wide)


def profile(pen: Pen, coat: Coat, look: Look) -> None:
    """Draw a dog that looks to the right."""
    nose = 0.6 + 0.95 * coat.random.uniform(0.8, 1.15)  # x of the tip
    if look.tongue:
        _tongue(pen.at(nose - 0.3, 0.42, tilt=-10), coat)
    coat.patterned(pen, closed(_profile(nose)), Area(-0.8, -0.85, 0.6, 0.75))
    pen.shape(_profile_snout(nose), coat.pale)
    pen.oval(nose - 0.02, 0, 0.16, 0.13, INK)
    pen.oval(nose - 0.04, -0.05, 0.05, 0.03, mix(INK, WHITE, 0.6))
    pen.stroke([(nose - 0.02, 0.24), (nose - 0.35, 0.3), (0.6, 0.3)], 0.055, contrast(coat.pale))
    if look.asleep:
        closed_eye(pen, 0.32, -0.2, coat)
    else:
        _eye(pen.at(0.32, -0.2), vary(coat.random.choice(IRISES), 10, coat.random))
    held = pen.at(-0.3, -0.6, tilt=8 + 14 * look.ears, mirror=True)
    _ear(held, coat, coat.random.choice((HANGING, LONG, FOLDED)), _ear_colour(coat))


def _profile(nose: float) -> list[tuple[float, float]]:
    """Return the skull and the snout as far as the nose."""
    back = [(-0.6, 0.66), (-0.86, 0.0), (-0.66, -0.58), (-0.1, -0.84), (0.36, -0.66)]
    top = [(0.6, -0.26), (nose - 0.3, -0.14), (nose, 0.0)]
    return [*back, *top, (nose + 0.02, 0.24), (nose - 0.3, 0.42), (0.6, 0.52), (0.2, 0.8)]


def _profile_snout(nose: float) -> list[tuple[float, float]]:
    top = [(0.62, 0.0), (nose - 0.25, -0.08), (nose - 0.04, 0.06)]
    return [*top, (nose - 0.06, 0.28), (nose - 0.4, 0.4), (0.62, 0.44)]


def _ears(pen: Pen, coat: Coat, look: Look, ears: str, wide: float) -> None:
    fur = _ear_colour(coat)
    for side in (-1, 1):
        held = pen.at(side * 0.56 * wide, -0.62, 1, side * 9 * look.ears, side < 0)
        _ear(held, coat, ears, fur)


def _ear(pen: Pen, coat: Coat, ear: str, fur: Colour) -> None:
    if ear == FOLDED:
        coat.part(pen, closed(path(FOLD)), shade(fur, 0.8))
    coat.part(pen, closed(path(ear)), fur)
    if ear == PRICKED:
        pen.shape(path(INNER_PRICKED), mix(PINK, fur, 0.55))


def _ear_colour(coat: Coat) -> Colour:
    return coat.random.choice((coat.second, coat.base, shade(coat.base, 0.75)))


def _eyes(pen: Pen, coat: Coat, look: Look, apart: float) -> None:
    """Draw both eyes, often with a pale spot above each."""
    iris = vary(coat.random.choice(IRISES), 10, coat.random)
    brows = coat.random.random() < 0.6
    for side in (-1, 1):
        x = look.eye(side, apart)
        if look.asleep:
            closed_eye(pen, x, -0.12, coat)
        else:
            _eye(pen.at(x, -0.14), iris)
        if brows:
            pen.oval(x + side * 0.02, -0.4, 0.11, 0.055, coat.pale)


def _eye(pen: Pen, iris: Colour) -> None:
    """Draw a round eye."""
    pen.oval(0, 0, 0.18, 0.17, INK)
    pen.oval(0, 0.01, 0.145, 0.14, iris)
    pen.oval(0, 0.01, 0.085, 0.09, INK)
    pen.oval(0.05, -0.05, 0.05, 0.05, WHITE)


def _snout(pen: Pen, coat: Coat, look: Look) -> None:
    """Draw a long muzzle with jowls and a large nose that shines."""
    if look.tongue:
        _tongue(pen.at(0.06, 0.78), coat)
    pen.shape(both_sides(path(JOWLS)), shade(coat.pale, 0.84))
    pen.shape(both_sides(path(SNOUT)), coat.pale)
    line = contrast(coat.pale)
    pen.stroke(path("0,.4 0,.64"), 0.05, line)
    pen.stroke(path("-.36,.64 -.16,.74 0,.64 .16,.74 .36,.64"), 0.055, line)
    nose = mix(INK, PINK, coat.random.choice((0, 0.05, 0.25)))
    pen.shape(both_sides(path(NOSE)), nose)
    pen.oval(-0.08, 0.22, 0.07, 0.035, mix(nose, WHITE, 0.6))


def _tongue(pen: Pen, coat: Coat) -> None:
    """Draw the tongue out of the mouth, which is at the origin."""
    long = coat.random.uniform(0.3, 0.55)
    pen.shape(path("-.17,-.1 .17,-.1 .18,.3 0,.5 -.16,.3") * (1, 2 * long), PINK)
    pen.stroke([(0, 0), (0, long * 0.7)], 0.04, shade(PINK, 0.8))
