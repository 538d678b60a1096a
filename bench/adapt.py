"""Adapts a draft to a fine-tuned target: `PYTHONPATH=. python bench/adapt.py --gsm8k TRAIN.jsonl --out DIR`.

A LoRA teaches the target another style: its own greedy answers to questions, in capitals. Merged, it is the model that
the draft was not trained for. `specdec train adapt` then gets its minutes and the questions that the LoRA was not
trained on, and reports tau on held-out answers before and after. The last line is one JSON object.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model

from specdec import attach, shipped
from specdec.core.text.prompts import chat_ids, read_questions
from specdec.reach.targets.pretrained import BUNDLED
from specdec.tools.measure.results import write_results
from specdec.tools.train.adapt import adapt
from specdec.tools.train.target import load

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
RANK, RATE, BATCH = 32, 1e-3, 32


def main() -> None:
    """Fine-tune, adapt, and report."""
    args = arguments()
    questions = args.out / "questions.jsonl"
    lines = args.gsm8k.read_text("utf-8").splitlines()
    args.out.mkdir(parents=True, exist_ok=True)
    questions.write_text("\n".join(lines[args.texts :]), "utf-8")
    target = str(args.out / "target")
    loss = fine_tune(args, target)
    facts = adapt(target, args.draft, args.out / "draft", prompts=questions, minutes=args.minutes)
    gain = (facts["tau"] - 1) / (facts["tau_before"] - 1)
    row = {"what": "adapt", "minutes": args.minutes, "loss_of_the_lora": loss, "gain_of_accepted": round(gain, 3)}
    row |= {name: facts[name] for name in ("tau_before", "tau", "accept_at", "sequences", "corpus_tokens", "tokens")}
    row["gain"] = round(facts["tau"] / facts["tau_before"] - 1, 3)
    write_results(args.out, "adapt", "135m", {**vars(args), "out": None}, [row])
    print(json.dumps({"rows": [row]}))


def fine_tune(args: argparse.Namespace, folder: str) -> float:
    """Write the target with a LoRA of another style merged to `folder`; return the loss of the last texts."""
    model, tokenizer = load(BUNDLED, "auto", args.device)
    texts = in_capitals(model, tokenizer, chat_ids(read_questions(args.gsm8k, args.texts), tokenizer))
    for weight in model.parameters():
        weight.requires_grad_(False)
    model.train()
    adapted: Any = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=RANK, target_modules=LAYERS))
    trained = [p for p in adapted.parameters() if p.requires_grad]
    optimizer, loss = torch.optim.AdamW(trained, lr=RATE), 0.0
    for step in range(args.steps):
        part = [texts[i % len(texts)] for i in range(step * BATCH, (step + 1) * BATCH)]
        width = max(len(prompt) + len(answer) for prompt, answer in part)
        ids = torch.zeros(len(part), width, dtype=torch.int64)
        labels = torch.full_like(ids, -100)
        for i, (prompt, answer) in enumerate(part):
            ids[i, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
            labels[i, len(prompt) : len(prompt) + len(answer)] = torch.tensor(answer)
        result = adapted(input_ids=ids.to(model.device), labels=labels.to(model.device))
        result.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 20 == 0:
            loss = float(result.loss)
            print(f"step {step + 1} loss {loss:.3f}", flush=True)
    merged = adapted.merge_and_unload().eval()
    merged.hf_quantizer = None  # the weights are no GGUF's any more
    del merged.config.quantization_config
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return round(loss, 3)


def in_capitals(model: Any, tokenizer: Any, prompts: list[list[int]]) -> list[tuple[list[int], list[int]]]:
    """Return prompts with the model's greedy answers in capitals."""
    with attach(model, None, algo=None, max_batch=min(256, len(prompts)), max_seq_len=768) as engine:
        said = engine.generate(prompts, max_new_tokens=192, do_sample=False).tokens
    end = [tokenizer.eos_token_id]
    answers = [tokenizer.decode(tokens, skip_special_tokens=True).upper() for tokens in said]
    encoded = [tokenizer.encode(answer, add_special_tokens=False) + end for answer in answers]
    return list(zip(prompts, encoded, strict=True))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gsm8k", type=Path, required=True, help="GSM8K's train.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder for the target, the draft and the result file")
    parser.add_argument("--draft", default=str(shipped.path()), help="folder of the draft")
    parser.add_argument("--texts", type=int, default=2048, help="questions that the LoRA is trained on")
    parser.add_argument("--steps", type=int, default=200, help="updates of the LoRA")
    parser.add_argument("--minutes", type=float, default=5.0, help="for adapt")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
