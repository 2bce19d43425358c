"""The rows of CSV files, as spreadsheets and their countries save them."""

import csv
from collections.abc import Iterator
from pathlib import Path

from rackrun.errors import UsageError

SEPARATORS = ",;\t"


def csv_rows(table: Path) -> Iterator[tuple[int, dict[str, str | None]]]:
    """Yield the cells of each row by column, after the line that the row ends on.

    The separator is the commonest one in the header. UsageError for what is no CSV in UTF-8.
    """
    try:
        with table.open(newline="", encoding="utf-8-sig") as file:
            header = file.readline()
            file.seek(0)
            separator = max(SEPARATORS, key=header.count)
            reader = csv.DictReader(
                file, restkey="", strict=True, delimiter=separator, skipinitialspace=True
            )
            reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
            for row in reader:
                yield reader.line_num, row
    except UnicodeDecodeError:
        raise UsageError(
            f"{table}: cannot be read as CSV: not in UTF-8; in a spreadsheet, save it as CSV UTF-8"
        ) from None
    except (OSError, csv.Error) as error:
        raise UsageError(f"{table}: cannot be read as CSV: {error}") from None
