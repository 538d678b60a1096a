"""Chats with images: through a processor, and over HTTP, where nothing is fetched and limits apply."""

import base64
import io

import pytest
import torch
from PIL import Image, ImageOps
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava.processing_llava import LlavaProcessor

import specdec
from specdec.reach.targets.pretrained import load_pretrained, read_processor
from specdec.tools.serve import images as limits
from tests.image_models import IMAGE, greedy, image_model
from tests.test_serve import serving

TEMPLATE = (
    "{% for m in messages %}{% for part in m['content'] %}{{ ' <image> ' if part.type == 'image' else part.text }}"
    "{% endfor %} {% endfor %}w9"
)
ON = {"max_batch": 4, "max_seq_len": 100, "algo": "lookup", "num_steps": 2}


@pytest.fixture(scope="module")
def model():
    return image_model("llava")


@pytest.fixture(scope="module")
def processor():
    return make_processor()


def make_processor(**tokens):
    vocab = {**{f"w{i}": i for i in range(150)}, "<image>": IMAGE}
    words = Tokenizer(WordLevel(vocab, unk_token="w3"))
    words.pre_tokenizer = WhitespaceSplit()
    if tokens:
        words.post_processor = TemplateProcessing(single="w1 $A", special_tokens=[("w1", 1)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, **tokens, extra_special_tokens={"image_token": "<image>"}
    )
    sizes = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
    options = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return LlavaProcessor(LlavaImageProcessorPil(**sizes), tokenizer, **options, chat_template=TEMPLATE)


def picture(seed, size=(40, 33)):
    random = torch.Generator().manual_seed(seed)
    return Image.fromarray(torch.randint(0, 255, (size[1], size[0], 3), generator=random, dtype=torch.uint8).numpy())


def data_url(image, kind="PNG"):
    file = io.BytesIO()
    image.save(file, kind)
    return f"data:image/{kind.lower()};base64,{base64.b64encode(file.getvalue()).decode()}"


def chat(*images, text="w7 w8"):
    return [{"role": "user", "content": [*images, {"type": "text", "text": text}]}]


def expected_of(model, processor, *messages):
    rows = []
    for one in messages:
        inputs = processor.apply_chat_template(
            one, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        rows += greedy(model, inputs)
    return rows


def test_chats_with_images_are_those_of_the_processor(model, processor):
    first, second = picture(0), picture(1)
    chats = [chat({"type": "image", "image": first}), chat(), chat({"type": "image", "image": second}, text="w20")]
    url = chat({"type": "image_url", "image_url": {"url": data_url(first)}})
    expected = expected_of(model, processor, *chats)
    options = {"max_new_tokens": 8, "ignore_eos": True, "do_sample": False}
    with specdec.attach(model, tokenizer=processor, **ON) as engine:
        out = engine.generate([*chats, url], **options)
        assert out.tokens == [*expected, expected[0]] and out.texts[1] == processor.tokenizer.decode(expected[1])
        assert url[0]["content"][0]["type"] == "image_url"  # the caller's object is unchanged
        assert engine.generate(chats[0], **options).tokens == expected[:1]
        assert "".join(engine.stream(chats[0], **options)) == out.texts[0]
        with pytest.raises(ValueError, match="prompt 0: messages: the processor refuses them"):
            engine.generate(chat({"type": "image", "path": "/nowhere.png"}))
        with pytest.raises(ValueError, match=r"messages\[0\].content\[1\].type='video'"):
            engine.generate(chat({"type": "image", "image": first}, {"type": "video"}))
    refused = pytest.raises(ValueError, match="only parts of type 'text' are read; images need attach")
    with specdec.attach(model, tokenizer=processor.tokenizer, **ON) as engine, refused:
        engine.generate(chats[0])


def test_templates_that_write_parts_only_get_the_text_without_a_processor_too(model, processor):
    processor.tokenizer.chat_template = TEMPLATE
    with specdec.attach(model, tokenizer=processor.tokenizer, **ON) as engine:
        (request,) = engine.generate([{"role": "user", "content": "w7 w8"}], max_new_tokens=2).requests
        assert request.prompt_ids == [7, 8, 9]


def test_scores_read_chats_as_generate_does(model):
    """With the processor's template: its tokenizer may have none."""
    with specdec.attach(model, tokenizer=make_processor(), **ON) as engine:
        (of_chat,), (of_ids,) = (engine.score(prompt, ["w20 w21"]) for prompt in (chat(), [7, 8, 9]))
        assert of_chat == of_ids
        with pytest.raises(ValueError, match="pixel_values: the engine reads only text"):
            engine.score(chat({"type": "image", "image": picture(0)}), [[5]])


def test_a_server_turns_images_upright_and_adds_what_the_processor_adds(model):
    """By EXIF, as in transformers' own loader; a BOS token that the template does not write."""
    processor, exif, file = make_processor(bos_token="w1"), Image.Exif(), io.BytesIO()
    exif[0x0112] = 6
    picture(4).save(file, "PNG", exif=exif)
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    chats = chat({"type": "image_url", "image_url": {"url": url}}), chat()
    expected = expected_of(
        model, processor, chat({"type": "image", "image": picture(4).rotate(-90, expand=True)}), chat()
    )
    with specdec.attach(model, tokenizer=processor, **ON) as engine, serving(engine) as served:
        for messages, tokens in zip(chats, expected, strict=True):
            answer = served.post({"messages": messages, "max_tokens": 8, "ignore_eos": True}).json()
            assert answer["choices"][0]["message"]["content"] == processor.tokenizer.decode(tokens)


def test_folders_are_loaded_with_their_processor(model, processor, tmp_path):
    model.save_pretrained(tmp_path)
    processor.save_pretrained(tmp_path)
    loaded, tokenizer = load_pretrained(tmp_path)
    assert type(loaded) is type(model) and tokenizer.image_token == "<image>"
    assert type(read_processor(tmp_path, loaded)) is LlavaProcessor
    (tmp_path / "processor_config.json").write_text("[]")
    with pytest.warns(UserWarning, match="images are not supported: its processor cannot be loaded"):
        assert read_processor(tmp_path, loaded) is None


def test_a_server_reads_data_urls_within_limits(model, processor, monkeypatch, tmp_path):
    def part(url):
        return {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}

    image = picture(2)
    (expected,) = expected_of(model, processor, chat({"type": "image", "image": image}))
    text = processor.tokenizer.decode(expected)
    body = {"max_tokens": 8, "ignore_eos": True}
    monkeypatch.setattr(limits, "MOST_PIXELS", 10_000)
    log = (tmp_path / "log").open("w")
    with log, specdec.attach(model, tokenizer=processor, **ON) as engine, serving(engine, log=log) as served:
        answer = served.post({**body, "messages": chat(part(data_url(image))), "n": 2}).json()
        assert [choice["message"]["content"] for choice in answer["choices"]] == [text] * 2
        plain = served.post({**body, "messages": [{"role": "user", "content": "w7 w8"}]}).json()
        assert (
            plain["choices"][0]["message"]["content"]
            == engine.generate(chat(), max_new_tokens=8, ignore_eos=True).texts[0]
        )
        for images, told in (
            ([part("https://host/cat.png")], "'url': 'https://host/cat.png'}: this server fetches no URLs"),
            ([part("file:///etc/passwd")], "this server fetches no URLs"),
            ([part("data:image/png,abc")], "expected base64"),
            ([part("data:image/png;base64,???")], "no image of a known kind"),
            ([part("data:image/png;base64,aGVsbG8=")], "no image of a known kind"),
            ([part(data_url(image, "BMP"))], "no image of a known kind"),
            ([part(data_url(picture(3, (101, 100))))], "101 x 100: a request has at most 10000 pixels"),
            ([part(data_url(picture(3, (80, 80))))] * 2, "messages[0].content[1].image_url: 80 x 80"),
            ([part(data_url(picture(3, (1, 51))))], "1 x 51: "),
            ([part(data_url(image))] * 17, "17 images: expected at least 0 and at most 16"),
            ([{"type": "image_url"}], "messages[0].content[0].image_url=None"),
            ([{"type": "input_audio"}], "messages[0].content[0].type='input_audio'"),
        ):
            refused = served.post({**body, "messages": chat(*images)})
            assert refused.status_code == 400 and told in refused.json()["error"]["message"], refused.text
        monkeypatch.setattr(ImageOps, "exif_transpose", lambda image: image.getpixel(None))  # as broken EXIF may raise
        refused = served.post({**body, "messages": chat(part(data_url(image)))})
        assert refused.status_code == 400 and "no image of a known kind" in refused.json()["error"]["message"]
        served.assert_free()
    assert len((tmp_path / "log").read_text().splitlines()) == 1, "ids alone say nothing of images"
