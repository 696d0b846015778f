"""What a call of a transformers model brings: its cache, and whether it is one sequence that goes on."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers

from kvlab.hf.refused import Refused

# What a decoder may be given; all else has to be None or False. The cache is told by what it can do.
_KNOWN = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "token_type_ids")
    + ("use_cache", "output_hidden_states", "return_dict")
)


def cache_word(model: Any) -> str:
    """What its forward calls the cache: past_key_values, since transformers 5.24 cache."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_among(values: Iterable[Any]) -> Any:
    """What takes keys and values and counts their tokens, whatever its keyword; None where nothing does."""
    return next((one for one in values if hasattr(one, "get_seq_length") and hasattr(one, "update")), None)


def count_in(past: Any, count: int, like: torch.Tensor) -> None:
    """Transformers counts the tokens of its cache, which gets as many zeros."""
    before, zeros = past.get_seq_length(), like.new_zeros(1, 1, count, 1)
    past.update(zeros, zeros, 0)
    if past.get_seq_length() != before + count:
        raise Refused(f"evicting: the call's {type(past).__name__} of {before} tokens has not counted {count} more")


def few_logits(model: Any) -> torch.Tensor:
    """[4, vocabulary] float32: of a prompt's last token and of three decoded ones."""
    ids = torch.arange(1, 10, device=model.device)[None] * 7 % model.config.vocab_size
    words = {cache_word(model): transformers.DynamicCache(), "use_cache": True, "return_dict": True}
    with torch.no_grad():
        return torch.cat([model(part, **words).logits[0, -1:].float() for part in ids.tensor_split((6, 7, 8), 1)])


class Calls:
    """Looks at the calls of a decoder. A decoded token's mask and positions on a device are looked at by end()."""

    def __init__(self, decoder: Any) -> None:
        self._names = list(inspect.signature(decoder.forward).parameters)
        self._config = decoder.config
        self._wrong: torch.Tensor | None = None  # on the device: whether a decoded token's were

    def look(self, arguments: tuple[Any, ...], words: Mapping[str, Any]) -> None:
        """Refuses whatever caches of one sequence do not do."""
        given = {"output_attentions": getattr(self._config, "output_attentions", None)} | dict(words)
        given |= dict(zip(self._names, arguments))
        rows = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if rows is None:
            return  # of which transformers complains
        if rows.ndim < 2 or rows.shape[0] != 1:
            raise Refused(f"evicting: a batch of {rows.shape[0]}; one sequence at a time is supported")
        past = cache_among(given.values())
        if past is not None and (type(past) is not transformers.DynamicCache or getattr(past, "offloading", False)):
            raise Refused(f"evicting: the call's cache is a {type(past).__name__}; a plain DynamicCache is expected")
        older = given.get("past_key_values")  # of transformers before 4.48: tuples, which it makes a cache of
        start = older[0][0].shape[-2] if isinstance(older, tuple) and older else past.get_seq_length() if past is not None else 0
        for name, value in given.items():
            if name not in _KNOWN and all(value is not fine for fine in (None, False, past, older)):
                raise Refused(f"evicting: {name} is given; the caches know {', '.join(sorted(_KNOWN))}")
        end = start + int(rows.shape[1])
        later = end - start == 1 and rows.device.type != "cpu"  # where to look means to wait
        if not later:
            self.end()
        mask = f"none, or [1, {end}] without padding, is expected"
        self._expect("attention_mask", given, [(1, end)], lambda mask: mask.bool(), "leaves tokens out", mask, later)
        shapes, numbers = [(end - start,), (1, end - start)], f"{start} to {end - 1}, by one, is expected"
        for name in ("position_ids", "cache_position"):
            counted = lambda at: at == torch.arange(start, end, device=at.device)  # noqa: E731
            self._expect(name, given, shapes, counted, "jumps", numbers, later)

    def end(self) -> None:
        wrong, self._wrong = self._wrong, None
        if wrong is not None and bool(wrong):
            what = "an attention_mask that leaves tokens out, or position_ids that do not count on by one"
            raise Refused(f"evicting: a decoded token came with {what}; a sequence without gaps is expected")

    def _expect(
        self, name: str, given: Mapping[str, Any], shapes: list[Any], fine: Any, wrong: str, right: str, later: bool
    ) -> None:
        value = given.get(name)
        if value is None:
            return
        if not isinstance(value, torch.Tensor) or tuple(value.shape) not in shapes:
            found = list(value.shape) if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"
            raise Refused(f"evicting: {name} is {found}; {right}")
        all_fine = fine(value).all()
        if later:
            self._wrong = ~all_fine if self._wrong is None else self._wrong | ~all_fine
        elif not bool(all_fine):
            raise Refused(f"evicting: {name} {wrong}; {right}")
