"""Kimi K3 and Kimi-Linear text models in float64 NumPy: the specification as a program.

Reads a checkpoint folder and runs one sequence at a time with plain loops: slow and obvious on
purpose. It shares nothing with k3jax, not even the reader of files, and reproduces every
`logits_f64` of the golden folders to 5e-8.

    python tests/oracle/k3_numpy.py FOLDER [FOLDER ...]      # check folders that hold golden.npz
"""

import json
import struct
import sys
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np

DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16, "U8": np.uint8}
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


@dataclass
class Result:
    """What the oracle says about one sequence of T tokens."""

    logits: np.ndarray  # [T, vocab]
    final_norm: np.ndarray  # [T, D]
    token_gaps: np.ndarray  # [T], smallest distance between a chosen and a rejected expert's score
    out: dict[int, np.ndarray] = field(default_factory=dict)  # prefix sum leaving each layer
    states: dict[int, np.ndarray] = field(default_factory=dict)  # KDA [heads, K, V]
    conv_inputs: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)  # last W - 1 rows
    latents: dict[int, np.ndarray] = field(default_factory=dict)  # MLA [T, R + R_rope]
    router: dict[int, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)

    @property
    def router_gap(self) -> float:
        """The smallest distance over all tokens."""
        return float(self.token_gaps.min())


def read_safetensors(folder):
    """All tensors of all shards; floats as float64, packed bytes as they are."""
    tensors = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        raw = path.read_bytes()
        (header_size,) = struct.unpack("<Q", raw[:8])
        base = 8 + header_size
        for name, meta in json.loads(raw[8:base]).items():
            if name == "__metadata__":
                continue
            start, stop = meta["data_offsets"]
            x = np.frombuffer(raw[base + start : base + stop], DTYPES[meta["dtype"]])
            x = x.reshape(meta["shape"])
            tensors[name] = x if x.dtype == np.uint8 else x.astype(np.float64)
    return tensors


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def silu(x):
    return x * sigmoid(x)


def softmax(x, axis=-1):
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def rms_norm(x, weight, eps):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def mxfp4(packed, scale):
    """[out, in/2] nibbles (low = even column) and [out, in/32] exponents -> [out, in]."""
    values = np.stack([E2M1[packed & 15], E2M1[packed >> 4]], -1).reshape(len(packed), -1)
    return values * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, axis=1)


class K3:
    """One checkpoint; call it with token ids."""

    def __init__(self, folder):
        config = json.loads((Path(folder) / "config.json").read_text())
        self.c = config.get("text_config", config)
        self.tensors = read_safetensors(folder)
        nested = "language_model.model.embed_tokens.weight" in self.tensors
        self.prefix = "language_model." if nested else ""
        self.eps = self.c["rms_norm_eps"]
        self.lora_eps = self.c.get("mla_lora_norm_eps", 1e-6)
        self.kda = self.c["linear_attn_config"]

    def has(self, name):
        return self.prefix + name in self.tensors

    def w(self, name):
        return self.tensors[self.prefix + name]

    def linear(self, name, x):
        if self.has(name + ".weight"):
            return x @ self.w(name + ".weight").T
        return x @ mxfp4(self.w(name + ".weight_packed"), self.w(name + ".weight_scale")).T

    def gated(self, gate, up):
        if self.c["hidden_act"] != "situ":
            return silu(gate) * up
        b, linear_b = self.c["activation_situ_beta"] or 1.0, self.c["activation_situ_linear_beta"]
        up = up if linear_b is None else linear_b * np.tanh(up / linear_b)
        return b * np.tanh(gate / b) * sigmoid(gate) * up

    def mlp(self, p, x):
        hidden = self.gated(self.linear(p + "gate_proj", x), self.linear(p + "up_proj", x))
        return self.linear(p + "down_proj", hidden)

    def kda_attention(self, p, x):
        """The sublayer's output, the final state [heads, K, V] and the last convolution inputs."""
        n, heads, dk = len(x), self.kda["num_heads"], self.kda["head_dim"]
        raw = {a: self.linear(p + f"{a}_proj", x) for a in "qkv"}
        taps = self.w(p + "q_conv1d.weight").shape[-1]
        padded = {a: np.concatenate([np.zeros((taps - 1, y.shape[1])), y]) for a, y in raw.items()}

        def short_conv(a):  # weight [channels, 1, taps], the last tap is the current token
            w = self.w(p + f"{a}_conv1d.weight")
            y = silu(sum(padded[a][j : j + n] * w[:, 0, j] for j in range(taps)))
            return y.reshape(n, heads, -1)

        q, k, v = (short_conv(a) for a in "qkv")
        q, k = (a / np.sqrt((a * a).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
        f = self.linear(p + "f_b_proj", self.linear(p + "f_a_proj", x))
        f = (f + self.w(p + "dt_bias").reshape(-1)).reshape(n, heads, dk)
        rate = np.exp(self.w(p + "A_log").reshape(-1)[:heads])[:, None]
        bound = self.kda.get("gate_lower_bound")
        g = -rate * np.log1p(np.exp(f)) if bound is None else bound * sigmoid(rate * f)
        beta = sigmoid(self.linear(p + "b_proj", x))

        state, o = np.zeros((heads, dk, v.shape[-1])), np.zeros_like(v)
        for t in range(n):
            state = np.exp(g[t])[..., None] * state
            u = beta[t][:, None] * (v[t] - np.einsum("hk,hkv->hv", k[t], state))
            state = state + k[t][..., None] * u[:, None]
            o[t] = dk**-0.5 * np.einsum("hk,hkv->hv", q[t], state)

        if self.has(p + "g_proj.weight"):
            gate = self.linear(p + "g_proj", x)
        else:
            gate = self.linear(p + "g_b_proj", self.linear(p + "g_a_proj", x))
        o = rms_norm(o, self.w(p + "o_norm.weight"), self.eps) * sigmoid(gate.reshape(o.shape))
        tails = {a: y[len(y) - taps + 1 :] for a, y in padded.items()}
        return self.linear(p + "o_proj", o.reshape(n, -1)), state, tails

    def mla_attention(self, p, x):
        """The sublayer's output and the rows that a cache would hold."""
        c, n = self.c, len(x)
        heads, rank = c["num_attention_heads"], c["kv_lora_rank"]
        dn, dr, dv = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        if c.get("q_lora_rank"):
            q = self.linear(p + "q_a_proj", x)
            q = rms_norm(q, self.w(p + "q_a_layernorm.weight"), self.lora_eps)
            q = self.linear(p + "q_b_proj", q)
        else:
            q = self.linear(p + "q_proj", x)
        q = q.reshape(n, heads, dn + dr)
        row = self.linear(p + "kv_a_proj_with_mqa", x)
        latent = rms_norm(row[:, :rank], self.w(p + "kv_a_layernorm.weight"), self.lora_eps)
        expanded = self.linear(p + "kv_b_proj", latent).reshape(n, heads, dn + dv)
        shared_key = np.broadcast_to(row[:, None, rank:], (n, heads, dr))
        k, v = np.concatenate([expanded[..., :dn], shared_key], -1), expanded[..., dn:]
        scores = np.einsum("thd,shd->hts", q, k) * (dn + dr) ** -0.5
        scores = np.where(np.tril(np.ones((n, n), bool)), scores, -np.inf)
        o = np.einsum("hts,shd->thd", softmax(scores), v).reshape(n, -1)
        if c.get("mla_use_output_gate"):
            o = o * sigmoid(self.linear(p + "g_proj", x))
        return self.linear(p + "o_proj", o), np.concatenate([latent, row[:, rank:]], -1)

    def route(self, p, x):
        """Expert ids and weights, both [tokens, top_k], and gaps [tokens] to the first rejected.

        The bias only chooses.
        """
        c, logits = self.c, self.linear(p + "gate", x)
        top_k = c["num_experts_per_token"]
        kind = c.get("moe_router_activation_func", "sigmoid")
        scores = sigmoid(logits) if kind == "sigmoid" else softmax(logits)
        choice = scores + self.w(p + "gate.e_score_correction_bias")
        groups = (c.get("num_expert_group") or 1) if c.get("use_grouped_topk", True) else 1
        gap = np.full(len(x), np.inf)
        if groups > (kept_groups := c.get("topk_group") or 1):
            best_two = np.sort(choice.reshape(len(x), groups, -1), -1)[..., -2:].sum(-1)
            order = np.argsort(-best_two, 1, kind="stable")
            kept = np.zeros((len(x), groups), bool)
            np.put_along_axis(kept, order[:, :kept_groups], True, 1)
            choice = np.where(np.repeat(kept, choice.shape[1] // groups, 1), choice, -np.inf)
            ranked = -np.sort(-best_two, 1)
            gap = ranked[:, kept_groups - 1] - ranked[:, kept_groups]
        ids = np.argsort(-choice, 1, kind="stable")[:, :top_k]
        if top_k < choice.shape[1]:
            ranked = -np.sort(-choice, 1)
            gap = np.minimum(gap, ranked[:, top_k - 1] - ranked[:, top_k])
        weights = np.take_along_axis(scores, ids, 1)
        if c.get("moe_renormalize", True) and top_k > 1:
            weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
        return ids, weights * c.get("routed_scaling_factor", 1.0), gap

    def moe(self, p, x, ids, weights):
        latent = self.has(p + "routed_expert_down_proj.weight")
        z = self.linear(p + "routed_expert_down_proj", x) if latent else x
        routed = np.zeros_like(z)
        for t in range(len(x)):
            for expert, weight in zip(ids[t], weights[t], strict=True):
                e = p + f"experts.{expert}."
                hidden = self.gated(self.linear(e + "w1", z[t]), self.linear(e + "w3", z[t]))
                routed[t] += weight * self.linear(e + "w2", hidden)
        if latent:
            if self.c.get("latent_moe_use_norm"):
                routed = rms_norm(routed, self.w(p + "routed_expert_norm.weight"), self.eps)
            routed = self.linear(p + "routed_expert_up_proj", routed)
        has_shared = self.has(p + "shared_experts.gate_proj.weight")
        return routed + self.mlp(p + "shared_experts.", x) if has_shared else routed

    def mix(self, sources, name):
        """Attention over depth: scores from normed sources, sum over raw ones."""
        values = np.stack(sources)
        query = self.w(name + "_norm.weight") * self.w(name + "_proj.weight").reshape(-1)
        scores = rms_norm(values, query, self.eps).sum(-1)
        return (softmax(scores, axis=0)[..., None] * values).sum(0)

    def __call__(self, ids) -> Result:
        """Everything about one sequence, int [T]."""
        block = self.c.get("attn_res_block_size")
        embedding = self.w("model.embed_tokens.weight")
        prefix, bank = embedding[np.asarray(ids)], []
        result = Result(np.empty(0), np.empty(0), np.full(len(prefix), np.inf))
        for i in range(self.c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            x = self.mix([*bank, prefix], p + "self_attention_res") if block and bank else prefix
            if block and i % block == 0:
                bank, prefix = [*bank, prefix], 0
            x = rms_norm(x, self.w(p + "input_layernorm.weight"), self.eps)
            if i + 1 in self.kda["kda_layers"]:
                out, *memory = self.kda_attention(p + "self_attn.", x)
                result.states[i], result.conv_inputs[i] = memory
            else:
                out, result.latents[i] = self.mla_attention(p + "self_attn.", x)
            prefix = prefix + out
            x = self.mix([*bank, prefix], p + "mlp_res") if block else prefix
            x = rms_norm(x, self.w(p + "post_attention_layernorm.weight"), self.eps)
            if self.has(p + "block_sparse_moe.gate.weight"):
                ids_, weights, gap = self.route(p + "block_sparse_moe.", x)
                result.router[i] = ids_, weights
                result.token_gaps = np.minimum(result.token_gaps, gap)
                prefix = prefix + self.moe(p + "block_sparse_moe.", x, ids_, weights)
            else:
                prefix = prefix + self.mlp(p + "mlp.", x)
            result.out[i] = prefix
        out = self.mix([*bank, prefix], "model.output_attn_res") if block else prefix
        result.final_norm = rms_norm(out, self.w("model.norm.weight"), self.eps)
        tied = self.c.get("tie_word_embeddings")
        head = embedding if tied else self.w("lm_head.weight")
        result.logits = result.final_norm @ head.T * self.c.get("logit_scale", 1.0)
        return result


def golden_error(folder) -> float:
    """max |error| / max |logit| against the golden logits of a folder."""
    golden, model = np.load(Path(folder) / "golden.npz"), K3(folder)
    reference = golden["logits_f64" if "logits_f64" in golden else "logits"]
    errors = [
        np.abs(model(ids).logits - want).max()
        for ids, want in zip(golden["input_ids"], reference, strict=True)
    ]
    return max(errors) / np.abs(reference).max()


def main(folders):
    for folder in folders:
        print(f"{Path(folder).name:16s} max |error| / max |logit| = {golden_error(folder):.1e}")


if __name__ == "__main__":
    main(sys.argv[1:])
