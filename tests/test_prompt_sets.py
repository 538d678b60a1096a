"""Prompt sets by name: layouts of other benchmarks, and messages for wrong files."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from specdec.core.text.prompt_sets import PLACEHOLDER, read_file, read_set
from specdec.core.text.prompts import ids_sha, read_questions, template_sha, thinking_of

TWO = {"question_id": 81, "category": "writing", "turns": ["one", "two"]}
# set -> (file, lines, turns and category of each)
SETS = {
    "gsm8k": ("gsm8k/test.jsonl", [{"question": "1+1?", "answer": "#### 2"}], [(("1+1?",), None)]),
    "mt_bench": ("prompts/mt_bench.jsonl", [TWO], [(("one", "two"), "writing")]),
    "humaneval": ("HumanEval.jsonl", [{"task_id": "x", "prompt": "def f():"}], [(("def f():",), None)]),
    "spec_bench": (
        "question.jsonl",
        [TWO, {"question_id": 1, "category": "qa", "turns": ["why\u2028so"]}],
        [(("one", "two"), "writing"), (("why\u2028so",), "qa")],
    ),
    "speed_bench": (
        "speed_bench/qualitative.jsonl",
        [
            {"question_id": "a", "category": "coding", "turns": ["x", "y", "z"], "multiturn": True},
            {"category": "math", "messages": [{"role": "user", "content": "m"}, {"role": "user", "content": "n"}]},
        ],
        [(("x", "y", "z"), "coding"), (("m", "n"), "math")],
    ),
}


def write(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records), "utf-8")
    return path


@pytest.mark.parametrize("name", SETS)
def test_layouts(name, tmp_path):
    file, lines, expected = SETS[name]
    write(tmp_path / file, *lines)
    found = read_set(name, tmp_path)
    assert [(q.turns, q.category) for q in found] == expected
    assert found[0].record == lines[0]
    assert len(read_set(name, tmp_path, 1)) == 1


def test_sharegpt_is_a_list_or_lines(tmp_path):
    said = [
        {"id": "a", "conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "yes?"}]},
        {"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "u"}]},
    ]
    (tmp_path / "sharegpt.json").write_text(json.dumps(said))
    write(tmp_path / "lines" / "sharegpt.jsonl", *said)
    for folder in (tmp_path, tmp_path / "lines"):
        assert [q.turns for q in read_set("sharegpt", folder)] == [("hi",), ("u",)]
    (tmp_path / "sharegpt.json").write_text(json.dumps([*said, {"conversations": [{"from": "gpt", "value": "x"}]}]))
    with pytest.raises(ValueError, match=r"sharegpt\.json, item 3: not a prompt .*; expected a JSON list"):
        read_set("sharegpt", tmp_path)


@pytest.mark.parametrize(
    ("name", "record", "message"),
    [
        ("mt_bench", {"turns": ["one"]}, r"question\.jsonl:2: not a prompt .*; expected JSON lines with `turns`"),
        ("spec_bench", {"turns": ["one"]}, r"question\.jsonl:2: .*expected JSON lines with `question_id`, `category`"),
        ("spec_bench", {"category": "qa", "turns": [3]}, r"question\.jsonl:2: "),
        ("spec_bench", {"category": "qa", "turns": []}, r"question\.jsonl:2: "),
        ("spec_bench", {"category": "qa", "turns": "one"}, r"question\.jsonl:2: "),
        ("spec_bench", ["one"], r"question\.jsonl:2: not a prompt \(\['one'\]\)"),
        ("mt_bench", {"turns": ["one", " "]}, r":2: not a prompt \(a turn is empty or no text: \['one', ' '\]\)"),
    ],
)
def test_a_wrong_line_is_named(name, record, message, tmp_path):
    write(tmp_path / "question.jsonl", TWO, record)
    with pytest.raises(ValueError, match=message):
        read_set(name, tmp_path)


def test_a_wrong_folder_name_or_file(tmp_path):
    with pytest.raises(ValueError, match=r"prompt set 'gsm8k': none of its files in .*gsm8k/test\.jsonl, gsm8k\.jsonl"):
        read_set("gsm8k", tmp_path)
    with pytest.raises(ValueError, match=r"prompt set 'alpaca': expected one of \['gsm8k', 'humaneval', "):
        read_set("alpaca", tmp_path)
    (tmp_path / "gsm8k.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl' holds no prompts; expected JSON lines with `question`"):
        read_set("gsm8k", tmp_path)
    for line in ("{", f'{{"question": "a", "id": {"1" * 5000}}}'):  # Python refuses integers of so many digits
        (tmp_path / "gsm8k.jsonl").write_text('{"question": "a"}\n' + line)
        with pytest.raises(ValueError, match=r"gsm8k\.jsonl:2: not JSON"):
            read_set("gsm8k", tmp_path)


def test_texts_that_were_left_out_are_no_prompts(tmp_path):
    write(tmp_path / "qualitative.jsonl", {"category": "qa", "turns": [f"{PLACEHOLDER} USING SPECDEC_BENCH"]})
    with pytest.raises(ValueError, match=r"qualitative\.jsonl:1: its text was left out .*after its prepare\.py"):
        read_set("speed_bench", tmp_path)


def test_files_give_first_turns_and_categories(tmp_path):
    file = write(tmp_path / "own.jsonl", TWO, {"question": "q"}, {"prompt": "p"})
    assert [(q.turns, q.category) for q in read_file(file)] == [(("one",), "writing"), (("q",), None), (("p",), None)]
    assert read_questions(file, 2) == ["one", "q"]


def test_fingerprints():
    assert ids_sha([[1, 2], [3]]) == ids_sha([(1, 2), (3,)]) != ids_sha([[1], [2, 3]])
    assert len(ids_sha([[1]])) == 16
    plain, thinking = (SimpleNamespace(chat_template=t) for t in ("{{ m }}", "{% if enable_thinking %}"))
    assert template_sha(plain) != template_sha(thinking) and template_sha(SimpleNamespace()) is template_sha(None)
    assert thinking_of(plain) == thinking_of(None) == "not applicable" and "not passed" in thinking_of(thinking)
