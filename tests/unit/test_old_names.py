"""Words of older frameworks get an error that says what to write, from one table that the docs show too."""

import importlib
import traceback
from pathlib import Path

import pytest

import phalanx
from phalanx import distributed, fleet
from phalanx.old_names import REPLACED

DOCS = Path(__file__).parents[2] / "docs" / "coming-from.md"


@pytest.mark.parametrize("module", [phalanx, fleet, distributed], ids=lambda m: m.__name__)
@pytest.mark.parametrize("word", sorted(REPLACED))
def test_an_old_word_says_what_to_write(module, word):
    if word in module.__all__:  # `get_rank` of phalanx.distributed
        return
    with pytest.raises(AttributeError, match="Write instead"):
        getattr(module, word)


@pytest.mark.parametrize("module", ["phalanx", "phalanx.fleet", "phalanx.distributed"])
def test_an_import_of_an_old_word_says_so_too(module):
    with pytest.raises(ImportError, match="Write instead: from phalanx import fleet"):
        exec(f"from {module} import fluid")
    with pytest.raises(ImportError, match="Did you mean 'DistributedStrategy'"):
        exec(f"from {module} import DistributedStrateg")
    assert not hasattr(importlib.import_module(module), "fluid")


def test_the_docs_show_the_whole_table():
    text = DOCS.read_text()
    for word, instead in REPLACED.items():
        assert f"| `{word}` | {instead} |" in text


def test_a_misspelt_name_gets_the_nearest():
    with pytest.raises(AttributeError, match="Did you mean 'distribute'"):
        _ = phalanx.distrubute
    with pytest.raises(AttributeError, match="Did you mean 'distributed_model'"):
        _ = fleet.distribute_model


def test_python_adds_no_guess_of_its_own():
    for module, word in ((phalanx, "Callbacks"), (phalanx.ps, "Adagrat")):
        with pytest.raises(AttributeError) as caught:
            getattr(module, word)
        assert "".join(traceback.format_exception(caught.value)).count("Did you mean") == 1


def test_every_public_name_resolves():
    for name in phalanx.__all__:
        assert getattr(phalanx, name) is not None


def test_fleet_is_one_module_under_all_its_names():
    import phalanx.distributed.fleet as by_path
    from phalanx.distributed import fleet as by_name

    assert by_path is by_name is fleet is phalanx.fleet
