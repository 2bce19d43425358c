"""The rows of CSV files, as spreadsheets and their countries save them."""

import csv
from collections.abc import Iterator
from pathlib import Path

from rackrun.errors import UsageError
from rackrun.terminal import clean

SEPARATORS = ",;\t"
BEYOND = "\0"  # the column of what a row has more than the header


def csv_rows(table: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield the cells of each row by column, after the line that the row ends on.

    The separator is the commonest one in the header. UsageError for what is no CSV in UTF-8, for
    two columns of one name, and for a row with more cells than the header.
    """
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            separator = max(SEPARATORS, key=header.count)
            reader = csv.DictReader(
                file, restkey=BEYOND, strict=True, delimiter=separator, skipinitialspace=True
            )
            names = [name.strip() for name in reader.fieldnames or ()]
            if twice := next((name for name in names if name and names.count(name) > 1), ""):
                raise UsageError(clean(f"{table}: two columns are called {twice!r}; rename one"))
            reader.fieldnames = names
            for row in reader:
                beyond = "".join(row.pop(BEYOND, None) or ()).strip()
                if beyond and len(names) > 1:
                    where = f"{table}: line {reader.line_num}: more cells than the header: {beyond}"
                    raise UsageError(clean(f"{where}; quote what has a {separator!r} in it"))
                yield reader.line_num, row
    except UnicodeDecodeError:
        raise UsageError(
            f"{table}: cannot be read as CSV: not in UTF-8; in a spreadsheet, save it as CSV UTF-8"
        ) from None
    except (OSError, csv.Error) as error:
        raise UsageError(f"{table}: cannot be read as CSV: {error}") from None
