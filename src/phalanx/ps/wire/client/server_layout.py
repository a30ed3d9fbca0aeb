"""`ServerLayout`: which servers a job has now, in a file that its launcher replaces when their number changes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from phalanx.errors import DataError
from phalanx.files import temporary_path


@checked_dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ServerLayout:
    """The servers of a job."""

    number: Annotated[int, Field(ge=1)]
    """How often their number has changed."""

    endpoints: tuple[str, ...]
    """`host:port` of each, by rank."""

    folder: Annotated[str, Field(pattern="^layout-[0-9]+$")]
    """Name of the folder beside the file that holds their state, a folder for each by rank."""

    def write(self, path: Path) -> None:
        """Put it in place of the layout there, in one step, and last: after an `OSError` that is as it was.

        It need not outlive the machine, for the job does not.
        """
        part = temporary_path(path)
        part.write_bytes(_layout.dump_json(self))
        part.replace(path)


_layout: TypeAdapter[ServerLayout] = TypeAdapter(ServerLayout)


def read_layout(path: Path) -> ServerLayout | None:
    """Return the layout in a file; None where the number of servers never changed, and there is none.

    Raises:
        DataError: If it is broken.
    """
    try:
        return _layout.validate_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except (OSError, ValidationError) as error:
        raise DataError(f"{path} does not say which servers the job has ({error}). Start the job again.") from error


@dataclass(frozen=True, slots=True)
class LayoutFile:
    """Where a worker reads which servers there are.

    Args:
        path: The file; None for servers whose number does not change.
        endpoints: The servers while there is no file.
    """

    path: Path | None
    endpoints: tuple[str, ...]

    def read(self) -> tuple[int, tuple[str, ...]]:
        """Return how often the number of servers has changed, and the servers.

        Raises:
            DataError: If the file is broken.
        """
        layout = None if self.path is None else read_layout(self.path)
        return (0, self.endpoints) if layout is None else (layout.number, layout.endpoints)

    def is_newer(self, number: int) -> bool:
        """Whether the number of servers has changed since; also where the file is broken, which `read` then raises."""
        try:
            return self.path is not None and self.read()[0] != number
        except DataError:
            return True
