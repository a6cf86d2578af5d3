"""The model with gradients: Nemotron-H and its MTP module in plain torch, for training only.

Parameters are the checkpoint's own, by plain name (``engine.models.parameters``), so nothing is translated when a
checkpoint is written. Rows of a batch start at the same position, after a common beginning that is computed once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.models.nemotron_h_config import NemotronHConfig

Parameters = Mapping[str, Tensor]
KeysValues = tuple[Tensor, Tensor]
"""[B, V, T, D] each."""
CHUNK = 128
"""Positions that the scan takes at once. Changes nothing but speed."""


@dataclass(slots=True)
class Past:
    """What a beginning of T0 tokens leaves, by layer name. Batch 1 serves rows of any number."""

    conv: dict[str, Tensor] = field(default_factory=dict)
    """[1, k-1, C], before the convolution."""
    ssm: dict[str, Tensor] = field(default_factory=dict)
    """[1, H, N, P]."""
    keys_values: dict[str, KeysValues] = field(default_factory=dict)
    """[1, V, T0, D] each."""
    last_hidden: Tensor | None = None
    """[1, 1, d], after the final norm: the first MTP entry needs it."""


class TrainedModel:
    """Stateless: reads ``parameters`` at every call."""

    def __init__(self, config: NemotronHConfig, parameters: Parameters) -> None:
        self.config, self.parameters, self.eps = config, parameters, config.layer_norm_epsilon

    def embed(self, token_ids: Tensor) -> Tensor:
        return F.embedding(token_ids, self.parameters["embeddings.weight"])

    def forward(self, token_ids: Tensor, past: Past | None = None, leave: Past | None = None) -> Tensor:
        """int64 [B, T] -> hidden states after the final norm [B, T, d]. ``leave`` takes what comes after them needs."""
        x = self.embed(token_ids)
        for index, kind in enumerate(self.config.layers_block_type):
            name = f"layers.{index}."
            u = self._norm(x, name + "norm.weight")
            if kind == "mamba2":
                x = x + self._mamba2(u, name + "mixer.", past, leave)
            elif kind == "attention":
                x = x + self._attention(u, name + "mixer.", past, leave)
            else:
                x = x + self._mlp(u, name + "mixer.")
        hidden = self._norm(x, "norm_f.weight")
        if leave is not None:
            leave.last_hidden = hidden[:, -1:]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., vocab]."""
        return F.linear(hidden, self.parameters["lm_head.weight"])

    def drafts(self, token_ids: Tensor, hidden: Tensor, anchors: Tensor, depth: int, past: Past | None = None) -> list[Tensor]:
        """MTP's outputs for drafts 1..depth after each anchor, had all drafts before been right.

        token_ids, hidden: [B, T] and [B, T, d] as ``forward`` saw and gave them. anchors int64 [B, R]: positions p < T-1.
        Draft j follows the entry of token p+j and predicts token p+j+1; what would need tokens beyond T is without meaning.
        -> depth times [B, R, d].
        """
        entries = self._entries(token_ids, hidden, past)
        keys, values = _joined(None if past is None else past.keys_values["mtp"], self._entry_keys_values(entries))
        # With a beginning, row i of entries is that of index T0+i; without, of index i+1.
        places = anchors + 1 if past is not None else anchors
        num_seen = keys.shape[2] - entries.shape[1] + places + 1
        seen = torch.arange(keys.shape[2]) < num_seen[:, None, :, None]
        rows, last = torch.arange(token_ids.shape[0])[:, None], token_ids.shape[1] - 1
        outputs: list[Tensor] = []
        own: list[KeysValues] = []
        for draft in range(1, depth + 1):
            if draft == 1:
                u = entries[rows, places]
            else:
                u = self._pair(self.embed(token_ids[rows, (anchors + draft).clamp(max=last)]), outputs[-1])
                own.append(self._entry_keys_values(u))
            u = u + self._draft_attention(self._norm(u, "mtp.layers.0.norm.weight"), keys, values, seen, own)
            u = u + self._mlp(self._norm(u, "mtp.layers.1.norm.weight"), "mtp.layers.1.mixer.")
            outputs.append(self._norm(u, "mtp.layers.1.final_layernorm.weight"))
        return outputs

    def leave_mtp(self, token_ids: Tensor, hidden: Tensor, leave: Past) -> None:
        """KV of the beginning's own entries, [1, T0] and [1, T0, d]."""
        leave.keys_values["mtp"] = self._entry_keys_values(self._entries(token_ids, hidden, None))

    def _entries(self, token_ids: Tensor, hidden: Tensor, past: Past | None) -> Tensor:
        """Pairs (h_t, x_t+1) of all positions whose both halves are known."""
        if past is None:
            return self._pair(self.embed(token_ids[:, 1:]), hidden[:, :-1])
        assert past.last_hidden is not None, "the beginning was run"
        before = past.last_hidden.expand(token_ids.shape[0], -1, -1)
        return self._pair(self.embed(token_ids), torch.cat([before, hidden[:, :-1]], 1))

    def _entry_keys_values(self, entries: Tensor) -> KeysValues:
        return self._keys_values(self._norm(entries, "mtp.layers.0.norm.weight"), "mtp.layers.0.mixer.")

    def _pair(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        pair = torch.cat([self._norm(embedded, "mtp.layers.0.enorm.weight"), self._norm(hidden, "mtp.layers.0.hnorm.weight")], -1)
        return F.linear(pair, self.parameters["mtp.layers.0.eh_proj.weight"])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.parameters[name], self.eps)

    def _linear(self, x: Tensor, name: str) -> Tensor:
        return F.linear(x, self.parameters[name + ".weight"])

    def _mlp(self, u: Tensor, name: str) -> Tensor:
        return self._linear(F.relu(self._linear(u, name + "up_proj")).square(), name + "down_proj")

    def _keys_values(self, u: Tensor, name: str) -> KeysValues:
        """[B, T, d] -> [B, V, T, D] twice."""
        shape = (*u.shape[:2], self.config.kv_heads, self.config.head_dim)
        key, value = (self._linear(u, name + part).view(shape).transpose(1, 2) for part in ("k_proj", "v_proj"))
        return key, value

    def _queries(self, u: Tensor, name: str) -> Tensor:
        """[B, T, d] -> [B, V, A/V, T, D]."""
        heads, kv_heads = self.config.num_attention_heads, self.config.kv_heads
        query = self._linear(u, name + "q_proj").view(*u.shape[:2], kv_heads, heads // kv_heads, self.config.head_dim)
        return query.permute(0, 2, 3, 1, 4)

    def _attention(self, u: Tensor, name: str, past: Past | None, leave: Past | None) -> Tensor:
        length = u.shape[1]
        key, value = self._keys_values(u, name)
        if leave is not None:
            leave.keys_values[name] = (key, value)
        mask = None
        if past is not None:
            key, value = _joined(past.keys_values[name], (key, value))
            mask = torch.ones(length, key.shape[2], dtype=torch.bool).tril(key.shape[2] - length)
        query = self._queries(u, name)
        share = query.shape[2]
        key, value = (part[:, :, None].expand(-1, -1, share, -1, -1).flatten(1, 2) for part in (key, value))
        seen = F.scaled_dot_product_attention(query.flatten(1, 2), key, value, attn_mask=mask, is_causal=mask is None)
        return self._linear(seen.transpose(1, 2).flatten(2), name + "o_proj")

    def _draft_attention(self, u: Tensor, keys: Tensor, values: Tensor, seen: Tensor, own: list[KeysValues]) -> Tensor:
        """u [B, R, d] over the true entries that ``seen`` [B, 1, R, T] allows and each row's own drafts before."""
        query = self._queries(u, "mtp.layers.0.mixer.") * self.config.head_dim**-0.5  # [B, V, S, R, D]
        share, rows = query.shape[2], query.shape[3]
        flat = query.flatten(2, 3)
        scores = (flat @ keys.transpose(-1, -2)).unflatten(2, (share, rows))
        scores = scores.masked_fill(~seen[:, :, None], float("-inf"))
        if own:
            own_scores = torch.stack([(query * key[:, :, None]).sum(-1) for key, _ in own], -1)
            scores = torch.cat([scores, own_scores], -1)
        weights = scores.softmax(-1)
        total = keys.shape[2]
        result = (weights[..., :total].flatten(2, 3) @ values).unflatten(2, (share, rows))
        for place, (_, value) in enumerate(own):
            result = result + weights[..., total + place, None] * value[:, :, None]
        return self._linear(result.permute(0, 3, 1, 2, 4).flatten(2), "mtp.layers.0.mixer.o_proj")

    def _mamba2(self, u: Tensor, name: str, past: Past | None, leave: Past | None) -> Tensor:
        config, parameters = self.config, self.parameters
        rows, length, _ = u.shape
        pieces = [config.mamba_width, sum(config.conv_pieces), config.mamba_num_heads]
        z, xbc, dt = self._linear(u, name + "in_proj").split_with_sizes(pieces, -1)
        taps = config.conv_kernel - 1
        padded = F.pad(xbc, (0, 0, taps, 0)) if past is None else torch.cat([past.conv[name].expand(rows, -1, -1), xbc], 1)
        if leave is not None:
            leave.conv[name] = padded[:, -taps:]
        weight, bias = parameters[name + "conv1d.weight"], parameters[name + "conv1d.bias"]
        convolved = F.conv1d(padded.transpose(1, 2), weight, bias, groups=weight.shape[0]).transpose(1, 2)
        x, b, c = F.silu(convolved).split_with_sizes(list(config.conv_pieces), -1)
        dt = F.softplus(dt + parameters[name + "dt_bias"])
        x = x.view(rows, length, config.mamba_num_heads, config.mamba_head_dim)
        b, c = (part.view(rows, length, config.n_groups, config.ssm_state_size) for part in (b, c))
        state = None if past is None else past.ssm[name].expand(rows, -1, -1, -1)
        y, state = chunked_scan(x, dt, -parameters[name + "A_log"].exp(), b, c, state, CHUNK)
        if leave is not None:
            leave.ssm[name] = state
        y = (y + parameters[name + "D"][:, None] * x).flatten(2) * F.silu(z)
        width = config.mamba_width // config.n_groups
        grouped = F.rms_norm(y.view(rows, length, config.n_groups, width), (width,), eps=self.eps)
        return self._linear(grouped.flatten(-2) * parameters[name + "norm.weight"], name + "out_proj")


def _joined(before: KeysValues | None, after: KeysValues) -> KeysValues:
    """Along time. ``before`` has one row for all."""
    if before is None:
        return after
    rows = after[0].shape[0]
    keys, values = (torch.cat([first.expand(rows, -1, -1, -1), then], 2) for first, then in zip(before, after, strict=True))
    return keys, values


def chunked_scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, state: Tensor | None, chunk: int) -> tuple[Tensor, Tensor]:
    """Mamba-2's recurrence by matrix products over chunks of positions (Dao & Gu 2024, section 6).

    x [B, T, H, P], dt [B, T, H], a [H], b and c [B, T, G, N], state [B, H, N, P] or None for zeros
    -> (y [B, T, H, P] without D·x, the state after T).
    """
    length, groups = x.shape[1], b.shape[2]
    outputs: list[Tensor] = []
    for start in range(0, length, chunk):
        part = slice(start, start + chunk)
        decay = (dt[:, part] * a).cumsum(1).transpose(1, 2)  # [B, H, Q]
        weighted = (x[:, part] * dt[:, part, :, None]).transpose(1, 2)  # [B, H, Q, P]
        bs, cs = b[:, part].transpose(1, 2), c[:, part].transpose(1, 2)  # [B, G, Q, N]
        rows, heads, size = decay.shape
        by_group = (rows, groups, heads // groups, size)
        lower = torch.ones(size, size, dtype=torch.bool).tril()
        fading = (decay[:, :, :, None] - decay[:, :, None, :]).masked_fill(~lower, float("-inf")).exp()
        mixing = (cs @ bs.transpose(-1, -2))[:, :, None] * fading.view(*by_group, size)
        y = mixing.flatten(1, 2) @ weighted
        if state is not None:
            carried = cs[:, :, None] * decay.exp().view(*by_group, 1)
            y = y + carried.flatten(1, 2) @ state
        outputs.append(y)
        last = decay[:, :, -1:]
        rest = (last - decay).exp().view(*by_group, 1)
        added = (bs[:, :, None] * rest).flatten(1, 2).transpose(-1, -2) @ weighted
        state = added if state is None else state * last.exp()[..., None] + added
    assert state is not None, "there is a position"
    return torch.cat(outputs, 2).transpose(1, 2), state
