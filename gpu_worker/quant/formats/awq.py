"""AWQ checkpoints (Lin et al., 2023), gemm layout: words along N, nibbles in the order 0, 4, 1, 5, 2, 6, 3, 7.

Tensors of a layer [N, K] with G groups: qweight i32[K, N / 8], qzeros i32[G, N / 8] (the zero point itself), scales [G, N].
The j-th nibble of a word from the low bits up is column ORDER[j] of its eight.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from gpu_worker.quant.formats.words import BLOCK_ELEMENTS, check_words, in_order_groups, pack
from gpu_worker.quant.scheme import Json, QuantSpec, Scheme, choose, everything, flag, group_size, path_part, refuse, texts
from gpu_worker.quant.weights import IntWeight

NAMES = ("qweight", "qzeros", "scales")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column of the nibble at each place; its inverse is 0, 4, 1, 5, 2, 6, 3, 7


def read_config(config: Json) -> QuantSpec:
    choose(config, "bits", (4,))
    layout = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm").lower()
    if layout != "gemm":
        raise refuse(f"AWQ layout {layout!r} is not supported (supported: 'gemm')")
    group = group_size(config, 128)
    name = "zero_point" if "zero_point" in config else "sym"
    symmetric = flag(config, name, name == "zero_point") != (name == "zero_point")
    scheme = Scheme(
        layout="awq",
        kind="int",
        bits=4,
        granularity="channel" if group == -1 else "group",
        group=max(group, 0),
        symmetric=symmetric,
    )
    skipped = texts(config, "modules_to_not_convert")
    rules = [(path_part([*skipped, "lm_head"]), None), (everything, scheme)]
    return QuantSpec("awq", tuple(rules))


def read_weight(scheme: Scheme, tensors: Mapping[str, Tensor]) -> IntWeight:
    qweight, scales = tensors["qweight"], tensors["scales"]
    codes, zeros = _turned(qweight), _turned(tensors["qzeros"])
    k = qweight.shape[0]
    groups = in_order_groups(k, scheme.group or k)
    return IntWeight(4, codes, scales.t().contiguous(), zeros, groups).checked()


def _turned(words: Tensor) -> Tensor:
    """i32[R, N / 8] -> u8[N, R]"""
    check_words(words)
    codes = torch.empty((words.shape[1], 8, words.shape[0]), dtype=torch.uint8, device=words.device)
    step = max(BLOCK_ELEMENTS // 8 // max(words.shape[0], 1), 1)
    for start in range(0, words.shape[1], step):
        part = words[:, start : start + step].t().contiguous()
        for place, column in enumerate(ORDER):
            codes[start : start + step, column] = (part >> 4 * place) & 15
    return codes.flatten(0, 1)


def write_words(codes: Tensor) -> Tensor:
    """u8[R, N] -> i32[R, N / 8]"""
    return pack(codes.reshape(codes.shape[0], -1, 8)[..., list(ORDER)].flatten(1), 4)
