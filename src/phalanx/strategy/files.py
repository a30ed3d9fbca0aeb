"""`write_settings`, `read_settings`: save and load strategies as YAML or TOML."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from phalanx.errors import StrategyError, StrategyTypeError, did_you_mean

_SUFFIXES = (".yaml", ".yml", ".toml")


def write_settings(path: str | Path, settings: Mapping[str, Any]) -> None:
    """Write settings to a file, in the form its suffix names.

    Raises:
        StrategyError: If the suffix names none, or the file cannot be written.
    """
    path = Path(path)
    text = _as_toml(settings) if _is_toml(path) else _as_yaml(settings)
    try:
        path.write_text(text)
    except OSError as error:
        raise StrategyError(f"cannot write the strategy file {path}: {error.strerror}.") from error


def read_settings(path: str | Path) -> dict[str, Any]:
    """Return the settings in a file.

    Raises:
        StrategyError: If the file cannot be read, or is not what its suffix says.
    """
    path = Path(path)
    is_toml = _is_toml(path)
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise StrategyError(f"cannot read the strategy file {path}: {error}.") from error
    read = _from_toml(path, text) if is_toml else _from_yaml(path, text)
    if not isinstance(read, dict) or not all(isinstance(key, str) for key in read):
        raise StrategyTypeError(
            f"{path} holds a {type(read).__name__}, not settings by name. Write lines such as `amp: true`."
        )
    return read


def _is_toml(path: Path) -> bool:
    if path.suffix not in _SUFFIXES:
        hint = did_you_mean(path.suffix, _SUFFIXES)
        raise StrategyError(f"strategy files end in {', '.join(_SUFFIXES)}; found {path.name!r}.{hint}")
    return path.suffix == ".toml"


def _as_toml(settings: Mapping[str, Any]) -> str:
    import tomli_w  # only jobs with such a file wait for it, as below

    return tomli_w.dumps(settings)


def _as_yaml(settings: Mapping[str, Any]) -> str:
    import yaml

    text: str = yaml.safe_dump(dict(settings), sort_keys=False)
    return text


def _from_toml(path: Path, text: str) -> dict[str, Any]:
    import tomllib

    try:
        return tomllib.loads(text)
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise StrategyError(f"{path} is not TOML: {error}.") from error


def _from_yaml(path: Path, text: str) -> Any:
    import yaml

    try:
        read = yaml.safe_load(text)
        return {} if read is None else read
    except (yaml.YAMLError, RecursionError) as error:
        raise StrategyError(f"{path} is not YAML: {error}") from error
