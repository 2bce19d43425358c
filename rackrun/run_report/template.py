"""Fill in the templates of pages: one file each, which needs no network."""

from __future__ import annotations

import base64
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray
from PIL import Image

TEMPLATES = Path(__file__).parent


def rendered(template: str, **content: Any) -> str:
    """Return a page; whatever comes from files is escaped by the template."""
    style = Markup((TEMPLATES / "style.css").read_text())  # noqa: S704  our own file
    return _engine().get_template(template).render(style=style, **content)


@cache
def _engine() -> jinja2.Environment:
    loader = jinja2.FileSystemLoader(TEMPLATES)
    return jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined)


def data_url(pixels: NDArray[np.uint8], kind: str = "jpeg") -> str:
    """Return an image, uint8 (height, width, channels), as a URL that holds all of it."""
    image = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
    file = BytesIO()
    image.save(file, kind, quality=85)  # a PNG ignores the quality
    return f"data:image/{kind};base64,{base64.b64encode(file.getvalue()).decode()}"
