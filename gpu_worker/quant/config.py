"""quantization_config of config.json -> QuantSpec; what is unknown or contradictory is refused with what was found."""

from gpu_worker.quant.formats import awq, compressed, fp8, gptq
from gpu_worker.quant.scheme import Json, QuantSpec, choose, refuse
from shared.model_folder import ModelError

_READERS = {
    "gptq": gptq.read_config,
    "awq": awq.read_config,
    "compressed-tensors": compressed.read_config,
    "fp8": fp8.read_config,
}
AT_LOAD = ("fp8",)  # what can be made of an unquantized checkpoint while it is read
CHOICES = ("auto", "none", *_READERS)


def read_quantization(config: Json, wanted: str = "auto") -> QuantSpec | None:
    """config: the parsed config.json; wanted: the setting. None: the checkpoint is not quantized and shall not be."""
    if wanted not in CHOICES:
        raise ModelError(f"quantization {wanted!r} is not supported (supported: {', '.join(CHOICES)})")
    found = config.get("quantization_config") or config.get("compression_config")
    if not found:
        if wanted in ("auto", "none"):
            return None
        if wanted not in AT_LOAD:
            raise ModelError(
                f"quantization = {wanted}, but the checkpoint is not quantized (at load only: {', '.join(AT_LOAD)})"
            )
        return fp8.at_load()
    if not isinstance(found, dict):
        raise refuse(f"{found!r}, expected an object")
    if found.get("quant_method") is None and "config_groups" in found:
        found = found | {"quant_method": "compressed-tensors"}
    method = choose(found, "quant_method", tuple(_READERS))
    if wanted not in ("auto", method):
        raise ModelError(f"quantization = {wanted}, but the checkpoint says {method}")
    return _READERS[method](found)
