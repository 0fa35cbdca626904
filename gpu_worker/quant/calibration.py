"""Texts that a model is calibrated with, and a walk through its decoder layers that yields what each linear layer is fed.

calibration.jsonl, one {"prompt", "text"} a line, was written by SmolLM2-135M-Instruct itself from prompts of our own.
"""

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

BUILT_IN = Path(__file__).with_name("calibration.jsonl")


def read_texts(path: Path, tokenizer: Any, count: int, max_tokens: int) -> list[Tensor]:
    """i64[1, <= max_tokens] each. path: .jsonl of prompts and texts (put into the chat template, if any), or plain text."""
    if path.suffix == ".jsonl":
        rows = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        texts = [_chat(tokenizer, row["prompt"], row["text"]) for row in rows]
        ids = [tokenizer(text, add_special_tokens=not tokenizer.chat_template)["input_ids"][:max_tokens] for text in texts]
    else:
        whole = tokenizer(path.read_text("utf-8"))["input_ids"]
        ids = [whole[start : start + max_tokens] for start in range(0, len(whole), max_tokens)]
    samples = [torch.tensor([each]) for each in ids[:count] if len(each) > 1]
    if not samples:
        raise ValueError(f"{path} holds no text")
    return samples


def _chat(tokenizer: Any, prompt: str, text: str) -> str:
    if not tokenizer.chat_template:
        return f"{prompt}\n\n{text}"
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": text}]
    return str(tokenizer.apply_chat_template(turns, tokenize=False))


class Inputs:
    """The hidden states that enter the current decoder layer, and everything else a layer is called with."""

    def __init__(self, model: Any, samples: list[Tensor], device: torch.device) -> None:
        self._calls: list[tuple[Tensor, dict[str, Any]]] = []
        hook = model.model.layers[0].register_forward_pre_hook(self._catch, with_kwargs=True)
        try:
            for sample in samples:
                with contextlib.suppress(_CaughtError):
                    model(input_ids=sample.to(device), use_cache=False)
        finally:
            hook.remove()

    def _catch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden = args[0] if args else kwargs.pop("hidden_states")
        self._calls.append((hidden, kwargs))
        raise _CaughtError

    def covariances(self, layer: nn.Module, names: tuple[str, ...]) -> dict[str, Tensor]:
        """Of the inputs of these linear layers, per token: f32[K, K] mean of x x^T."""
        sums: dict[str, Tensor] = {}
        counts = dict.fromkeys(names, 0)

        def add(name: str, x: Tensor) -> None:
            x = x.reshape(-1, x.shape[-1]).float()
            product = x.t() @ x
            sums[name] = sums[name] + product if name in sums else product
            counts[name] += x.shape[0]

        def watch(name: str) -> Any:
            return layer.get_submodule(name).register_forward_pre_hook(lambda module, args: add(name, args[0]))

        hooks = [watch(name) for name in names]
        try:
            for _ in self._outputs(layer):
                pass
        finally:
            for hook in hooks:
                hook.remove()
        return {name: sums[name] / counts[name] for name in names}

    def advance(self, layer: nn.Module) -> None:
        """Pass the layer: its outputs are the next one's inputs."""
        outputs = list(self._outputs(layer))
        self._calls = [(output, kwargs) for output, (_, kwargs) in zip(outputs, self._calls, strict=True)]

    def _outputs(self, layer: nn.Module) -> Iterator[Tensor]:
        for hidden, kwargs in self._calls:
            output = layer(hidden, **kwargs)
            yield output[0] if isinstance(output, tuple) else output


class _CaughtError(Exception):
    """Ends a forward pass at the first layer."""
