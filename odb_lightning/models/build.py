"""A causal language model of `transformers` from options."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

SMALL_QWEN3: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 8192,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
"""1.8 million weights, for the packaged vocabulary: learns in minutes on a CPU."""


def build_causal_lm(
    config: Mapping[str, Any] | None = None,
    pretrained: str | None = None,
    torch_dtype: str | None = None,
    attn_implementation: str | None = None,
    lora: Mapping[str, Any] | None = None,
    gradient_checkpointing: bool = False,
) -> nn.Module:
    """A model with random weights from `config`, or with those of `pretrained` (a name or a folder), adapted by `lora`
    (the options of `peft.LoraConfig`). Weights are float32 unless `torch_dtype` says otherwise ("bfloat16", "auto")."""
    if config is not None and pretrained is not None:
        raise ValueError("config and pretrained are given: pretrained weights bring their own config, leave one out")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError as error:
        raise ImportError("CausalLM needs `transformers`; install the extra: pip install 'odb-lightning[hf]'") from error
    options: dict[str, Any] = {"dtype": torch_dtype or "float32"}
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    if pretrained is not None:
        model = AutoModelForCausalLM.from_pretrained(pretrained, **options)
    else:
        settings = dict(config or SMALL_QWEN3)
        if "model_type" not in settings:
            raise ValueError(f"config has no model_type (for example qwen3, llama, gpt2); it has {sorted(settings)}")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings), **options)
    if gradient_checkpointing:
        # its name from transformers 5 on; the old one warns there
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    model = _with_lora(model, lora) if lora is not None else model
    return model.train()  # type: ignore[no-any-return]  # from_pretrained hands it over in evaluation mode


def shard_layers(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shards the parameters of each decoder layer over `mesh`, then what is left, by `fully_shard` (FSDP2)."""
    from torch.distributed.fsdp import fully_shard

    # What transformers calls a layer that has to stay in one piece.
    names = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    for part in model.modules():
        if type(part).__name__ in names:
            fully_shard(part, mesh=mesh)
    fully_shard(model, mesh=mesh)


def _with_lora(model: Any, lora: Mapping[str, Any]) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise ImportError(
            f"lora needs the `peft` library: pip install 'odb-lightning[peft]', or leave lora out ({error})"
        ) from error
    return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **lora))
