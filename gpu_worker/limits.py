"""What a start may ask for, as far as it is known without torch: type, length, division among ranks, pages of one request."""

from gpu_worker.model.spec import ModelSpec
from shared.config import BadConfig, Config

CPU_KV_BYTES = 512 * 2**20


def check_dtype(config: Config, *, on_cpu: bool) -> None:
    if on_cpu and config.dtype == "float16":
        raise BadConfig("dtype = 'float16': a CPU computes in bfloat16 or float32")


def check_length(config: Config, context_limit: int) -> None:
    if config.max_model_len > context_limit:
        raise BadConfig(f"max_model_len = {config.max_model_len}: the model allows at most {context_limit} tokens")


def check_division(spec: ModelSpec, size: int) -> None:
    """BadConfig with both numbers when this many ranks cannot share the model."""
    why = ""
    if spec.num_heads % size:
        why = f"the model's {spec.num_heads} attention heads cannot be divided by {size}"
    elif spec.num_kv_heads % size and size % spec.num_kv_heads:
        why = f"neither can the model's {spec.num_kv_heads} KV heads be divided by {size} nor {size} by them"
    elif spec.intermediate_size % size:
        why = f"the model's intermediate_size of {spec.intermediate_size} cannot be divided by {size}"
    elif -(-spec.vocab_size // size) * (size - 1) >= spec.vocab_size:
        why = f"a vocabulary of {spec.vocab_size} tokens leaves a rank without any"
    if why:
        raise BadConfig(f"tensor_parallel_size = {size}: {why}")


def bytes_of_page(spec: ModelSpec, page_tokens: int, item_bytes: int) -> int:
    """Of one page in all layers, keys and values."""
    return 2 * spec.num_layers * spec.num_kv_heads * page_tokens * spec.head_dim * item_bytes


def check_pages(config: Config, page_bytes: int, kv_bytes: int, others: str = "") -> None:
    """BadConfig with the numbers when the pages do not hold one request. others: what else takes memory, as text."""
    pool_tokens = max(0, max(0, kv_bytes) // page_bytes - 1) * config.block_size
    if config.max_model_len > pool_tokens or pool_tokens == 0:
        need = -(-(config.max_model_len or 1) // config.block_size) + 1
        raise BadConfig(
            f"memory for less than one request: {config.max_model_len or 1} tokens need {need} pages of {page_bytes:,} bytes "
            f"= {need * page_bytes:,} bytes, there are {max(0, kv_bytes):,}{others}; "
            "lower --max-model-len or raise --kv-cache-bytes"
        )
