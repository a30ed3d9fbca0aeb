"""What CONTRIBUTING tells to add in several files is there in all of them."""

from __future__ import annotations

from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from torch import nn

from phalanx import comm
from phalanx.jobs.backend import Backend
from phalanx.jobs.backend_registry import BACKENDS, load
from phalanx.plan.styles import STYLES
from phalanx.plan.value import ModuleRule

TESTS = Path(__file__).parents[1]
NOT_COLLECTIVES = {"agree", "barrier", "new_group", "recv", "send", "share"}
"""Names of `phalanx.comm` that move no tensors of all ranks."""


@pytest.mark.parametrize("name", sorted(set(comm.__all__) - NOT_COLLECTIVES))
def test_a_collective_is_compared_with_one_process(name):
    assert f"{name}(" in (TESTS / "dist" / "test_collectives.py").read_text()


@pytest.mark.parametrize("name", BACKENDS)
def test_a_backend_of_jobs_does_what_the_interface_promises(name):
    entry = BACKENDS[name]
    backend = load(entry.implementation)
    assert backend.name == name
    assert entry.member_check is None or callable(load(entry.member_check))
    assert not [
        verb
        for verb, value in vars(Backend).items()
        if verb[0] != "_" and callable(value) and not hasattr(backend, verb)
    ]


def test_a_style_of_layers_is_one_of_the_plan_with_a_layer_for_it():
    from phalanx.parallel.tensor import styles

    assert set(STYLES) == set(get_args(get_args(get_type_hints(ModuleRule)["style"])[0]))
    for style in STYLES.values():
        for layer in style.layers:
            assert (getattr(nn, layer), style.name) in styles._LAYERS
            assert not style.gathers_samples or (getattr(nn, layer), style.name) in styles._GATHERED_LAYERS
