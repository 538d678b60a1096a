"""Bad inputs of `Engine.generate`, one table on one engine: each is a ValueError that names it, before any work."""

import re

import numpy as np
import pytest
import torch
from transformers import BatchEncoding

import specdec
from specdec import SamplingParams
from tests.test_text import TOKENIZER
from tests.tiny_models import VOCAB, tiny_model

IDS = torch.tensor([[3, 4, 5]])
IMAGE = {"type": "image", "url": "cat.png"}
NAN, INF, HALF = float("nan"), float("inf"), "a\ud800"


def said(content, **more):
    return [{"role": "user", "content": content, **more}]


def law(**values):
    return {"sampling": SamplingParams(**values)}


# prompts, part of the message
PROMPTS = [
    (None, "prompts=None: expected a string"),
    (5, "prompts=5: expected a string"),
    ([], "prompts=[]: expected"),
    ("", "prompt 0 is empty"),
    ({"a": 1}, "prompts={'a': 1}: expected a string"),
    ({3, 4}, "prompts={3, 4}: expected a string"),
    ([[]], "prompt 0 is empty"),
    ([[3], []], "prompt 1 is empty"),
    (b"hi", "prompts is bytes: expected text or token ids"),
    ([[3], b"hi"], "prompt 1 is bytes"),
    (HALF, f"prompt 0={HALF!r}: surrogates not allowed at character 1"),
    ([[3], HALF], "prompt 1="),
    ([None], "prompt 0 is None: expected a string"),
    ([[3], 3.5], "prompt 1 is 3.5: expected a string"),
    ([[3, 4.5]], "prompt 0: item 1 is 4.5: expected token ids (integers)"),
    ([[True, 4]], "prompt 0: item 0 is True: expected token ids"),
    ([[3], ["a", "b"]], "prompt 1: item 0 is 'a': expected token ids"),
    ([[3, None]], "prompt 0: item 1 is None"),
    ([[3, NAN]], "prompt 0: item 1 is nan"),
    ([3, "a"], "prompt 0 is 3: expected a string"),
    ([[-1]], "prompt 0 holds token -1"),
    ([[VOCAB]], f"prompt 0 holds token {VOCAB}"),
    ([[2**70]], f"prompt 0 holds token {2**70}"),
    (torch.ones(1, 3), "input_ids of shape (1, 3) and dtype torch.float32: expected [bs, T] integers"),
    (torch.ones(1, 3).bool(), "integers"),
    (torch.ones(1, 3, 2).long(), "input_ids of shape (1, 3, 2)"),
    (torch.tensor(3), "input_ids of shape ()"),
    ([torch.ones(2, 3).long()], "prompt 0 is a tensor of 2 rows"),
    (np.array([1.5]), "dtype float64"),
    # chats
    (said(None), "prompt 0: messages[0].content=None: expected a string"),
    (said(5), "prompt 0: messages[0].content=5: expected a string"),
    (said({"text": "a"}), "prompt 0: messages[0].content={'text': 'a'}: expected a string"),
    (said(HALF), "prompt 0: messages[0].content="),
    ([{"role": "user"}], "prompt 0: messages[0].content=None"),
    ([{"content": "a"}], "prompt 0: messages[0].role=None: expected a string"),
    (said("a", role=None), "messages[0].role=None"),
    ([*said("a"), *said([IMAGE])], "messages[1].content[0].type='image': only parts of type 'text' are read"),
    ([[3], said([{"type": "text", "text": "a"}, IMAGE])], "prompt 1: messages[0].content[1].type='image'"),
    (said([{"type": "image_url", "image_url": {"url": "x"}}]), "content[0].type='image_url'"),
    (said([{"type": "text"}]), "content[0].text=None: expected a string"),
    (said([{"type": "text", "text": 3}]), "content[0].text=3: expected a string"),
    (said([{"type": "text", "text": "a", "image": 3}]), "content[0].image=3: only the text of a part is read"),
    (said(["a"]), "content[0].type='a': only parts of type 'text'"),
    # outputs of tokenizers and processors
    ({"input_ids": IDS, "pixel_values": torch.ones(1, 3, 8, 8)}, "pixel_values: the engine reads only text"),
    (BatchEncoding({"input_ids": IDS, "pixel_values": IDS, "grid": IDS}), "grid, pixel_values: the engine reads"),
    ({"input_ids": IDS, "input_features": IDS}, "input_features: the engine reads only text"),
    ({"input_ids": IDS, "token_type_ids": IDS}, "token_type_ids: the engine reads"),
    ({"input_ids": IDS, "position_ids": IDS}, "position_ids: the engine reads"),
    ({"input_ids": [[5, 6], [7]], "attention_mask": [[1, 1], [1, 1]]}, "attention_mask has rows of [2, 2] values"),
    ({"input_ids": IDS, "attention_mask": torch.ones(1, 4)}, "attention_mask has rows of [4] values, input_ids of [3]"),
    ({"input_ids": IDS, "attention_mask": "abc"}, "attention_mask='abc': expected 0 and 1 in the shape of input_ids"),
    ({"input_ids": IDS, "attention_mask": [[1, 1], [1]]}, "attention_mask has rows of [2, 1] values, input_ids of [3]"),
    ({"input_ids": [5, 6], "attention_mask": 5}, "attention_mask has rows of [1] values, input_ids of [2]"),
    ({"input_ids": [[5, 6]], "attention_mask": "ab"}, "attention_mask='ab': expected 0 and 1"),
    ({"input_ids": [[5, 6]], "attention_mask": 5}, "attention_mask has rows of [1] values"),
    ({"input_ids": None}, "prompts=None"),
    ({"input_ids": "ab", "attention_mask": [[1]]}, "not with text"),
]

# options of a call, part of the message
OPTIONS = [
    ({"max_new_tokens": 0}, "max_new_tokens=0 for prompt 0: expected an integer of at least 1"),
    ({"max_new_tokens": -1}, "max_new_tokens=-1"),
    ({"max_new_tokens": 2.5}, "max_new_tokens=2.5"),
    ({"max_new_tokens": True}, "max_new_tokens=True"),
    ({"max_new_tokens": "5"}, "max_new_tokens='5' for prompt 0"),
    ({"max_new_tokens": NAN}, "max_new_tokens=nan"),
    ({"max_new_tokens": [1, 2]}, "max_new_tokens has 2 values for 1 prompts"),
    ({"max_new_tokens": [None]}, "max_new_tokens=None for prompt 0"),
    ({"max_new_tokens": 10**9}, "exceed max_seq_len=64"),
    ({"max_length": "9", "max_new_tokens": None}, "max_length='9': expected an integer of at least 0"),
    ({"max_length": -9, "max_new_tokens": None}, "max_length=-9"),
    ({"max_length": 1, "max_new_tokens": None}, "max_length=1 leaves no room after a prompt of 2 tokens"),
    ({"min_new_tokens": 5}, "min_new_tokens=5 of prompt 0 is more than max_new_tokens=4"),
    ({"min_length": 9}, "min_new_tokens=7 of prompt 0 is more than max_new_tokens=4"),
    (law(min_new_tokens=5), "min_new_tokens=5 of prompt 0 is more than max_new_tokens=4"),
    ({"min_new_tokens": -1}, "min_new_tokens=-1: expected an integer from 0"),
    ({"min_new_tokens": "a"}, "min_new_tokens='a': expected an integer from 0"),
    ({"min_length": 2.5}, "min_length=2.5"),
    ({"attention_mask": [[1, 1, 1]]}, "attention_mask has rows of [3] values, input_ids of [2]"),
    ({"input_ids": [[1, 1]]}, "input_ids and prompts are both given; give one of the two"),
    # names
    ({"max_tokens": 5}, "max_tokens=5: generate() has no such option: .*; did you mean max_new_tokens?"),
    ({"max_completion_tokens": 5}, "did you mean max_new_tokens?"),
    ({"min_tokens": 5}, "did you mean min_new_tokens?"),
    ({"temperatur": 0.5}, "temperatur=0.5: .*; did you mean temperature?"),
    ({"stop_sequences": ["a"]}, "did you mean stop?"),
    ({"top_P": 0.5}, "did you mean top_p?"),
    ({"ignore_eso": True}, "did you mean ignore_eos?"),
    ({"presence_penalties": 1.0}, "generate() has no such option: .*; did you mean presence_penalty?"),
    ({"inputs": [[5]]}, "inputs=[[5]]: .*; did you mean input_ids?"),
    ({"adapters": "sql"}, "did you mean adapter?"),
    ({"prompt": "a"}, "did you mean prompts?"),
    ({"tokenizer": TOKENIZER, "stop_strings": "a"}, "tokenizer is not supported: attach(..., tokenizer=...) takes it"),
    ({"processor": TOKENIZER}, "generate() has no such option"),
    ({"zzz": None}, "zzz=None: generate() has no such option: expected settings of GenerationConfig"),
    ({"streamer": object()}, "streamer is not supported: use Engine.stream()"),
    ({"num_beams": 4}, "num_beams=4, of this call, would change the text"),
    ({"output_scores": torch.ones(2)}, "output_scores=tensor([1., 1.]), of this call, would change the text"),
    ({"num_beams": np.ones(2)}, "num_beams=array([1., 1.]), of this call, would change the text"),
    ({"logits_processor": [1]}, "logits_processor is not supported"),
    # sampling
    ({"do_sample": "yes"}, "do_sample='yes': expected one of (True, False)"),
    ({"do_sample": 1}, "do_sample=1: expected one of (True, False)"),
    ({"temperature": 0.7}, "temperature=0.7 does nothing with do_sample=False"),
    ({"top_p": 0.9}, "top_p=0.9 does nothing with do_sample=False"),
    ({"top_k": 5}, "top_k=5 does nothing with do_sample=False"),
    ({"min_p": 0.1, "do_sample": False}, "min_p=0.1 does nothing with do_sample=False"),
    ({"temperature": "hot"}, "temperature='hot': expected 0 or a number from 1e-05 to 1e+10"),
    ({"temperature": -1}, "temperature=-1: expected 0 or a number"),
    ({"temperature": NAN}, "temperature=nan"),
    ({"temperature": INF, "do_sample": True}, "temperature=inf"),
    ({"temperature": 1e-9, "do_sample": True}, "temperature=1e-09"),
    ({"temperature": 1e39, "do_sample": True}, "temperature=1e+39"),
    ({"temperature": True}, "temperature=True"),
    ({"temperature": [0.5], "do_sample": True}, "temperature=[0.5]"),
    ({"top_k": -1}, "top_k=-1: expected an integer of at least 0; pass 0 to turn it off"),
    ({"top_k": 1.5}, "top_k=1.5"),
    ({"top_p": 1.5, "do_sample": True}, "top_p=1.5: expected a number from 0 to 1; pass 1.0 to turn it off"),
    ({"top_p": "0.9"}, "top_p='0.9'"),
    ({"min_p": 2}, "min_p=2: expected a number from 0 to 1"),
    ({"repetition_penalty": 0}, "repetition_penalty=0: expected a number from 1e-05"),
    ({"repetition_penalty": 1e-300}, "repetition_penalty=1e-300"),
    ({"presence_penalty": -2.1}, "presence_penalty=-2.1: expected a number from -2 to 2"),
    ({"frequency_penalty": True}, "frequency_penalty=True: expected a number from -2 to 2"),
    ({"no_repeat_ngram_size": 33}, "no_repeat_ngram_size=33: expected an integer from 0 to 32"),
    ({"seed": -1}, "seed=-1: expected an integer of at least 0; pass seed % 2**63"),
    ({"seed": 2**63}, f"seed={2**63}: expected"),
    ({"seed": 0.5}, "seed=0.5: expected"),
    ({"seed": "a"}, "seed='a'"),
    ({"suppress_tokens": "ab"}, "suppress_tokens='ab': expected a list of token ids"),
    ({"suppress_tokens": 3}, "suppress_tokens=3: expected a list of token ids"),
    ({"suppress_tokens": [VOCAB]}, f"hold {VOCAB}; the target's vocabulary has {VOCAB} tokens"),
    ({"begin_suppress_tokens": [3, 4.5]}, "begin_suppress_tokens=[3, 4.5] (item 1 is 4.5): expected"),
    ({"bad_words_ids": [3]}, "bad_words_ids=[3] (item 0 is 3): expected a list of words"),
    ({"bad_words_ids": [[]]}, "bad_words_ids=[[]] (item 0 is []): expected a list of words"),
    ({"bad_words_ids": ["a"]}, "bad_words_ids=['a'] (item 0 is 'a')"),
    ({"logit_bias": {"a": 1.0}}, "logit_bias={'a': 1.0} (item 'a' is 'a'): expected a mapping from token ids"),
    ({"logit_bias": {3: "a"}}, "logit_bias={3: 'a'} (item 3 is 'a')"),
    ({"logit_bias": {3: NAN}}, "logit_bias={3: nan} (item 3 is nan)"),
    ({"logit_bias": {3: INF}}, "logit_bias={3: inf} (item 3 is inf)"),
    ({"logit_bias": {-3: 1}}, "logit_bias={-3: 1} (item -3 is -3)"),
    ({"logit_bias": {True: 1}}, "logit_bias={True: 1} (item True is True)"),
    ({"logit_bias": {VOCAB: 1}}, f"hold {VOCAB}"),
    ({"logit_bias": [1]}, "logit_bias=[1]: expected a mapping from token ids"),
    ({"logit_bias": dict.fromkeys(range(2000), "x")}, "(item 0 is 'x'): expected a mapping"),
    ({"sequence_bias": {(3, 4): 1.0}}, "sequence_bias of [3, 4]: only single tokens can be biased"),
    ({"sequence_bias": {(3,): "a"}}, "sequence_bias={3: 'a'} (item 3 is 'a')"),
    ({"sequence_bias": 5}, "sequence_bias=5: expected a mapping"),
    ({"sequence_bias": [[3], [4]]}, "sequence_bias=[[3], [4]]: expected a mapping"),
    ({"sampling": "greedy"}, "sampling='greedy': expected SamplingParams"),
    ({"sampling": ["greedy"]}, "sampling='greedy': expected SamplingParams"),
    ({"sampling": {"temperature": 1}}, "sampling={'temperature': 1}: expected SamplingParams"),
    ({"sampling": [SamplingParams()] * 2}, "sampling has 2 values for 1 prompts"),
    ({**law(), "temperature": 0.5, "top_k": 3}, "together with temperature, top_k"),
    ({"generation_config": {"top_k": 3}}, "generation_config={'top_k': 3}: expected a transformers GenerationConfig"),
    # ends
    ({"stop": 5}, "stop=5: expected a string or a list of strings"),
    ({"stop": [5]}, "stop=[5]: expected a string or a list of strings"),
    ({"stop": b"a"}, "stop=b'a': expected a string or a list of strings"),
    ({"stop": ""}, "stop='': stop strings must not be empty"),
    ({"stop": ["a", ""]}, "stop=['a', '']: stop strings must not be empty"),
    ({"stop": HALF}, f"stop={HALF!r}: surrogates not allowed"),
    ({"stop_strings": 5}, "stop=5: expected a string"),
    ({"stop": ["a"], "stop_strings": "b"}, "stop=['a'] and stop_strings are both given; give one of the two"),
    ({"stop_token_ids": [2**70]}, "stop_token_ids=["),
    ({"stop_token_ids": [3.0]}, "stop_token_ids=[3.0] (item 0 is 3.0): expected a list of token ids"),
    ({"stop_token_ids": [True]}, "stop_token_ids=[True] (item 0 is True)"),
    ({"stop_token_ids": "5"}, "stop_token_ids='5': expected a list of token ids"),
    ({"stop_token_ids": [-1]}, "stop_token_ids=[-1]"),
    ({"stop_token_ids": 2.5}, "stop_token_ids=2.5: expected a list of token ids"),
    ({"stop_token_ids": [VOCAB]}, f"stop ids hold {VOCAB}"),
    ({"stop_token_ids": list(range(40))}, "40 stop ids (EOS included): at most 16"),
    ({"eos_token_id": "x"}, "eos_token_id='x': expected a list of token ids"),
    ({"eos_token_id": [[3]]}, "eos_token_id=[[3]] (item 0 is [3])"),
    ({"ignore_eos": "no"}, "ignore_eos='no': expected one of (True, False)"),
    ({"ignore_eos": None}, "ignore_eos=None: expected one of (True, False)"),
]
CASES = [(prompts, {}, says) for prompts, says in PROMPTS] + [([[3, 4]], options, says) for options, says in OPTIONS]


@pytest.fixture(scope="module")
def engine():
    engine = specdec.attach(tiny_model("llama"), tokenizer=TOKENIZER, max_seq_len=64, max_batch=2)
    engine.expected = engine.generate([[3, 4]], max_new_tokens=2).tokens
    yield engine
    engine.detach()


@pytest.mark.parametrize(("prompts", "options", "says"), CASES, ids=[f"{i}" for i in range(len(CASES))])
def test_it_is_named_and_nothing_is_left(engine, prompts, options, says):
    with pytest.raises(ValueError) as refused:
        engine.generate(prompts, **{"max_new_tokens": 4, **options})
    assert re.search(".*".join(map(re.escape, says.split(".*"))), str(refused.value)), refused.value
    assert len(str(refused.value)) < 1000
    core = engine._core
    assert not core.scheduler.waiting and not core.scheduler.running
    engine.check_integrity()
    assert engine.generate([[3, 4]], max_new_tokens=2).tokens == engine.expected


def test_requests_that_cannot_be_packed_end_and_the_next_are_served(engine, monkeypatch):
    def broken(requests):
        raise OverflowError("too large")

    with monkeypatch.context() as patched:
        patched.setattr("specdec.core.engine.launcher.pack_requests", broken)
        (request,) = engine.submit([[3, 4]], max_new_tokens=2)
        engine.step()
    assert isinstance(request.failure, OverflowError) and request.finish_reason == "error"
    assert engine.generate([[3, 4]], max_new_tokens=2).tokens == engine.expected
