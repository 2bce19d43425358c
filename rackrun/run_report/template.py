"""Fill in the templates of pages: one file each, which needs no network."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup, escape
from numpy.typing import NDArray
from PIL import Image

from rackrun.terminal import clean_lines, one_line
from rackrun.units import data_size, duration

TEMPLATES = Path(__file__).parent


def rendered(template: str, content: Mapping[str, Any]) -> str:
    """Return a page; whatever comes from files becomes text of one line, and is escaped."""
    style = Markup((TEMPLATES / "style.css").read_text())  # noqa: S704  our own file
    return engine().get_template(template).render(content, style=style)


@cache
def engine() -> jinja2.Environment:
    """Return what fills in templates; their filters write values as people read them."""
    made = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=shown,
    )
    made.filters.update(
        data_size=data_size,
        data_url=data_url,
        duration=duration,
        lines=lambda text: escape(clean_lines(text)),
        percent=percent,
        short=lambda name: name.split(",")[0],
    )
    return made


def shown(value: object) -> str:
    """Return a value as a page shows it: Markup as it is, a list with commas, None as nothing."""
    if isinstance(value, Markup):
        return value
    if isinstance(value, list):
        return one_line(", ".join(map(str, value)))
    return "" if value is None else one_line(str(value))


def percent(value: Any) -> str:
    """Return a share as a percentage."""
    return f"{round(100 * float(value), 1):g}%"


def data_url(pixels: NDArray[np.uint8], kind: str = "jpeg") -> Markup:
    """Return an image, uint8 (height, width, channels), as a URL that holds all of it."""
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    file = BytesIO()
    image.save(file, kind, quality=85)  # a PNG ignores the quality
    data = base64.b64encode(file.getvalue()).decode()
    return Markup("data:image/{};base64,{}").format(kind, data)
