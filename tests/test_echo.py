"""Tolerance of traced layers against live ones: as much as rounding changes the live ones themselves."""

import math

import pytest
import torch

from specdec.backends.differences import MOST, distance
from specdec.backends.op import attention
from specdec.core.errors import GraphError
from specdec.reach.targets.compiling.checked import compare, expect

ROWS = torch.arange(32)


def layers(frequency, scale=1.0, shift=0):
    """One attention call, and a function of its result that amplifies small differences."""

    def run(rows):
        x = torch.randn(64, 2, 16, generator=torch.Generator().manual_seed(0)).bfloat16()[(rows + shift) % 64]
        out = attention(x, x, x, 0).flatten(1) * scale
        return ((out.float() * frequency).sin().bfloat16() if frequency else out,)

    return run


@pytest.mark.parametrize(("frequency", "least", "most"), [(0, 0.05, 0.05), (12, 0.06, 0.4), (2000, MOST, MOST)])
def test_what_rounding_does_to_a_model_is_allowed_and_no_more(frequency, least, most):
    expected = expect(layers(frequency), [(ROWS,)])
    assert least <= expected.bounds[0] <= most
    compare(layers(frequency), expected)
    if frequency < 100:  # above that, rounding leaves nothing to compare
        compare(layers(frequency, scale=1 - 2**-8), expected)
    with pytest.raises(GraphError, match=r"differ from the live model's by .* in forwards of 32 tokens; rounding"):
        compare(layers(frequency, shift=1), expected)


def test_it_is_said_on_which_side_rows_are_not_finite():
    whole, broken = layers(0), layers(0, scale=torch.where(torch.arange(32) == 5, torch.nan, 1.0).unsqueeze(1))
    for live, ours, told in ((whole, broken, "1 are not finite when compiled, 0 in"), (broken, whole, "0 are .* 1 in")):
        with pytest.raises(GraphError, match=rf"of 32 rows {told}"):
            compare(ours, expect(live, [(ROWS,)]))


def test_rows_that_are_zero_tell_nothing():
    """Most rows are zero here: a median over all rows would be 0, whatever the others are."""
    is_whole = (ROWS < 8).unsqueeze(1)
    live, same, other = (layers(0, scale=is_whole * 1.0, shift=shift) for shift in (0, 0, 1))
    expected = expect(live, [(ROWS,)])
    assert 0 < expected.bounds[0] < 0.1
    compare(same, expected)
    with pytest.raises(GraphError, match="differ from the live model's by 1"):
        compare(other, expected)
    assert distance(torch.ones(3, 2), torch.zeros(3, 2)) == math.inf
    assert distance(torch.zeros(3, 2), torch.zeros(3, 2)) == 0
