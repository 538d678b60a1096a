"""Checks that sampled tokens follow the target's own distribution."""

import torch
from scipy import stats

from specdec import SamplingParams

SEEDS = 1000


def assert_own_law(engine, model, prompt, num_tokens=2):
    """Chi-square test over 1000 seeds of the second token, drafted and verified, given the most frequent first one.

    num_tokens: per request; a draft without a model may need one more before it drafts the second.
    """
    law = SamplingParams(temperature=1.0, top_k=4, seed=0)
    out = engine.generate([prompt] * SEEDS, max_new_tokens=num_tokens, sampling=law, ignore_eos=True)
    tokens = torch.tensor(out.tokens)
    first = int(tokens[:, 0].mode().values)
    seconds = tokens[tokens[:, 0] == first, 1]
    ids = torch.tensor([[*prompt, first]], device=model.device)
    best = model(ids).logits[0, -1].detach().double().cpu().topk(4)
    observed = torch.stack([(seconds == token).sum() for token in best.indices]).double()
    assert observed.sum() == len(seconds)
    expected = best.values.softmax(-1) * observed.sum()
    assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3
