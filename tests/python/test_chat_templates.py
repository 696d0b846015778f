"""Compares the prompts that `kvlab task` makes for chat models with those of transformers.

tests/data/chat_templates.json holds a template of each family that kvlab recognizes, and the text
before and after a user's message. The C++ tests check that kvlab finds this text.
"""

import json
from pathlib import Path

import pytest

TEMPLATES = json.loads(
    (Path(__file__).parents[1] / "data" / "chat_templates.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("known", TEMPLATES, ids=lambda known: known["name"])
def test_frame_is_that_of_transformers(known):
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")
    empty = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=empty, bos_token=known["bos"], eos_token="</s>")
    tokenizer.chat_template = known["template"]
    question = "What is in the list?\n1. A word."
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}], tokenize=False, add_generation_prompt=True)
    assert text == known["before"] + question + known["after"]
