"""Decoder layers in decode steps, with one kernel between two matrix products."""

from __future__ import annotations

import contextlib
import operator
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastrl_kernels
from fastrl.models.attention import Variant, current_attention
from fastrl.models.products import (
    CompiledProduct,
    compiled_product,
    has_own_forward,
    is_plain,
    joined,
)
from fastrl.models.utils import computes_in_tf32
from fastrl.rollout.attention import DecodeAttention, PrefillAttention
from fastrl.run.contexts import attributes_set
from fastrl_kernels._cpu.native.calls import are_contiguous_fp32, are_fp32
from fastrl_kernels._cpu.native.decode_layer import DecodeLayer, Norm, Shape, Weights
from fastrl_kernels.dispatch import watched

# Names of the modules of layers such as Llama's. Layers with other modules are not fused.
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
# Allowed differences of logits, relative to the largest: sums in another order differ so.
_TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


class _Stream:
    """The residual stream, while a layer's last addition waits for the next layer's norm.

    Attributes:
        sum: the stream without that addition, [b, 1, H].
        goes_on: whether the last layer's addition waits for the model's norm.
    """

    sum: Tensor
    goes_on = False


_laid: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()


class JoinedProducts:
    """The products of one input with several linear layers, the attributes ``names`` of ``owner``:
    one product where their weights lie one after the other in memory, see :func:`side_by_side`."""

    def __init__(self, owner: Any, *names: str):
        self.owner, self.names = owner, names
        self._joined: tuple[Tensor, Tensor | None, list[int]] | None = None
        self.compiled: CompiledProduct | None = None
        # Weights and biases that any engine on the model has laid side by side.
        self._whole: dict[str, Tensor] = _laid.setdefault(owner, {})

    @property
    def layers(self) -> list[Any]:
        """The layers that the owner has now: adapters may have replaced some."""
        return [getattr(self.owner, name) for name in self.names]

    def join(self) -> None:
        """Looks where the weights lie now; lays them side by side where they own their memory. On a
        CPU with compiled code they stay where they are."""
        self._joined, layers = None, self.layers
        before, self.compiled = self.compiled, None
        if not all(map(is_plain, layers)):
            return
        self.compiled = joined(layers, before)
        if self.compiled is not None:
            return
        weight = self._together("weight", layers)
        biases = [layer.bias is not None for layer in layers]
        bias = self._together("bias", layers) if all(biases) else None
        if weight is not None and (bias is not None or not any(biases)):
            self._joined = weight, bias, [layer.out_features for layer in layers]

    def _together(self, name: str, layers: list[Any]) -> Tensor | None:
        parameters = [getattr(layer, name) for layer in layers]
        joined = joined_view(parameters)  # casts of weights may lie together already
        if joined is not None:
            return joined
        whole = self._whole.pop(name, None)
        if whole is None or not _lie_in(whole, parameters):
            whole = side_by_side(parameters)
        if whole is not None:
            self._whole[name] = whole
        return whole

    def leave(self) -> None:
        """Ends a rollout: copies of weights that are trained are freed."""
        if self.compiled is not None and any(x.requires_grad for x in self._parameters()):
            self.compiled = None

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (x for layer in self.layers for x in layer.parameters(recurse=False))

    def stored(self) -> list[Tensor]:
        """The copies that stay between rollouts."""
        return [] if self.compiled is None else self.compiled.copies()

    def free(self) -> None:
        """Forgets the joined memory, which weights may have left; :meth:`join` lays them anew."""
        self._joined = self.compiled = None
        self._whole.clear()

    def __call__(self, x: Tensor) -> Sequence[Tensor]:
        if self.compiled is not None and self.compiled.takes(x):
            return self.compiled(x).split(self.compiled.sizes, -1)
        if self._joined is None:
            return [layer(x) for layer in self.layers]
        weight, bias, sizes = self._joined
        return F.linear(x, weight, bias).split(sizes, -1)


def side_by_side(parameters: Sequence[nn.Parameter]) -> Tensor | None:
    """Moves parameters to one piece of memory, along their first dimension, and returns it; None
    where dtypes, devices or other dimensions differ, or one of them shares its memory: a view, a
    shard, or a tensor that other code keeps in order to see the trained weights.

    Each parameter gets a storage that begins within the piece (by DLPack): code that saves, copies
    or moves parameters finds no views of one tensor. The piece is freed with the last parameter.
    """
    first = parameters[0]
    kind = first.dtype, first.device, first.shape[1:]
    if not all(map(_owns_its_memory, parameters)):
        return None
    if any((x.dtype, x.device, x.shape[1:]) != kind for x in parameters):
        return None
    with torch.inference_mode(False):  # inference tensors cannot be trained
        whole = torch.cat([x.data for x in parameters])
        for x, part in zip(parameters, whole.split([len(x) for x in parameters]), strict=True):
            x.data = torch.from_dlpack(part)
    return whole


def _owns_its_memory(x: nn.Parameter) -> bool:
    plain = type(x) is nn.Parameter and type(x.data) is Tensor and x.is_contiguous()
    if not plain or x.untyped_storage().nbytes() != x.nbytes:
        return False
    # The two uses: by the parameter, and by the object that this line makes.
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata) <= 2


def _lie_in(whole: Tensor, parameters: Sequence[Tensor]) -> bool:
    """Whether parameters are where :func:`side_by_side` has laid them."""
    at = whole.data_ptr()
    for x in parameters:
        if x.data_ptr() != at or x.dtype != whole.dtype:
            return False
        at += x.nbytes
    return True


def joined_view(tensors: Sequence[Tensor | None]) -> Tensor | None:
    """A view of tensors as one, along their first dimension; or None where they lie apart."""
    first, end = tensors[0], None
    for x in tensors:
        if x is None or first is None or x.dtype != first.dtype or not x.is_contiguous():
            return None
        if x.shape[1:] != first.shape[1:] or end not in (None, x.data_ptr()):
            return None
        end = x.data_ptr() + x.nbytes
    assert first is not None
    rows = sum(len(x) for x in tensors if x is not None)
    room = first.untyped_storage().nbytes() // first.element_size() - first.storage_offset()
    size = (rows, *first.shape[1:])
    fits = torch.Size(size).numel() <= room
    return first.detach().as_strided(size, first.stride()) if fits else None


class FusedDecoderLayer:
    """A decoder layer's forward of a decode step's tokens, and, in compiled code, of prompts; all
    other forwards are the layer's own.

    It has eight launches beside attention's: four products (seven where they are not joined), two
    norms with the additions before them, the rotation that stores keys and values, the gate.

    Attributes:
        variant: the variant of the layer's attention, read from its own forward.
    """

    def __init__(self, layer: Any, stream: _Stream, first: bool, last: bool):
        self.layer, self.stream, self.first, self.last = layer, stream, first, last
        self.own_forward: Callable[..., Tensor] = layer.forward
        self.variant = Variant(None, None, None)
        attention, mlp = layer.self_attn, layer.mlp
        self.head_norm_eps = _eps(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.attention_products = JoinedProducts(attention, "q_proj", "k_proj", "v_proj")
        self.mlp_products = JoinedProducts(mlp, "gate_proj", "up_proj")
        self._whole: DecodeLayer | None = None
        self._looked = False  # whether the layer can be computed as a whole, in this rollout

    def begin(self) -> None:
        """Begins a rollout with the weights of now."""
        self._whole, self._looked = None, False
        self.attention_products.join()
        self.mlp_products.join()

    def end(self) -> None:
        """Ends a rollout: copies of weights that are trained are freed."""
        self._whole = None
        self.attention_products.leave()
        self.mlp_products.leave()

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        attention = current_attention()
        if isinstance(attention, PrefillAttention) and self.attention_products.compiled is not None:
            return self._prefilled(hidden_states, *args, **kwargs)
        if not isinstance(attention, DecodeAttention):
            return self.own_forward(hidden_states, *args, **kwargs)
        layer, x = self.layer, hidden_states
        stream = None if self.first else self.stream.sum
        rotation = _of_rows(x, *kwargs["position_embeddings"])
        if not getattr(layer.self_attn, "use_rope", True):  # some of SmolLM3's
            rotation = torch.ones_like(rotation[0]), torch.zeros_like(rotation[1])
        whole = self._as_a_whole(x, rotation, attention)
        if whole is not None:
            index = layer.self_attn.layer_idx
            x, stream = attention.run_layer(index, whole, x, stream, rotation, self.variant)
        else:
            x, stream = _add_and_norm(x, stream, layer.input_layernorm)
            x = self._attended(x, attention, *rotation)
            x, stream = _add_and_norm(x, stream, layer.post_attention_layernorm)
            x = layer.mlp.down_proj(fastrl_kernels.swiglu(*self.mlp_products(x)))
        if self.last and not self.stream.goes_on:
            return stream + x
        self.stream.sum = stream
        return x

    def _attended(self, x: Tensor, attention: DecodeAttention, cos: Tensor, sin: Tensor) -> Tensor:
        layer, norms = self.layer.self_attn, None
        query, key, value = (y.view(len(x), -1, layer.head_dim) for y in self.attention_products(x))
        if self.head_norm_eps is not None:
            weights = layer.q_norm.weight, layer.k_norm.weight
            norms = fastrl_kernels.HeadNorms(*weights, self.head_norm_eps)
        query = attention.rotate_and_write(layer.layer_idx, query, key, value, cos, sin, norms)
        out = attention.attend_written(query, self.variant)
        return layer.o_proj(out.reshape(len(x), 1, -1).to(x.dtype))

    def _prefilled(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The layer's output for prompts, by its own attention; norms and gate take one pass."""
        layer, mlp = self.layer, self.layer.mlp
        normed, _ = _add_and_norm(x, None, layer.input_layernorm)
        attended, _ = layer.self_attn(normed, *args, **kwargs)
        normed, x = _add_and_norm(attended, x, layer.post_attention_layernorm)
        gated = fastrl_kernels.swiglu(mlp.gate_proj(normed), mlp.up_proj(normed))
        return x + mlp.down_proj(gated)

    def _as_a_whole(
        self, x: Tensor, rotation: tuple[Tensor, Tensor], attention: DecodeAttention
    ) -> DecodeLayer | None:
        """The layer for compiled code, in one call; None where that cannot compute it."""
        if self.attention_products.compiled is None:
            return None
        index = self.layer.self_attn.layer_idx
        keys, values = attention.kv_cache.keys[index], attention.kv_cache.values[index]
        stream = None if self.first else self.stream.sum
        if not (CompiledProduct.takes(x) and are_fp32(stream, *rotation, keys, values)):
            return None
        if not self._looked and not watched():
            self._looked = True
            self._whole = self._for_compiled_code(rotation[0], keys, values)
        return None if watched() else self._whole

    def _for_compiled_code(self, cos: Tensor, keys: Tensor, values: Tensor) -> DecodeLayer | None:
        """The layer with its weights of now; None where it has other parts, or memory is short."""
        layer, attention, variant = self.layer, self.layer.self_attn, self.variant
        products = [
            *(self.attention_products.compiled, compiled_product(attention.o_proj)),
            *(self.mlp_products.compiled, compiled_product(layer.mlp.down_proj)),
        ]
        packed = [(x.packed(), x.bias) for x in products if x is not None]
        found = [(panels, bias) for panels, bias in packed if panels is not None]
        around = [
            Norm(x.weight.detach(), _eps(x))
            for x in (layer.input_layernorm, layer.post_attention_layernorm)
        ]
        norms = None
        if self.head_norm_eps is not None:
            of_heads = attention.q_norm.weight.detach(), attention.k_norm.weight.detach()
            norms = fastrl_kernels.HeadNorms(*of_heads, self.head_norm_eps)
        others: list[Any] = [*(x.weight for x in around), *(norms or ())[:2], variant.sinks]
        others += [bias for _, bias in found]
        if len(found) < len(products) or not are_contiguous_fp32(*others):
            return None
        qkv, out, gate_up, down = found
        (key_heads, key_width), value_width = keys.shape[2:], values.shape[3]
        shape = Shape(
            *(out[0].terms // value_width, key_heads, key_width, value_width, cos.shape[1]),
            key_width**-0.5 if variant.scale is None else variant.scale,
            *(variant.softcap, variant.window, variant.chunk),
        )
        weights = Weights(around[0], qkv, norms, variant.sinks, out, around[1], gate_up, down)
        return DecodeLayer(weights, shape)


class FusedNorm:
    """The norm behind the last layer, with that layer's last addition: one launch."""

    def __init__(self, norm: Any, stream: _Stream):
        self.module, self.stream = norm, stream
        self.own_forward: Callable[..., Tensor] = norm.forward

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(current_attention(), DecodeAttention):
            return self.own_forward(hidden_states, *args, **kwargs)
        norm = self.module
        normed: Any = fastrl_kernels.rms_norm(
            hidden_states, norm.weight, residual=self.stream.sum, eps=_eps(norm)
        )
        return normed[0]

    def renew(self) -> None:
        """Does nothing: no table is kept."""

    def free(self) -> None:
        """Does nothing: no table is kept."""


class TabulatedRotary:
    """A model's cosines and sines of positions in decode steps, from a table of all positions of a
    slot: one launch. The model's own forward makes the table, anew for every rollout."""

    def __init__(self, rotary: Any):
        self.module = rotary
        self.own_forward: Callable[..., tuple[Tensor, Tensor]] = rotary.forward
        self._table: Tensor | None = None  # [2, length, R]

    def renew(self) -> None:
        """Computes the table again for a new rollout, at the address that CUDA graphs read."""
        table = self._table
        if table is not None and table.device == self.module.inv_freq.device:
            table.copy_(self._computed(table[0], table.shape[1]))

    def free(self) -> None:
        self._table = None

    def __call__(
        self, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        attention = current_attention()
        plain = position_ids.shape == x.shape[:2] and x.shape[1] == 1 and not (args or kwargs)
        if not (isinstance(attention, DecodeAttention) and plain):
            return self.own_forward(x, position_ids, *args, **kwargs)
        table, kind = self._table, (attention.kv_cache.length, x.dtype, x.device, type(x))
        if table is None or (table.shape[1], table.dtype, table.device, type(table)) != kind:
            table = self._table = self._computed(x, kind[0])
        cos, sin = table.index_select(1, position_ids.flatten()).unsqueeze(2)
        return cos, sin

    def _computed(self, x: Tensor, length: int) -> Tensor:
        """Cosines and sines [2, length, R], computed in rows of one token, as in decode steps."""
        with torch.inference_mode(False), torch.no_grad():  # renew() writes to it in place
            positions = torch.arange(length, device=x.device).unsqueeze(1)
            return torch.stack(self.own_forward(x, positions)).squeeze(2)


def _of_rows(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [b, R] of the rows of x, which may share them."""
    cos, sin = cos.expand(len(x), 1, -1).squeeze(1), sin.expand(len(x), 1, -1).squeeze(1)
    return cos, sin


def _add_and_norm(x: Tensor, stream: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """The norm of stream + x, in the dtype of products, and the sum itself; [b, 1, H] each."""
    kind, dtype = x.device.type, None
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    eps = _eps(norm)
    normed: Any = fastrl_kernels.rms_norm(x, norm.weight, residual=stream, eps=eps, dtype=dtype)
    return (normed, x) if stream is None else normed


def _eps(norm: Any) -> float:
    return float(norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps)


class FusedLayers:
    """A model's decoder layers, fused in decode steps where all of them can be.

    Attributes:
        active: whether the fused layers were compared with the model's own, and agreed.
    """

    def __init__(self, model: nn.Module):
        self.model = model
        layers = _decoder_layers(model)
        self.stream, end = _Stream(), len(layers) - 1
        self.layers = [
            FusedDecoderLayer(layer, self.stream, first=i == 0, last=i == end)
            for i, layer in enumerate(layers)
        ]
        norm, rotary = _around(model, layers)
        self.around: list[FusedNorm | TabulatedRotary] = []
        self.around += [] if norm is None else [FusedNorm(norm, self.stream)]
        self.around += [] if rotary is None else [TabulatedRotary(rotary)]
        self.active = False

    def together(self) -> list[Sequence[Any]]:
        """Lists of linear layers whose products are one where their weights are joined."""
        if not self.active:
            return []
        return [products.layers for products in self._products()]

    def activate(self, decode: Callable[[], tuple[Tensor, Sequence[Variant]]]) -> None:
        """Compares a few fused decode steps with those of the layers' own forwards, which say how
        layers attend. Where they differ, with the model's own norm and rotary embedding too, layers
        stay as they are, and it warns.

        Args:
            decode: runs these steps; returns the last one's logits, and the layers' variants.
        """
        if not self.layers:
            return
        expected, variants = decode()
        if not expected.isfinite().all():  # rollouts name weights that are broken
            return
        for fused, variant in zip(self.layers, variants, strict=True):
            fused.variant = variant
        cause = self._cause(decode, expected)
        if cause and self.around:
            self.around = []  # norm or rotary embedding may work otherwise than Llama's
            cause = self._cause(decode, expected)
        if cause:
            warnings.warn(
                f"fused decoder layers {cause}: rollouts run the model's own, which are slower",
                stacklevel=4,
            )

    def _cause(self, decode: Callable[[], tuple[Tensor, Any]], expected: Tensor) -> str | None:
        """Why the layers cannot run fused; None where they can, and are switched on."""
        self.active = True
        try:
            fused, _ = decode()
            difference = float((fused - expected).abs().max() / expected.abs().max())
            cause = f"differ from the model's own by {difference:.1e} of the largest logit"
            self.active = difference <= _tolerance(fused)
        except Exception as error:  # a model may only look like Llama
            cause = f"cannot run ({type(error).__name__}: {error})"
            self.active = False
        return None if self.active else cause

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which ``active`` layers run fused, if none has hooks or was replaced."""
        layers = self.layers if self.active and self._are_there() else []
        now = _around(self.model, [x.layer for x in layers])
        around = [x for x in self.around if any(x.module is y for y in now)]
        self.stream.goes_on = any(isinstance(x, FusedNorm) for x in around)
        for fused in layers:
            fused.begin()
        for part in around:
            part.renew()
        forwards = *((x.layer, x) for x in layers), *((x.module, x) for x in around)
        try:
            with attributes_set(*((module, "forward", forward) for module, forward in forwards)):
                yield
        finally:
            for fused in self.layers:
                fused.end()

    def stored(self) -> list[Tensor]:
        """The copies of weights that stay between rollouts."""
        return [copy for products in self._products() for copy in products.stored()]

    def _products(self) -> Iterator[JoinedProducts]:
        for fused in self.layers:
            yield from (fused.attention_products, fused.mlp_products)

    def free(self) -> None:
        """Frees tables, and forgets where weights were joined, both kept between rollouts."""
        for products in self._products():
            products.free()
        for part in self.around:
            part.free()

    def _are_there(self) -> bool:
        """Whether the model still has these layers, and nothing else needs their calls."""
        ours, now = [fused.layer for fused in self.layers], _decoder_layers(self.model)
        same = len(ours) == len(now) and all(map(operator.is_, ours, now))
        return same and not any(map(_is_watched, ours))


def _tolerance(logits: Tensor) -> float:
    tf32 = logits.dtype == torch.float32 and computes_in_tf32(logits.device)
    return _TOLERANCE[torch.float16 if tf32 else logits.dtype]  # TF32 has as many bits as float16


class VariantsOf(DecodeAttention):
    """A decode step's attention that notes the layers' variants in ``variants``, in order."""

    def __init__(self, *args: Any):
        super().__init__(*args)
        self.variants: list[Variant] = []

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, variant: Variant) -> Tensor:
        self.variants.append(variant)
        return super().attend(query, keys, values, variant)


def _decoder_layers(model: nn.Module) -> Sequence[nn.Module]:
    """The modules of the only list of modules that all pass :func:`_fits`; [] for other models."""
    lists = [x for x in model.modules() if isinstance(x, nn.ModuleList) and len(x)]
    fitting = [x for x in lists if all(map(_fits, x))]
    return list(fitting[0]) if len(fitting) == 1 else []


def _around(model: nn.Module, layers: Sequence[nn.Module]) -> tuple[Any, Any]:
    """The norm behind the layers and the rotary embedding, both of the module that runs the layers;
    None for one of another name or structure, with a forward of its own or with hooks."""
    for module in model.modules():
        lists = [list(x) for x in module.children() if isinstance(x, nn.ModuleList)]
        if layers and list(layers) in lists:
            norm, rotary = (_untouched(module, name) for name in ("norm", "rotary_emb"))
            norm = norm if norm is not None and _is_norm(norm) else None
            return norm, rotary if hasattr(rotary, "inv_freq") else None
    return None, None


def _untouched(owner: nn.Module, name: str) -> Any:
    """The owner's module of that name; None without one, or if it has its own forward or hooks."""
    module = getattr(owner, name, None)
    plain = isinstance(module, nn.Module) and not (has_own_forward(module) or _is_hooked(module))
    return module if plain else None


def _fits(layer: Any) -> bool:
    """Whether a layer has the modules of Llama's, and no others."""
    if _children(layer) != _LAYER or has_own_forward(layer):
        return False
    if getattr(layer, "residual_multiplier", 1.0) != 1.0:  # Granite's
        return False
    attention, norms = layer.self_attn, (layer.input_layernorm, layer.post_attention_layernorm)
    if _children(attention) not in (_ATTENTION, _ATTENTION | _HEAD_NORMS):
        return False
    if _children(layer.mlp) != _MLP or not _is_silu(layer.mlp.act_fn):
        return False
    norms += (attention.q_norm, attention.k_norm) if hasattr(attention, "q_norm") else ()
    bare = [layer, attention, layer.mlp]
    return (
        all(map(_is_norm, norms))
        and not any(list(x.parameters(recurse=False)) for x in bare)
        and not any(map(has_own_forward, (*bare, *norms)))
        and hasattr(attention, "head_dim")
        and hasattr(attention, "layer_idx")
    )


def _is_silu(function: Callable[[Tensor], Tensor]) -> bool:
    """Whether an activation is SiLU, judged by its values since it has different names."""
    x = torch.linspace(-4, 4, 5)
    return torch.allclose(function(x), F.silu(x), rtol=0, atol=1e-6)


def _children(module: nn.Module) -> set[str]:
    return {name for name, _ in module.named_children()}


def _is_norm(module: nn.Module) -> bool:
    weights = dict(module.named_parameters())
    has_eps = hasattr(module, "variance_epsilon") or hasattr(module, "eps")
    return weights.keys() == {"weight"} and weights["weight"].dim() == 1 and has_eps


def _is_watched(layer: Any) -> bool:
    """Whether the layer is compiled, or has hooks: fused, its output lacks the residual stream, and
    some of its modules are not called."""
    attention, mlp = layer.self_attn, layer.mlp
    replaced = [attention, mlp, mlp.act_fn, layer.input_layernorm, layer.post_attention_layernorm]
    replaced += [getattr(attention, name) for name in _HEAD_NORMS if hasattr(attention, name)]
    return any(map(_is_hooked, (layer, *replaced)))


# The module of hooks that transformers leaves on layers once hidden states, attentions or routers'
# logits were asked for. They do nothing while none are, as in rollouts.
_IDLE = "transformers.utils.output_capturing"


def _is_hooked(module: Any) -> bool:
    hooks = *module._forward_hooks.values(), *module._forward_pre_hooks.values()
    watched = any(getattr(hook, "__module__", None) != _IDLE for hook in hooks)
    return watched or module._compiled_call_impl is not None
