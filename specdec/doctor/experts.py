"""What verify forwards of a mixture of experts cost, measured on the target's own text, and said in words."""

from collections.abc import Sequence

from transformers import PreTrainedModel

from specdec.measure.experts import distinct_experts
from specdec.targets.weight_bytes import VerifyCost, verify_cost


def measure_verify(
    model: PreTrainedModel, texts: Sequence[tuple[Sequence[int], Sequence[int]]], num_nodes: int
) -> VerifyCost | None:
    """Return the VerifyCost of chains of `num_nodes` tokens on `texts`, pairs of a prompt and its answer (ids).

    None if the model has no routed experts.
    """
    if verify_cost(model, num_nodes) is None:
        return None
    return verify_cost(model, num_nodes, distinct_experts(model, texts, num_nodes))


def remark(cost: VerifyCost, break_even: float) -> str:
    """Say what a verify costs, and whether any draft can pay. break_even: tau at which it does, by bytes, with this
    draft."""
    experts = cost.experts
    what = (
        f"a verify of {cost.num_nodes} tokens reads {cost.distinct:.1f} of {experts.num_experts} experts a layer "
        f"({experts.distinct(cost.num_nodes):.1f} if choices were random; a step {experts.per_token}), "
        f"{cost.ratio:.2f} times the bytes of a step: at batch 1 this draft cannot pay below tau {break_even:.2f}, nor "
        f"any draft below {cost.ratio:.2f}"
    )
    if break_even < cost.num_nodes:
        return what
    return f"{what}; a round yields {cost.num_nodes} at most, so that speculation of this depth cannot pay"
