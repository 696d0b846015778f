"""Inspects calls of a transformers model: finds the cache, and checks that the sequences continue without gaps."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from kvlab.hf.models import text_config
from kvlab.hf.refused import Refused

# Arguments that a decoder may get. All others must be None or False, except the cache, which is recognized by its
# methods.
_KNOWN = frozenset(
    ("input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position", "token_type_ids")
    + ("use_cache", "output_hidden_states", "return_dict", "output_router_logits", "logits_to_keep", "per_layer_inputs")
)


def cache_word(model: Any) -> str:
    """The keyword of the cache in the model's forward: past_key_values, or cache since transformers 5.24."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def cache_among(values: Iterable[Any]) -> Any:
    """The cache among some values: the first object that takes keys and values and counts their tokens, or None."""
    return next((one for one in values if hasattr(one, "get_seq_length") and hasattr(one, "update")), None)


def few_logits(model: Any) -> torch.Tensor:
    """Runs the model on a few tokens. Returns logits [4, vocabulary] in float32: those of a prompt's last token and of
    three decoded tokens."""
    ids = torch.arange(1, 10, device=model.device)[None] * 7 % text_config(model.config).vocab_size
    past: dict[str, Any] = {}
    logits = []
    with torch.no_grad():
        for part in ids.tensor_split((6, 7, 8), 1):
            made = model(part, **past, use_cache=True, return_dict=True)
            past = {cache_word(model): cache_among(made.values())}
            logits.append(made.logits[0, -1:].float())
    return torch.cat(logits)


class Calls:
    """Checks the calls of a decoder. On a GPU, the mask and positions of a decoded token are checked later, by end(),
    because reading them would wait for the GPU."""

    def __init__(self, decoder: Any) -> None:
        self._decoder = decoder
        self._wrong: torch.Tensor | None = None  # on the device: whether a decoded token's mask or positions were wrong
        self._seen = torch.ones(1, 0, dtype=torch.bool)  # [row, column]: the mask so far, without decoded tokens
        self.pads: list[int] = []  # padding of each row so far

    def crop(self, columns: int) -> None:
        self._seen = self._seen[:, :columns]

    def look(self, words: Mapping[str, Any], outer_mask: Any) -> tuple[int, int, list[int]] | None:
        """Returns the number of columns before the call, the number of columns of the call, and the number of tokens
        that the call adds to each row. Raises Refused if the sequences do not continue without gaps. `outer_mask`: the
        mask that was given to the model around the decoder."""
        config = self._decoder.config
        given = {"output_attentions": getattr(config, "output_attentions", None)} | dict(words)
        rows = given.get("input_ids") if given.get("inputs_embeds") is None else given["inputs_embeds"]
        if rows is None or rows.ndim < 2:
            return None  # transformers reports this itself
        past = cache_among(given.values())
        for name, value in given.items():
            if name not in _KNOWN and all(value is not fine for fine in (None, False, past)):
                known = f"they support {', '.join(sorted(_KNOWN))}"
                raise Refused(f"kvlab.hf: the call has the argument {name}, which caches do not support; {known}")
        if past is None and not (config.use_cache if given.get("use_cache") is None else given["use_cache"]):
            why = "use_cache is False in the call or in the model's config"
            raise Refused(f"kvlab.hf: the call has no cache, because {why}; give use_cache=True")
        start, (batch, n) = 0 if past is None else int(past.get_seq_length()), rows.shape[:2]
        if n == 0:
            what = f"the call has no new tokens, because the cache has {start} and the text is not longer"
            raise Refused(f"kvlab.hf: {what}; pass the whole text so far and the new tokens, or call reset() for another text")
        if start == 0 or not self.pads:
            self._seen, self.pads = torch.ones(batch, 0, dtype=torch.bool, device=rows.device), [0] * batch
        if len(self.pads) != batch:
            what = f"the call has a batch of {batch}, but the call before had {len(self.pads)}"
            raise Refused(f"kvlab.hf: {what}; give all calls of a conversation the same number of texts")
        later = n == 1 and rows.device.type != "cpu"  # reading the device would wait for it
        if not later:
            self.end()
        mask = given.get("attention_mask")
        if isinstance(mask, dict) and all(value is None for value in mask.values()):
            mask = outer_mask  # the outer model made the masks of the layers from this mask
        new = self._new(mask, batch, start, n, later)
        if start > 0 and min(new) < n and given.get("position_ids") is None:
            what = "the call has padding after tokens, which the model would count as tokens"
            raise Refused(f"kvlab.hf: {what}; give position_ids that count tokens only")
        self._look_at_positions(given, start, n, new, later, rows.device)
        return start, n, new

    def end(self) -> None:
        wrong, self._wrong = self._wrong, None
        if wrong is not None and bool(wrong):
            what = "an attention_mask that leaves tokens out, or position_ids that do not increase by one"
            raise Refused(f"kvlab.hf: a decoded token came with {what}; give a sequence without gaps")

    def _expect(self, name: str, fine: torch.Tensor, later: bool, wrong: str) -> None:
        if later:
            self._wrong = ~fine if self._wrong is None else self._wrong | ~fine
        elif not bool(fine):
            raise Refused(f"kvlab.hf: {name} {wrong}")

    def _new(self, mask: Any, batch: int, start: int, n: int, later: bool) -> list[int]:
        """The number of tokens, without padding, that each row has in the n columns of the call."""
        right = f"give no mask, or one of shape [{batch}, {start + n}] with padding only before the text"
        if mask is None and not any(self.pads):
            return [n] * batch
        if not isinstance(mask, torch.Tensor) or tuple(mask.shape) != (batch, start + n):
            found = f"has shape {list(mask.shape)}" if isinstance(mask, torch.Tensor) else f"is a {type(mask).__name__}"
            raise Refused(f"kvlab.hf: attention_mask {found}; {right}")
        shown, before = mask.bool(), self._seen.shape[1]
        part = shown[:, start:]
        fine = (shown[:, :before] == self._seen).all() & shown[:, before:start].all() & part[:, -1].all()
        self._expect("attention_mask", fine & (part[:, 1:] >= part[:, :-1]).all(), later, f"leaves tokens out; {right}")
        if later:
            return [1] * batch
        new: list[int] = part.sum(1).tolist()
        self._seen, self.pads = shown, [pads + n - count for pads, count in zip(self.pads, new)]
        return new

    def _look_at_positions(
        self, given: Mapping[str, Any], start: int, n: int, new: list[int], later: bool, device: Any
    ) -> None:
        right = f"give consecutive numbers from {start} to {start + n - 1}"
        columns = torch.arange(start, start + n, device=device)
        for name in ("position_ids", "cache_position"):
            value = given.get(name)
            if value is None:
                continue
            if (
                not isinstance(value, torch.Tensor)
                or value.shape[-1:] != (n,)
                or value.shape[-2:-1] not in ((), (1,), (len(new),))
            ):
                shape = isinstance(value, torch.Tensor)
                found = f"has shape {list(value.shape)}" if shape else f"is a {type(value).__name__}"
                raise Refused(f"kvlab.hf: {name} {found}; {right}")
            at, fine = value.to(device), value.to(device) == columns
            if any(self.pads) and name == "position_ids":  # positions of padding may have any value
                pads, counts = (torch.tensor(numbers, device=device)[:, None] for numbers in (self.pads, new))
                fine = (at == columns - pads) | (columns - start < n - counts)
            self._expect(name, fine.all(), later, f"has other numbers; {right}")
