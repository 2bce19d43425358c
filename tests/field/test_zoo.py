"""Images of every kind: stored as they look, or left out by name; none is lost, none crashes."""

import json

import numpy as np
import pytest

from tests.lab.foreign import stored
from tests.lab.needs import UNRUN
from tests.lab.run import write
from tests.lab.zoo import PILLOW_SOURCES, as_pillow_shows, is_alike, pillows, zoo


def converted(files: dict[str, bytes], cli, folder) -> tuple[dict[str, np.ndarray], set[str]]:
    """Return what shards show of these files, and the names of those that the report left out."""
    order = sorted(files)
    paths = {
        f"{'ab'[number % 2]}/{number:04d}-{order[number]}": number for number in range(len(order))
    }
    write(folder, {f"set/{path}": files[order[number]] for path, number in paths.items()})
    result = cli(
        "rackrun convert folder set out --allow-left-out 1000 --val-percent 0", seconds=400
    )
    assert result.code == 0, result
    report = (folder / "out" / "report.json").read_text()
    assert "BytesIO" not in report, "a reason for programmers"
    findings = json.loads(report)["findings"]
    assert all(each["found"] for each in findings)
    left_out = {order[paths[each["file"]]] for each in findings if each["done"] == "left out"}
    shown = {order[int(key[2:6])]: as_pillow_shows(data) for key, data in stored(folder / "out")}
    return shown, left_out


def test_an_image_of_every_kind_is_stored_as_it_looks_or_left_out_by_name(cli, tmp_path):
    exhibits = zoo()
    shown, left_out = converted({n: each.data for n, each in exhibits.items()}, cli, tmp_path)
    whole = {name: each.shown for name, each in exhibits.items() if each.shown is not None}
    assert left_out == exhibits.keys() - whole.keys()
    assert shown.keys() == whole.keys()
    assert [name for name, meant in whole.items() if not is_alike(shown[name], meant)] == []


@pytest.mark.long
def test_pillows_own_images_are_stored_as_it_shows_them_or_left_out_by_name(cli, tmp_path):
    files = pillows()
    if not files:
        pytest.skip(f"{UNRUN}{PILLOW_SOURCES} names no source distribution of Pillow")
    shown, left_out = converted(files, cli, tmp_path)
    assert shown.keys() == files.keys() - left_out
    assert len(shown) > 600
    wrong = [
        name for name, image in shown.items() if not is_alike(image, as_pillow_shows(files[name]))
    ]
    assert wrong == []
