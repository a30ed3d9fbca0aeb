"""Calls of a sharded model's units are compared at the end of a backward pass, also after one that raised."""

import torch

from phalanx.parallel.zero.unit_calls import UnitCalls


def test_a_backward_pass_that_raised_does_not_end_the_comparison_of_calls():
    calls = UnitCalls(is_queued=True)
    calls.note("layer", object(), torch.ones(1))
    assert not calls.is_queued
