"""Every way in, held against transformers' own loop: `PYTHONPATH=. python bench/doors.py --out DIR`.

Each row is a call through a door (`engine.install()`, a decoding loop or a head's folder as `custom_generate`,
pipelines, streamers, lm-eval's HFLM and our lm-eval model, TRL's GRPOTrainer, the server) and ends as "equal" (tokens,
texts, likelihoods within 1e-3, scores within 2e-4), "refused" with its message, or "differs", which makes the exit
status 1. "not installed" rows say so. Cases of arguments run on a tiny random Llama (those of tests/test_doors.py), the
others on SmolLM2 with its EAGLE-3 head. The last line is one JSON object.
"""

import argparse
import copy
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import StoppingCriteriaList, TextIteratorStreamer, TextStreamer, pipeline

import specdec
from specdec import shipped
from specdec.custom_generate import engine_of
from specdec.measure.results import write_results
from specdec.targets.pretrained import load_pretrained
from tests import test_doors as cases
from tests.heads import random_draft
from tests.tiny_models import tiny_model

QUESTIONS = ["The capital of France is", "Two plus two is", "Name three rivers of Europe:"]
Row = tuple[str, str, Callable[[], bool]]  # door, case, whether both agree; ValueError: refused


def main() -> None:
    """Run all cases, print a table, exit 1 if one differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None, help="folder for the result file")
    args = parser.parse_args()
    rows = [outcome(*row) for row in chain(tiny_rows(), real_rows())]  # one after the other: engines come and go
    table = Table("door", "case", "outcome")
    for row in rows:
        table.add_row(row["door"], row["case"], row["outcome"][:90])
    Console(width=150).print(table)
    if args.out:
        write_results(args.out, "doors", "tiny-135m", {}, rows)
    differs = [row for row in rows if row["outcome"].startswith("differs")]
    print(json.dumps({"cases": len(rows), "differs": differs}))
    sys.exit(1 if differs else 0)


def outcome(door: str, case: str, agrees: Callable[[], bool]) -> dict[str, str]:
    """Run one case."""
    try:
        said = "equal" if agrees() else "differs"
    except ModuleNotFoundError as error:
        said = f"not installed: {error.name}"
    except ValueError as error:
        said = f"refused: {error}"
    except Exception as error:
        said = f"differs: {type(error).__name__}: {error}"
    print(f"{door}, {case}: {said[:120]}", file=sys.stderr)
    return {"door": door, "case": case, "outcome": said}


def tiny_rows() -> Iterator[Row]:
    """Arguments of `generate`, on a tiny model."""
    model = tiny_model("llama")
    model.generation_config.eos_token_id = int(cases.plain(model, torch.tensor([[5, 6, 7]]), max_new_tokens=12)[0, 9])
    model.generation_config.pad_token_id = cases.PAD
    draft = random_draft(model, "eagle3")
    engine = specdec.attach(model, draft, max_batch=4, max_seq_len=160, num_steps=3)

    def both(door: str, *args: Any, **options: Any) -> bool:
        theirs = cases.plain(model, *args, **copy.deepcopy(options))
        if door == "install":
            with engine.install():
                ours = model.generate(*args, **options)
        else:
            ours = model.generate(*args, **options, custom_generate=engine.as_generate())
        return same(ours, theirs)

    def as_if_left(right: Any, left: Any) -> bool:
        """transformers goes on after the padding, with a warning; the engine after each prompt's own end."""
        with engine.install():
            ours = model.generate(*right[0], **right[1])
        theirs = cases.plain(model, *left[0], **left[1])
        ours, theirs = (getattr(result, "sequences", result) for result in (ours, theirs))
        return torch.equal(ours[:, 5:], theirs[:, 5:])

    every = {**cases.CASES, **cases.ALONE}
    one = {"input_ids": torch.tensor([[5, 6, 7]]), "attention_mask": torch.ones(1, 3, dtype=torch.long)}
    for door, names in (("install", tuple(every)), ("custom_generate", cases.AS_LOOP)):
        for name in names:
            args, options = cases.arguments(every[name], cases.padded() if name in cases.CASES else one)
            yield (
                door,
                f"{name}, left-padded" * (name in cases.CASES) or name,
                lambda d=door, a=args, o=options: both(d, *a, **o),
            )
    for name in ("greedy", "several EOS", "min_new_tokens", "return_dict", "no EOS"):
        right, left = (cases.arguments(every[name], cases.padded(side)) for side in ("right", "left"))
        yield "install", f"{name}, right-padded", lambda r=right, n=left: as_if_left(r, n)
    extra = {
        "scores": {"output_scores": True, "return_dict_in_generate": True},
        "logits": {"output_logits": True, "return_dict_in_generate": True, "min_new_tokens": 9},
        "stopping criterion": {"stopping_criteria": StoppingCriteriaList([cases.StopAt(44)])},
        "criterion with state": {"stopping_criteria": StoppingCriteriaList([cases.AllRowsAt(44, 3)])},
    }
    for name, options in extra.items():
        yield "install", name, lambda o=options: both("install", **cases.padded(), max_new_tokens=14, **o)
    for name, (changes, _message) in cases.REFUSED.items():
        options = {**cases.padded(), "max_new_tokens": 6, **changes}
        yield "install", name, lambda o=options: both("install", **o)
    yield "install", "assistant_model", lambda: both("install", **one, assistant_model=tiny_model("llama", 1))


def same(ours: Any, theirs: Any) -> bool:
    """Whether two results of `generate` agree."""
    if torch.is_tensor(theirs):
        return torch.equal(ours, theirs)
    close = all(
        torch.allclose(torch.stack(getattr(ours, name)), torch.stack(getattr(theirs, name)), atol=2e-4, rtol=1e-4)
        for name in ("scores", "logits")
        if getattr(theirs, name, None) is not None
    )
    return close and torch.equal(ours.sequences, theirs.sequences)


def real_rows() -> Iterator[Row]:
    """Pipelines, streamers, folders, evaluation, training and the server, on SmolLM2."""
    model, tokenizer = load_pretrained()
    tokenizer.padding_side, tokenizer.pad_token = "left", tokenizer.eos_token
    engine = specdec.attach(model, shipped.path(), tokenizer=tokenizer, num_steps=2, max_batch=8, max_seq_len=512)

    def installed(call: Callable[[], Any]) -> bool:
        theirs = call()
        with engine.install():
            return bool(call() == theirs)

    pipe = pipeline("text-generation", model=model, tokenizer=tokenizer)
    greedy = {"max_new_tokens": 12, "do_sample": False}
    chats = [[{"role": "user", "content": q}] for q in QUESTIONS]
    yield "pipeline", "text", lambda: installed(lambda: pipe(QUESTIONS[0], **greedy))
    yield "pipeline", "batch of 3", lambda: installed(lambda: pipe(QUESTIONS, batch_size=3, **greedy))
    yield "pipeline", "chats, new text only", lambda: installed(lambda: pipe(chats, return_full_text=False, **greedy))
    inputs = tokenizer(QUESTIONS[2], return_tensors="pt")
    yield "streamer", "TextIteratorStreamer", lambda: installed(lambda: streamed(model, tokenizer, inputs))
    yield "streamer", "TextStreamer", lambda: installed(lambda: printed(model, tokenizer, inputs))
    stop = {"stop_strings": [","], "tokenizer": tokenizer}
    yield "install", "stop_strings", lambda: installed(lambda: model.generate(**inputs, **greedy, **stop).tolist())

    batch = tokenizer(QUESTIONS, return_tensors="pt", padding=True)
    folder = {"custom_generate": str(shipped.path()), "trust_remote_code": True}
    engine.detach()
    for name, given in (("one prompt", inputs), ("left-padded", batch)):
        want = model.generate(**given, **greedy)
        yield "head's folder", name, lambda g=given, w=want: torch.equal(model.generate(**g, **greedy, **folder), w)
    if engine_of(model) is not None:
        engine_of(model).detach()

    engine = specdec.attach(model, shipped.path(), tokenizer=tokenizer, num_steps=2, max_batch=8, max_seq_len=512)
    yield "lm-eval HFLM", "generate_until", lambda: installed(lambda: harness(model, tokenizer)[0])
    yield (
        "lm-eval specdec",
        "generate_until",
        lambda: harness(model, tokenizer)[0] == harness(model, tokenizer, engine)[0],
    )
    yield (
        "lm-eval specdec",
        "loglikelihood",
        lambda: all(
            abs(a - b) < 1e-3 and x == y
            for (a, x), (b, y) in zip(harness(model, tokenizer)[1], harness(model, tokenizer, engine)[1], strict=True)
        ),
    )
    yield (
        "TRL",
        "GRPOTrainer, greedy, first step",
        lambda: trained(model, tokenizer, None) == trained(model, tokenizer, engine),
    )
    whole = [text.strip() for text in engine.generate(chats, max_new_tokens=12).texts]
    for name in ("chat", "chat, streamed", "chats of many clients"):
        yield "serve", name, lambda n=name: served(engine, chats, n) == (whole if n.startswith("chats") else whole[:1])


def streamed(model: Any, tokenizer: Any, inputs: Any) -> str:
    """Text of a streamer that another thread reads."""
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    options = {**inputs, "max_new_tokens": 12, "do_sample": False, "streamer": streamer}
    thread = threading.Thread(target=model.generate, kwargs=options)
    thread.start()
    text = "".join(streamer)
    thread.join()
    return text


def printed(model: Any, tokenizer: Any, inputs: Any) -> str:
    """What a TextStreamer would print."""
    pieces: list[str] = []
    streamer = TextStreamer(tokenizer)
    streamer.on_finalized_text = lambda text, stream_end=False: pieces.append(text)
    model.generate(**inputs, max_new_tokens=12, do_sample=False, streamer=streamer)
    return "".join(pieces)


def harness(model: Any, tokenizer: Any, engine: Any = None) -> tuple[list[str], list[tuple[float, bool]]]:
    """Texts and likelihoods of lm-eval's HFLM, or of our model for it."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    if engine is None:
        lm = HFLM(model, tokenizer=tokenizer, batch_size=2)
    else:
        from specdec.doors.evaluation import EngineLM

        lm = EngineLM(engine)
    until = [
        Instance("generate_until", {}, (q, {"until": ["\n"], "max_gen_toks": 10}), i) for i, q in enumerate(QUESTIONS)
    ]
    likely = [Instance("loglikelihood", {}, (q, " Paris."), i) for i, q in enumerate(QUESTIONS)]
    return lm.generate_until(until, disable_tqdm=True), lm.loglikelihood(likely, disable_tqdm=True)


def trained(model: Any, tokenizer: Any, engine: Any) -> list[str]:
    """Completions of the first step of a GRPO run, greedy; with an engine it generates them."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    model.is_quantized = False  # it came from a GGUF file, dequantised
    vars(model).pop("hf_quantizer", None)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[str] = []

    def reward(completions: list[Any], **_: Any) -> list[float]:
        seen.extend(c[0]["content"] for c in completions)
        return [float(len(c[0]["content"])) for c in completions]

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": q}]} for q in QUESTIONS[:1]])
    with tempfile.TemporaryDirectory() as folder:
        options = GRPOConfig(
            output_dir=folder, max_steps=1, per_device_train_batch_size=2, num_generations=2, report_to=[],
            max_completion_length=12, use_cpu=True, bf16=False, gradient_checkpointing=False, save_strategy="no",
            generation_kwargs={"do_sample": False, "temperature": None, "top_p": None, "top_k": None},
        )  # fmt: skip
        trainer = GRPOTrainer(model, reward, args=options, train_dataset=data, processing_class=tokenizer)
        if engine:
            with engine.install():
                trainer.train()
        else:
            trainer.train()
    model.load_state_dict(before)
    model.eval()
    return seen


def served(engine: Any, chats: list[Any], how: str) -> list[str]:
    """Answers of the server to the real client."""
    import openai
    import uvicorn

    from specdec.serve.server import build_app

    server = uvicorn.Server(uvicorn.Config(build_app(engine, "smollm2"), port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    port = server.servers[0].sockets[0].getsockname()[1]
    client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-")

    def ask(chat: Any, stream: bool) -> str:
        answer = client.chat.completions.create(model="smollm2", messages=chat, max_tokens=12, stream=stream)
        if not stream:
            return answer.choices[0].message.content.strip()
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer).strip()

    try:
        if not how.startswith("chats"):
            return [ask(chats[0], "streamed" in how)]
        answers = [""] * len(chats)

        def client_thread(i: int) -> None:
            answers[i] = ask(chats[i], True)

        threads = [threading.Thread(target=client_thread, args=(i,)) for i in range(len(chats))]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return answers
    finally:
        server.should_exit = True
        thread.join()


if __name__ == "__main__":
    main()
