"""Hugging Face's models, one of each of 60 widely used types: small, with random weights, each with a batch for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

TEXT = (
    "albert bert big_bird camembert convbert deberta deberta-v2 distilbert electra ernie esm fnet funnel layoutlm "
    "longformer modernbert mpnet nystromformer roberta roformer squeezebert xlm-roberta xlnet"
)
DECODERS = (
    "bloom falcon gemma gemma2 gpt2 gpt_bigcode gpt_neo gpt_neox gptj llama mamba mistral mixtral opt phi phi3 qwen2 "
    "qwen3 stablelm starcoder2"
)
BOTH = ("bart", "t5")
IMAGES = (
    *("beit", "clip_vision_model", "convnext", "convnextv2", "deit", "dinov2", "mobilevit", "resnet", "segformer"),
    *("siglip_vision_model", "swin", "swinv2", "vit"),
)
SOUND = ("audio-spectrogram-transformer", "wav2vec2")
TYPES = tuple(sorted([*TEXT.split(), *DECODERS.split(), *BOTH, *IMAGES, *SOUND]))
SMALL: dict[str, Any] = dict(
    vocab_size=96, hidden_size=32, n_embd=32, d_model=32, word_embed_proj_dim=32, embedding_size=32, dim=32,
    num_hidden_layers=2, n_layer=2, n_layers=2, num_layers=2, encoder_layers=2, decoder_layers=2, num_decoder_layers=2,
    num_attention_heads=4, n_head=4, n_heads=4, num_heads=4, encoder_attention_heads=4, decoder_attention_heads=4,
    num_key_value_heads=2, head_dim=8, d_kv=8, intermediate_size=48, hidden_dim=48, n_inner=48, d_ff=48, ffn_dim=48,
    encoder_ffn_dim=48, decoder_ffn_dim=48, d_inner=48, d_head=8, ffn_hidden_size=48,
    max_position_embeddings=64, n_positions=64, n_ctx=64, rotary_dim=4, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    sep_token_id=2, num_local_experts=4, num_labels=5, image_size=32, patch_size=8,
    attention_window=8, attention_types=[[["global", "local"], 1]], rel_attn=None, block_sizes=[1, 1],
    num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4, num_mel_bins=32, max_length=64,
    global_attn_every_n_layers=2, local_attention=16, axial_pos_embds_dim=[16, 16], state_size=8, time_step_rank=4,
    layer_types=None, window_size=4, sliding_window=16,
)  # fmt: skip
"""Where a type's settings have these, they are so."""
OWN: dict[str, dict[str, Any]] = {
    "swin": dict(embed_dim=16, depths=[1, 1], num_heads=[2, 4], patch_size=4, hidden_size=32),
    "swinv2": dict(embed_dim=16, depths=[1, 1], num_heads=[2, 4], patch_size=4, hidden_size=32),
    "convnext": dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4),
    "convnextv2": dict(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2, patch_size=4),
    "resnet": dict(hidden_sizes=[8, 16], depths=[1, 1], embedding_size=8),
    "segformer": dict(
        hidden_sizes=[8, 16, 24, 32], depths=[1, 1, 1, 1], num_attention_heads=[1, 2, 2, 4], decoder_hidden_size=24
    ),
    "mobilevit": dict(hidden_sizes=[24, 32, 40], neck_hidden_sizes=[4, 8, 8, 8, 12, 16, 32], patch_size=2),
    "funnel": dict(d_model=32, n_head=4, d_head=8),
    "wav2vec2": dict(conv_dim=[16, 16], conv_stride=[5, 4], conv_kernel=[10, 8], num_feat_extract_layers=2),
    "falcon": dict(num_kv_heads=4),
    "audio-spectrogram-transformer": dict(max_length=48),
    "xlnet": dict(untie_r=True),
    "squeezebert": dict(embedding_size=32),
}
WITHOUT = {"funnel": ("num_hidden_layers",)}
WORDS = 16


def build_huggingface(kind: str) -> tuple[nn.Module, dict[str, Tensor], str | None]:
    """A classifier of this type, a batch for it, and which part of its answer counts; where the library has none, its
    features pooled."""
    import transformers

    given = transformers.AutoConfig.for_model(kind)
    known = given.to_dict()
    chosen = {name: value for name, value in SMALL.items() if name in known and value is not None}
    for name in WITHOUT.get(kind, ()):
        chosen.pop(name, None)
    if not isinstance(known.get("layer_types"), type(None)):
        chosen["layer_types"] = None
    config = transformers.AutoConfig.for_model(kind, **(chosen | OWN.get(kind, {})))
    config.num_labels, config.architectures = 5, []
    if kind in BOTH:
        config.decoder_start_token_id = 1
    batch = _batch(kind, config)
    auto = (
        transformers.AutoModelForImageClassification
        if kind in IMAGES
        else transformers.AutoModelForAudioClassification
        if kind in SOUND
        else transformers.AutoModelForSequenceClassification
    )
    if type(config) in auto._model_mapping:
        return auto.from_config(config), batch, "logits"
    return Pooled(transformers.AutoModel.from_config(config)), batch, None


def _batch(kind: str, config: Any) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(0)
    if kind in IMAGES:
        return {"pixel_values": torch.randn(2, 3, 32, 32, generator=draw)}
    if kind == "wav2vec2":
        return {"input_values": torch.randn(2, 800, generator=draw)}
    if kind in SOUND:
        return {"input_values": torch.randn(2, 48, 32, generator=draw)}
    words = torch.randint(5, 90, (2, WORDS), generator=draw)
    words[:, -1] = 2
    batch = {"input_ids": words}
    if kind not in ("fnet", "mamba"):
        batch["attention_mask"] = torch.ones_like(words)
    return batch


class Pooled(nn.Module):
    """The mean over all places of a network's last states."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **batch: Tensor) -> Tensor:
        """Features of each example."""
        states: Tensor = self.net(**batch).last_hidden_state
        return states.mean(1) if states.dim() == 3 else states.mean((2, 3))
