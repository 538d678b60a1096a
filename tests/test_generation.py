"""Every setting of `GenerationConfig` is honoured, harmless or refused by name: none is ignored."""

import inspect
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import GenerationConfig
from transformers.generation.utils import GenerationMixin

import specdec
from specdec import SamplingParams
from specdec.core.engine import generation
from specdec.core.engine.generation import HARMLESS, HONOURED, REFUSED, REFUSED_ARGUMENTS, REFUSED_SAMPLED, Settings
from specdec.core.sampling_params import request_seed
from tests.grammars import tiny_tokenizer
from tests.tiny_models import tiny_model

# A value of each refused setting that would change the text.
CHANGING = {
    "num_beams": 4,
    "num_beam_groups": 2,
    "diversity_penalty": 0.5,
    "constraints": ["x"],
    "force_words_ids": [[3]],
    "num_return_sequences": 3,
    "max_time": 2.0,
    "encoder_repetition_penalty": 1.2,
    "encoder_no_repeat_ngram_size": 2,
    "forced_bos_token_id": 3,
    "forced_eos_token_id": 3,
    "exponential_decay_length_penalty": (5, 1.1),
    "remove_invalid_values": True,
    "guidance_scale": 1.5,
    "watermarking_config": {"bias": 2.5},
    "token_healing": True,
    "penalty_alpha": 0.6,
    "dola_layers": "high",
    "output_scores": True,
    "output_logits": True,
    "output_attentions": True,
    "output_hidden_states": True,
    "typical_p": 0.9,
    "top_h": 0.5,
    "epsilon_cutoff": 0.01,
    "eta_cutoff": 0.01,
}


@pytest.fixture(scope="module")
def model():
    return tiny_model("llama")


@pytest.fixture
def engine(model):
    engine = specdec.attach(model, max_seq_len=64, max_batch=2)
    yield engine
    engine.check_integrity()
    engine.detach()


def test_every_field_of_generation_config_has_one_answer():
    fields = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    answers = [HONOURED, HARMLESS, frozenset(REFUSED), frozenset(REFUSED_SAMPLED)]
    known = frozenset().union(*answers)
    assert sum(map(len, answers)) == len(known), "a setting has two answers"
    assert fields <= known, f"dropped silently: {sorted(fields - known)}"
    assert CHANGING.keys() == REFUSED.keys() | REFUSED_SAMPLED.keys()


def test_the_page_of_settings_names_them_all():
    page = (Path(__file__).parents[1] / "docs" / "generation-settings.md").read_text("utf-8")
    refused = {**REFUSED, **REFUSED_SAMPLED}
    for names, title in ((HONOURED, "## Honoured"), (refused, "## Refused"), (HARMLESS, "## Without")):
        section = page[page.index(title) :].split("\n## ")[0]
        assert not [name for name in names if f"`{name}`" not in section], title


def test_harmless_settings_never_reach_the_logits():
    """Settings for which `transformers` creates processors, by its own source, are honoured or refused."""
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    used = set(re.findall(r"generation_config\.(\w+)", source)) & vars(GenerationConfig()).keys()
    assert len(used) > 20
    # A softmax of log-probabilities equals that of the logits; the cache is for guidance's second forward.
    assert used & HARMLESS == {"renormalize_logits", "use_cache"}


@pytest.mark.parametrize("name", CHANGING)
@pytest.mark.parametrize("whose", ["call", "config", "model"])
def test_what_is_not_honoured_is_refused_by_name(engine, model, name, whose):
    value, samples = CHANGING[name], {"do_sample": True} if name in REFUSED_SAMPLED else {}
    before = dict(vars(model.generation_config))
    config = GenerationConfig(**samples)
    setattr(config, name, value)
    try:
        options = {"call": {name: value, **samples}, "config": {"generation_config": config}, "model": samples}[whose]
        if whose == "model":
            setattr(model.generation_config, name, value)
        with pytest.raises(ValueError, match=f"{name}=.*would change the text"):
            engine.generate([[3]], max_new_tokens=1, **options)
        if whose == "model":  # and the fix that the message names
            engine.generate([[3]], max_new_tokens=1, **options, **{name: None})
    finally:
        vars(model.generation_config).clear()
        vars(model.generation_config).update(before)


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_arguments_of_generate_that_cannot_be_honoured(engine, name):
    with pytest.raises(ValueError, match=f"{name} is not supported"):
        engine.generate([[3]], max_new_tokens=1, **{name: object()})


def test_an_unknown_option_is_named(engine):
    with pytest.raises(ValueError, match=r"temprature=0.5: .* no such option: .*; did you mean temperature"):
        engine.generate([[3]], temprature=0.5)
    model_config = engine.target_module.generation_config
    model_config.my_own_knob = 3
    try:
        with pytest.raises(ValueError, match="my_own_knob=3, of the model's generation_config"):
            engine.generate([[3]], max_new_tokens=1)
    finally:
        del model_config.my_own_knob


def settings_of(model_says=None, call_says=None, **arguments):
    return Settings.merge(
        GenerationConfig(**(model_says or {})),
        None if call_says is None else GenerationConfig(**call_says),
        arguments,
    )


def test_sampling_is_as_in_transformers():
    greedy = settings_of({"temperature": 0.6, "top_p": 0.9}).params(3)
    assert greedy.is_greedy and greedy.top_p == 1.0
    shipped = {"do_sample": True, "temperature": 0.6, "top_p": 0.9}
    law = settings_of(shipped).params(3)
    assert (law.temperature, law.top_p, law.top_k) == (0.6, 0.9, 50)  # transformers adds 50
    assert settings_of(shipped, {"temperature": 0.3}).params(3).temperature == 0.3
    assert settings_of(shipped, {"temperature": 0.3}, temperature=0.2, top_k=None).params(3).top_k == 0
    assert settings_of(shipped, do_sample=False).params(3).is_greedy
    assert settings_of({"do_sample": True}, temperature=None).params(3).temperature == 1.0
    with pytest.raises(ValueError, match=r"temperature=0.7 does nothing with do_sample=False"):
        settings_of(temperature=0.7)
    assert settings_of(temperature=0.0).params(3).is_greedy


@pytest.mark.parametrize(
    "options",
    [
        {"top_p": 1.0},
        {"temperature": 1.0},
        {"temperature": 1},
        {"top_k": 50},  # the default of transformers
        {"top_k": 0},
        {"min_p": 0.0},
        {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "min_new_tokens": 0},
        {"do_sample": False, "temperature": 1.0, "top_p": 1.0, "top_k": 50, "typical_p": 1.0, "epsilon_cutoff": 0.0},
        {"do_sample": None, "temperature": None, "top_k": None},
        {"temperature": 0, "top_p": 0.9, "top_k": 3},  # the best token passes all filters
        {"temperature": 0.0, "do_sample": False},
        {"num_beams": 1, "length_penalty": 1.0, "num_return_sequences": 1, "suppress_tokens": [], "logit_bias": {}},
    ],
)
def test_what_asks_for_nothing_is_accepted(engine, options):
    expected = engine.generate([[3, 4]], max_new_tokens=6).tokens
    assert engine.generate([[3, 4]], max_new_tokens=6, **options).tokens == expected


def test_biases_of_both_names_add_up():
    """A ban that the model ships holds beside a call's own biases."""
    settings = settings_of({"sequence_bias": [[[3], -math.inf], [[4], 1.5]]}, logit_bias={3: 9, 4: 2, 5: 1})
    assert settings.params(2).logit_bias == {3: -math.inf, 4: 3.5, 5: 1}
    with pytest.raises(ValueError, match="logit_bias=7: expected a mapping"):
        settings_of(sequence_bias={(3,): 1.0}, logit_bias=7).params(2)


def test_lengths_are_as_in_transformers():
    assert settings_of({"max_new_tokens": 7}).max_new_tokens(3) == 7
    assert settings_of({"max_length": 7}).max_new_tokens(3) == 4
    assert settings_of({"max_length": 7}, max_new_tokens=9).max_new_tokens(3) == 9
    assert settings_of().max_new_tokens(3) is None
    with pytest.raises(ValueError, match="max_length=7 leaves no room after a prompt of 7"):
        settings_of(max_length=7).max_new_tokens(7)
    assert settings_of({"min_length": 10}).params(3).min_new_tokens == 7
    assert settings_of({"min_length": 10}, min_new_tokens=2).params(3).min_new_tokens == 2


def test_the_models_own_limit_is_kept_as_far_as_the_engine_holds_it(engine, model):
    model.generation_config.max_new_tokens = 1000
    try:
        with pytest.warns(UserWarning, match="allows more tokens than max_seq_len=64"):
            assert len(engine.generate([[3, 4]], ignore_eos=True).tokens[0]) == 62
        model.generation_config.max_new_tokens = 5
        assert len(engine.generate([[3, 4]], ignore_eos=True).tokens[0]) == 5
    finally:
        model.generation_config.max_new_tokens = None


@pytest.mark.parametrize(("settings", "most"), [({"max_seq_len": 64}, 64), ({"max_seq_len": 512, "num_slots": 48}, 46)])
def test_a_length_that_nobody_asked_for_is_cut_to_what_fits(model, settings, most):
    engine = specdec.attach(model, **settings)
    try:
        for size in (2, most - 1):
            for options in ({}, {"max_length": None}):
                out = engine.generate([[3] * size, [3]], ignore_eos=True, **options)
                assert list(map(len, out.tokens)) == [most - size, most - 1] and set(out.finish_reasons) == {"length"}
        for prompt, options in (([3] * most, {}), ([3, 4], {"max_new_tokens": 256}), ([3, 4], {"max_length": 258})):
            with pytest.raises(specdec.CapacityError):
                engine.generate([prompt], **options)
        assert len(engine.generate([[3, 4]], max_new_tokens=most - 2, ignore_eos=True).tokens[0]) == most - 2
    finally:
        engine.detach()


def test_eos_ids_of_the_call(engine, model):
    text = engine.generate([[3, 4]], max_new_tokens=12).tokens[0]
    out = engine.generate([[3, 4]], max_new_tokens=12, eos_token_id=[text[2], 99])
    assert out.tokens[0] == text[: text.index(text[2]) + 1] and out.finish_reasons == ["eos"]
    assert engine.generate([[3, 4]], max_new_tokens=12, eos_token_id=torch.tensor(text[2])).finish_reasons == ["eos"]


def test_eos_of_the_models_config_may_lie_past_its_vocabulary(engine, model, monkeypatch):
    """As in a small GPT2Config with the default, 50256: `generate` never emits it."""
    monkeypatch.setattr(model.generation_config, "eos_token_id", [2, 50256])
    ids = torch.tensor([[3, 4]], device=model.device)
    expected = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12)[0, 2:].tolist()
    assert engine.generate([[3, 4]], max_new_tokens=12).tokens == [expected]
    with pytest.raises(ValueError, match="stop ids hold 50256"):
        engine.generate([[3, 4]], max_new_tokens=12, eos_token_id=50256)


def test_seeds_are_fresh_unless_given(engine):
    law, options = SamplingParams(temperature=1.0), {"max_new_tokens": 24, "ignore_eos": True}
    texts = [engine.generate([[3, 4]] * 2, sampling=law, **options).tokens for _ in range(2)]
    assert len({tuple(t) for text in texts for t in text}) == 4
    again = [engine.generate([[3, 4]] * 2, do_sample=True, seed=5, **options).tokens for _ in range(2)]
    assert again[0] == again[1] and again[0][0] != again[0][1]
    for _ in range(2):
        torch.manual_seed(3)
        again.append(engine.generate([[3, 4]], sampling=law, **options).tokens)
    assert again[2] == again[3]


def test_other_seeds_share_no_sample(engine):
    texts = [engine.generate([[3, 4]] * 8, do_sample=True, max_new_tokens=16, seed=seed).tokens for seed in (0, 1)]
    assert len({tuple(text) for batch in texts for text in batch}) == 16
    alone = engine.generate([[3, 4]], do_sample=True, max_new_tokens=16, seed=1).tokens
    assert alone[0] == texts[1][0]
    assert (request_seed(7, 0), request_seed(7, 1), request_seed(2**63 - 1, 5)) == (
        7,
        2297865989351888797,
        6372480499010599578,
    )  # the same on every machine


def test_one_law_is_said_in_one_place(engine):
    with pytest.raises(ValueError, match=r"together with temperature, top_k"):
        engine.generate([[3]], sampling=SamplingParams(), temperature=0.5, top_k=3)
    engine.generate([[3]], sampling=SamplingParams(), max_length=4, eos_token_id=5)


def test_a_mistake_leaves_alone_what_runs(engine):
    """Another caller's running request continues unaffected."""
    expected = engine.generate([[3, 4]], max_new_tokens=12).tokens
    running = engine.submit([[3, 4]], max_new_tokens=12)
    engine.step()
    with pytest.raises(ValueError, match="expected a list of token ids"):
        engine.generate([[5]], max_new_tokens=4, stop_token_ids="5")
    while engine.step():
        pass
    assert [r.tokens for r in running] == expected


def test_what_hf_users_write_is_accepted(engine):
    law = SamplingParams(temperature=np.float32(0.7), top_k=np.int64(5), seed=np.int64(3))
    assert type(law.temperature) is float and type(law.seed) is int
    engine.generate([[3]], max_new_tokens=np.int64(2), sampling=law, stop=None, stop_token_ids=None)
    assert engine.generate([[3, 4]], max_new_tokens=2, stop_token_ids=np.int64(9)).tokens


def test_refusals_tell_the_way_out():
    assert all(cure and not cure.endswith(".") for _, cure in [*REFUSED.values(), *REFUSED_SAMPLED.values()])
    assert generation.HF_DEFAULTS["top_k"] == GenerationConfig()._get_default_generation_params()["top_k"]


class Letters:
    """A tokenizer with one letter per token; token 98 is special: it never becomes text."""

    all_special_tokens, all_special_ids = ["<end>"], [98]

    def decode(self, ids, skip_special_tokens=True):
        return "".join(chr(ord("a") + i % 26) for i in ids if not (skip_special_tokens and i == 98))

    def __call__(self, text):
        return {"input_ids": [ord(letter) - ord("a") for letter in text]}


def test_a_stop_string_that_is_a_special_token_stops(model):
    engine = specdec.attach(model, tokenizer=Letters(), max_seq_len=64)
    prompt, options = [[5, 9, 5, 9, 6]], {"max_new_tokens": 12, "ignore_eos": True}
    tokens = engine.generate(prompt, **options).tokens[0]
    assert 98 in tokens
    out = engine.generate(prompt, stop="<end>", **options)
    assert out.tokens[0] == tokens[: tokens.index(98) + 1] and out.finish_reasons == ["stop_string"]
    with pytest.raises(ValueError, match=r"stop='<end>\\n' holds the special token '<end>'"):
        engine.generate(prompt, stop=["x", "<end>\n"], **options)
    engine.detach()


def test_texts_that_keep_special_tokens_end_before_those_that_stop_them(model):
    engine = specdec.attach(model, tokenizer=tiny_tokenizer(), max_seq_len=64)
    options = {"max_new_tokens": 12, "logit_bias": {1: 9.0}, "skip_special_tokens": False}
    whole = engine.generate([[5, 9, 5]], **options)
    assert whole.texts[0].startswith("<bos><bos>")
    for stop in ("<bos>", "<bos><b"):
        out = engine.generate([[5, 9, 5]], stop=stop, **options)
        assert (out.texts, out.finish_reasons) == ([whole.texts[0].partition(stop)[0]], ["stop_string"])
    engine.detach()


def test_stop_begins_in_the_text_and_stop_strings_may_begin_in_the_prompt(model):
    engine = specdec.attach(model, tokenizer=Letters(), max_seq_len=64)
    prompt, options = [[5, 9, 5, 9, 6]], {"max_new_tokens": 6, "ignore_eos": True}
    whole = engine.generate(prompt, **options)
    across = "g" + whole.texts[0][0]
    assert across not in whole.texts[0]
    assert engine.generate(prompt, stop=across, **options).texts == whole.texts
    assert engine.generate(prompt, stop_strings=across, **options).texts == [""]
    for stops in ([whole.texts[0][1]], iter([whole.texts[0][1]])):
        assert engine.generate(prompt, stop=stops, **options).finish_reasons == ["stop_string"]
    engine.detach()


def test_what_can_be_read_once_holds_for_every_prompt(engine):
    prompts, options = [[5, 6, 7], [8, 9]], {"max_new_tokens": 6, "min_length": 4, "ignore_eos": True}
    banned = sorted({token for tokens in engine.generate(prompts, **options).tokens for token in tokens})
    expected = engine.generate(prompts, suppress_tokens=banned, **options).tokens
    assert engine.generate(prompts, suppress_tokens=iter(banned), **options).tokens == expected
