"""The sizes of a model that the pools, the batch builder and the transfer layout need. Says nothing about weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelDims:
    hidden: int
    vocab: int
    max_position: int
    """Longest prompt + output the checkpoint was made for, in tokens."""

    num_attention_layers: int
    num_mtp_attention_layers: int
    """1 when the model was loaded with its MTP module, else 0. Its KV follows the attention layers' in a block."""
    attention_heads: int
    kv_heads: int
    head_dim: int

    num_recurrent_layers: int
    ssm_heads: int
    ssm_head_dim: int
    ssm_state: int
    ssm_groups: int
    conv_kernel: int
    """Taps k; the carried window has k-1 columns."""
    conv_pieces: tuple[int, int, int]
    """Channels of x | B | C. A layout that splits the window must split each piece."""

    @property
    def conv_channels(self) -> int:
        return sum(self.conv_pieces)

    @property
    def num_kv_layers(self) -> int:
        """Layers of one KV block: the model's attention layers, then MTP's."""
        return self.num_attention_layers + self.num_mtp_attention_layers
