"""Draw a picture of docs/images: what a terminal showed last.

    script -qfc './run-ssh hosts.txt catdog --data data/shards' run.tty
    python docs/site/pictures.py run.tty '$ ./run-ssh ...' docs/images/failed-run.svg

report-html.png is what Chromium shows of the report of `./run-local`:
`chromium --headless --screenshot=docs/images/report-html.png --window-size=960,1006 report.html`.
"""

import io
import sys
from itertools import groupby
from pathlib import Path

import pyte
from rich.console import Console
from rich.style import Style
from rich.terminal_theme import SVG_EXPORT_THEME
from rich.text import Text

COLUMNS, LINES = 104, 40
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>
.{unique_id}-matrix {{ font: {char_height}px/{line_height}px "Fira Code", Menlo, monospace; }}
{styles}
</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect width="{terminal_width}" height="{terminal_height}" />
</clipPath>
{lines}
</defs>
<rect width="100%" height="100%" rx="8" fill="#292929" />
<g transform="translate({terminal_x}, 12)">
{backgrounds}
<g class="{unique_id}-matrix">
{matrix}
</g>
</g>
</svg>
"""
"""As rich draws a terminal, without its window and without a font of another server."""


def main(capture: Path, command: str, picture: Path) -> None:
    """Draw the command, and the last lines of what a terminal has captured of it."""
    screen = pyte.Screen(COLUMNS, LINES)
    pyte.ByteStream(screen).feed(
        capture.read_bytes().partition(b"\n")[2]
    )  # below script's own line
    lines = [line_of(screen, number) for number in range(LINES)]
    shown = [line for line in lines if line.plain.strip() and "Script done" not in line.plain]
    console = Console(width=COLUMNS, record=True, file=io.StringIO())
    for line in [Text(command, style="bold"), *shown]:
        console.print(line, no_wrap=True, crop=True)
    console.save_svg(str(picture), title="", theme=SVG_EXPORT_THEME, code_format=SVG)


def line_of(screen: pyte.Screen, number: int) -> Text:
    """Return a line of the screen with its colors."""
    text = Text()
    chars = [screen.buffer[number][column] for column in range(COLUMNS)]
    for (color, bold), same in groupby(chars, key=lambda char: (char.fg, char.bold)):
        style = Style(color=color.replace("bright", "bright_"), bold=bold)
        text.append("".join(char.data for char in same), style)
    text.rstrip()
    return text


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
