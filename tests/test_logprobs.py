"""Log-probabilities of emitted tokens, compared with a plain forward of the finished text, and digests of logits."""

import pytest
import torch

import specdec
from specdec.core.functional.results import append_logprobs, line_width, pack, row_digests, unpack
from tests.heads import random_draft
from tests.state_tensors import state_tensors
from tests.test_attach import ragged_prompts
from tests.tiny_models import DEVICE, tiny_model

SHAPES = {
    "plain": {},
    "chain": {"num_steps": 3},
    "tree": {"num_steps": 3, "topk": 3, "num_draft_tokens": 10},
    "tree smaller than a path": {"num_steps": 5, "topk": 2, "num_draft_tokens": 4},
}
LAWS = {
    "greedy": {},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "suppress_tokens": [5, 6]},
}


def engine_of(model, shape, **settings):
    draft = random_draft(model, "eagle").to(DEVICE) if SHAPES[shape] else None
    return specdec.attach(model, draft, max_batch=3, max_seq_len=128, **SHAPES[shape], **settings)


def check(model, out, num_top):
    """Check that logprobs are those of the tokens under the model's own logits, and that the top ones are the best."""
    for request in out.requests:
        text = torch.tensor([request.prompt_ids + request.tokens], device=DEVICE)
        with torch.inference_mode():
            law = model(text).logits[0].float().log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        assert len(request.logprobs) == len(request.tokens) == len(law)
        own = law.gather(1, text[0, len(request.prompt_ids) :].unsqueeze(1))[:, 0].cpu()
        torch.testing.assert_close(torch.tensor([p.logprob for p in request.logprobs]), own, atol=2e-4, rtol=1e-4)
        best = law.topk(max(num_top, 1)).values[:, :num_top].cpu()
        found = torch.tensor([[value for _, value in p.top] for p in request.logprobs]).reshape(len(law), num_top)
        torch.testing.assert_close(found, best, atol=2e-4, rtol=1e-4)
        ids = torch.tensor([[i for i, _ in p.top] for p in request.logprobs], dtype=torch.int64, device=DEVICE)
        torch.testing.assert_close(law.gather(1, ids.reshape(len(law), num_top)).cpu(), best, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
@pytest.mark.parametrize("shape", SHAPES)
def test_they_are_those_of_a_plain_forward(shape, graphs):
    model = tiny_model("llama").to(DEVICE)
    engine = engine_of(model, shape, logprobs=3, cuda_graph=graphs, max_prefill_tokens=16)
    for law in LAWS.values():
        check(model, engine.generate(ragged_prompts(), max_new_tokens=12, seed=1, ignore_eos=True, **law), 3)
    if graphs:
        assert engine.report().runners["round" if SHAPES[shape] else "decode"]["replays"] > 0
    engine.check_integrity()
    engine.detach()


@pytest.mark.parametrize("num_top", [0, 1, 40])
def test_as_many_best_tokens_as_are_asked_for(num_top):
    model = tiny_model("llama").to(DEVICE)
    engine = engine_of(model, "chain", logprobs=num_top, cuda_graph=True)
    out = engine.generate(ragged_prompts()[:2], max_new_tokens=9)
    check(model, out, num_top)
    assert sum(out.requests[0].round_lens) + 1 == len(out.requests[0].logprobs)
    engine.detach()


def test_without_the_setting_there_are_none_and_lines_are_short():
    model = tiny_model("llama").to(DEVICE)
    engine = engine_of(model, "chain")
    core, widths = engine._core, []
    post = core.mailbox.post

    def watched(requests, packed, *more):
        widths.append(packed.shape[1])
        post(requests, packed, *more)

    core.mailbox.post = watched
    out = engine.generate(ragged_prompts()[:1], max_new_tokens=9)
    assert out.requests[0].logprobs is None and set(widths) == {1 + 3, 4 + 3}
    assert not {"logprobs", "digests"} & set(state_tensors(core.state)) and out.requests[0].digests == []
    engine.detach()


def test_they_end_with_the_text_at_a_stop_string():
    class Words:
        """Token t has the text "<t>"."""

        all_special_ids: tuple = ()

        def decode(self, ids, **kwargs):
            return "".join(f"<{i}>" for i in ids)

    model = tiny_model("llama").to(DEVICE)
    engine = engine_of(model, "chain", logprobs=0, digests=True)
    engine.tokenizer = Words()
    free = engine.generate(ragged_prompts()[:1], max_new_tokens=20, ignore_eos=True).requests[0]
    stop = f"<{free.tokens[7]}>"
    ended = engine.generate(ragged_prompts()[:1], max_new_tokens=20, ignore_eos=True, stop=stop).requests[0]
    assert ended.finish_reason == "stop_string" and len(ended.logprobs) == len(ended.tokens) < 20
    assert ended.logprobs == free.logprobs[: len(ended.tokens)]
    assert ended.digests == free.digests[: len(ended.tokens)]
    engine.detach()


def test_lines_keep_every_bit():
    tokens = torch.tensor([[5, 6, -1]])
    values = torch.tensor([[[-0.1, 3.0, -0.1], [-1e-30, 16777215.0, -65504.0], [0.0, 0.0, float("-inf")]]])
    flags = torch.tensor([2]), torch.tensor([False]), torch.tensor([True])
    line = append_logprobs(pack(tokens, *flags), values)[0].tolist()
    assert len(line) == line_width(3, 1) and line_width(3, None) == 6
    emitted = unpack(line, 1)
    assert emitted.tokens == [5, 6] and emitted.is_finished and not emitted.is_invalid
    assert [(p.logprob, *p.top[0]) for p in emitted.logprobs] == [tuple(row) for row in values[0, :2].tolist()]
    digests = torch.tensor([[-(2**63), 2**63 - 1, 7]])
    both = append_logprobs(torch.cat([pack(tokens, *flags), digests], 1), values)[0].tolist()
    assert len(both) == line_width(3, 1, True) and unpack(both, 1, True) == (*emitted[:-1], digests[0, :2].tolist())
    assert unpack(both[: line_width(3, None, True)], None, True).digests == digests[0, :2].tolist()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_digest_tells_rows_apart_by_any_bit(dtype):
    rows = torch.randn(2, 3, 1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    whole = row_digests(rows)
    assert torch.equal(row_digests(rows[1:, :2]), whole[1:, :2]) and len(set(whole.flatten().tolist())) == 6
    kind = torch.int32 if dtype == torch.float32 else torch.int16
    for places, by in (([7], 1), ([999], -1), ([3, 4], (1, -1)), ([1, 2, 3, 4], (1, -1, -1, 1))):
        other = rows.clone()
        other.view(kind)[1, 2, places] += torch.tensor(by, dtype=kind)  # also changes that keep the sum of the bits
        assert row_digests(other)[1, 2] != whole[1, 2], places
    swapped = rows.clone()
    swapped[0, 0, [5, 6]] = rows[0, 0, [6, 5]]
    assert row_digests(swapped)[0, 0] != whole[0, 0]


@pytest.mark.parametrize("shape", ["plain", "tree"])
def test_digests_are_of_the_logits_that_tokens_were_chosen_from(shape):
    """Of each emitted token, in eager rounds and in graphs; a model with one other weight in its head gives others."""
    model = tiny_model("llama").to(DEVICE)
    found = []
    for graphs in (False, True, False):
        engine = engine_of(model, shape, digests=True, cuda_graph=graphs, graph_sampling="greedy")
        head, seen = engine._core.target.head, []
        if not found:
            engine._core.target.head = lambda hidden, head=head, seen=seen: seen.append(head(hidden)) or seen[-1]
        out = engine.generate(ragged_prompts()[:2], max_new_tokens=8, ignore_eos=True)
        engine.detach()
        assert [len(r.digests) for r in out.requests] == [8, 8]
        if not found:
            known = set(row_digests(torch.cat(seen).unsqueeze(0)).flatten().tolist())
            assert all(d in known for r in out.requests for d in r.digests)
        found.append((out.tokens, {digest for r in out.requests for digest in r.digests}))
        if len(found) == 2:
            model.lm_head.weight.data[0, 0] += 1e-3
    assert found[0][0] == found[1][0] and not found[0][1] & found[2][1]


@pytest.mark.parametrize(("value", "message"), [(-1, "logprobs=-1"), (True, "logprobs=True"), (129, "from 0 to 128")])
def test_settings_that_make_no_sense(value, message):
    with pytest.raises(ValueError, match=message):
        specdec.EngineConfig(logprobs=value)


def test_a_vocabulary_has_no_more_best_tokens_than_tokens():
    model = tiny_model("llama")
    model.resize_token_embeddings(50)
    with pytest.raises(ValueError, match="logprobs=60: the model's vocabulary has 50 tokens"):
        specdec.attach(model, logprobs=60)
    specdec.attach(model, logprobs=50).detach()
