"""BoundedCache: the keys and values that generation with dynamic-mask attention needs, exactly, in memory of fixed size."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor, nn

from dmattn import checks, ops, unsupported
from dmattn.autograd import refuse_gradients
from dmattn.cache_choice import attend_step
from dmattn.cache_chunk import CacheCall, CacheSizes, CacheState, take_chunk
from dmattn.cache_loaded import check_loaded
from dmattn.cache_recent import RecentRows
from dmattn.composed import LISTS
from dmattn.fake import accumulate_dtype
from dmattn.renamed import renamed

# Up to so many tokens are taken in one after another: a chunk costs as much as some steps.
MOST_STEPS = 8

PaddingSide = Literal["left", "right"]


def autocast_to(dtype: torch.dtype, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Under autocast, tensors in the dtype of a cache."""
    if not torch._C._is_any_autocast_enabled():
        return tensors
    return tuple(x.to(dtype) if isinstance(x, Tensor) else x for x in tensors)


class BoundedCache(nn.Module):
    """Keys and values of a model that generates with dynamic-mask attention: exact, and of a fixed size at every length.

    A query sees the ``window`` best-scored keys, the ``local`` latest and the first ``sink_keys`` ones (:meth:`dmattn.IntervalMask.top_k`).
    A key that falls out of the best ``window`` never comes back, so no later query needs it, and a new key takes its place. :meth:`attend` takes
    new tokens in and gives what :func:`dmattn.dynamic_mask_attention` gives for them over the whole history: exactly the same keys are
    visible, and results are equal up to the order of sums.

    This is a module without parameters. Its state lies in buffers, so ``state_dict``, ``to``, ``torch.compile``, ``torch.export`` and CUDA
    graphs treat it like a model's: the same tensors are written in place, sizes never change, and nothing waits for the device. The state does
    not depend on how a history was cut into calls, bit for bit, nor on what else is in the batch.

    Args:
        batch_size: number of sequences B.
        num_kv_heads: key heads Hkv; each keeps keys of its own.
        window: number of selected keys; 0 for a streaming head, which has only the latest and the first keys.
        head_dim: size D of keys, a multiple of 8 up to 256.
        value_dim: size Dv of values, likewise; default D.
        local: number of latest keys that are visible whatever their scores.
        sink_keys: number of first keys that are visible whatever their scores.
        rewind: number of latest tokens that :meth:`rewind` can take back.
        dtype: of keys and values; default torch's. Scores are float32 (float64 for float64).
        device: of all tensors.

    Attributes:
        key: [B, Hkv, N, D] with N = sink_keys + local + window + rewind slots. Position p lies in slot p if p < sink_keys, in slot
            ``sink_keys + (p - sink_keys) % local`` while it is among the latest ``local``, and afterwards in the slot of the key that it pushed
            out. The last ``rewind`` slots hold what died in the last ``rewind`` steps. Empty slots hold zeros.
        value: [B, Hkv, N, Dv], in the same slots.
        score: [B, Hkv, N], -inf in empty slots.
        position: int32 [B, Hkv, N], the position of each slot's key in its sequence, -1 in empty slots.
        entered: int32 [B, Hkv, rewind], which slot of selected keys was written at each of the last steps, -1 for none.
        steps: int32 [B, Hkv], how many tokens were taken in; the same for all heads of a sequence.
        kept: int32 [B, Hkv], how many of them can be taken back.

    Raises:
        TypeError: a size is no int, or dtype is none that keys can have.
        ValueError: sizes that are negative, all 0, or beyond 2^20 slots.
    """

    key: Tensor
    value: Tensor
    score: Tensor
    position: Tensor
    entered: Tensor
    steps: Tensor
    kept: Tensor
    sizes_saved: Tensor
    # So many numbers at the end of every value are the index key of a layer that chooses, see CacheCall.choice.
    index_dim: int = 0

    @renamed(sink="sink_keys")
    def __init__(
        self,
        batch_size: int,
        num_kv_heads: int,
        window: int,
        head_dim: int,
        value_dim: int | None = None,
        *,
        local: int = 0,
        sink_keys: int = 0,
        rewind: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        value_dim = head_dim if value_dim is None else value_dim
        dtype = torch.get_default_dtype() if dtype is None else dtype
        checks.each(checks.positive_int, batch_size=batch_size, num_kv_heads=num_kv_heads)
        checks.selection(window, local, sink_keys, True)
        checks.natural_int("rewind", rewind)
        for name, size in (("head_dim", head_dim), ("value_dim", value_dim)):
            checks.positive_int(name, size)
            checks.head_size(name, size)
        self.sizes = CacheSizes(sink_keys, local, window, rewind)
        slots = self.sizes.visible() + rewind
        if self.sizes.visible() == 0 or slots > checks.MAX_LENGTH:
            raise ValueError(f"window: expected window + local + sink_keys + rewind from 1 to {checks.MAX_LENGTH}, got {slots}")
        heads = (batch_size, num_kv_heads)
        key = torch.zeros(*heads, slots, head_dim, dtype=dtype, device=device)
        checks.dtype("dtype", key, checks.DTYPES.get(key.device.type, checks.DTYPES["cpu"]))
        counts = torch.zeros(heads, dtype=torch.int32, device=device)
        self.register_buffer("key", key)
        self.register_buffer("value", key.new_zeros(*heads, slots, value_dim))
        self.register_buffer("score", key.new_full((*heads, slots), -torch.inf, dtype=accumulate_dtype(dtype)))
        self.register_buffer("position", counts.new_full((*heads, slots), -1))
        self.register_buffer("entered", counts.new_full((*heads, rewind), -1))
        self.register_buffer("steps", counts)
        self.register_buffer("kept", torch.zeros_like(counts))
        self.register_buffer("sizes_saved", torch.tensor(self.sizes, dtype=torch.int64, device=device))
        self.recent: RecentRows | None = None  # of a layer that convolves

    # Use ------------------------------------------------------------------------------------------------------------------------

    # MixedCache has this method, too.
    @overload
    def attend(
        self: Any, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *, scale: float | None = None,
        softcap: float = 0.0, lengths: Tensor | None = None, padding_side: PaddingSide = "right", slopes: Tensor | None = None,
        select_only: bool = False, return_lse: Literal[False] = False,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attend(
        self: Any, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None = None, *, scale: float | None = None,
        softcap: float = 0.0, lengths: Tensor | None = None, padding_side: PaddingSide = "right", slopes: Tensor | None = None,
        select_only: bool = False, return_lse: Literal[True],
    ) -> tuple[Tensor, Tensor]: ...  # fmt: skip
    def attend(
        self: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scores: Tensor | None = None,
        *,
        scale: float | None = None,
        softcap: float = 0.0,
        lengths: Tensor | None = None,
        padding_side: PaddingSide = "right",
        slopes: Tensor | None = None,
        select_only: bool = False,
        return_lse: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Takes the next T tokens of each sequence in, and gives their attention: a prefill, a part of one, or a decode step.

        Token t of sequence b comes to stand at position ``length[b] + t``. It sees what
        ``dynamic_mask_attention(..., scores, window, local=local, sink_keys=sink_keys)`` over the whole history shows it;
        scores are added to logits. For inference: there is no gradient.

        Args:
            query: [B, H, T, D], T >= 1, H % Hkv == 0.
            key: [B, Hkv, T, D].
            value: [B, Hkv, T, Dv].
            scores: [B, Hkv, T]; float32, bfloat16 or float16, for float64 keys also float64. They select and are added to the logits. None
                is for ``window=0`` only, and stands for zeros.
            scale: factor of the products, default D ** -0.5.
            softcap: if > 0, products become ``softcap * tanh(s / softcap)``.
            lengths: int32 [B] on the cache's device: how many of the T tokens are real, taken as within 0 and T; default all. The others
                leave no trace, may hold anything, and get 0 (lse = -inf). So sequences of a batch may be of different lengths, and a row that is
                idle has 0.
            padding_side: whether the others stand behind the real tokens ("right") or in front of them ("left").
            slopes: [Hkv], recency: every key's score and its logits get ``slopes[h] * position`` (ALiBi, arXiv 2108.12409). The product and the
                sum are of the dtype of the cache's scores, and rounded as over the whole history. Give the same slopes in every call.
            select_only: scores select and are not added to the logits; what slopes add still is. Give the same in every call.
            return_lse: also return the log-sum-exp of each query's logits, float32 (float64 for float64).

        Returns:
            out [B, H, T, Dv] in query's dtype, or (out, lse [B, H, T]).

        Raises:
            TypeError: a wrong type or dtype.
            ValueError: a wrong shape, device or value, T = 0, T + window + local + sink_keys beyond 2^20, or no scores with a window.
            RuntimeError: a tensor requires a gradient, and gradients are on.
        """
        checks.flag("return_lse", return_lse), checks.flag("select_only", select_only)
        query, key, value = self._autocast(query, key, value)
        self._check(query, key, value, scores, slopes)
        call = self._checked_call(query, scores, slopes, lengths, padding_side, select_only, scale, softcap)
        if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in (query, key, value, scores, slopes)):
            refuse_gradients("BoundedCache.attend")
        out, lse = self._attend(query, key, value, call)
        return (out, lse) if return_lse else out

    forward = attend

    def rewind(self, n: int | Tensor) -> None:
        """Takes the last n tokens of each sequence back, as if they had never come: for speculative decoding.

        Args:
            n: 0 <= n <= ``kept``: at most ``self.sizes.rewind``, at most the sequence's length, less what was taken back since the last
                tokens. An int for all sequences, or int32 [B] on the cache's device.

        Raises:
            TypeError: n is neither.
            ValueError: n is out of range, as far as that is known without asking a device: an int beyond the cache's ``rewind``, and any n
                beyond ``kept`` where the cache lies on a CPU. Elsewhere a sequence with such an n becomes empty, as after :meth:`reset`.
        """
        count = tokens_back(n, self.kept[:, 0], self.sizes.rewind)
        ops.cache_rewind(*self._state(), count, self.sizes.window, self.sizes.local, self.sizes.sink_keys)

    def reorder(self, index: Tensor) -> None:
        """Sequence b becomes a copy of what sequence ``index[b]`` was: for beams.

        Args:
            index: int32 or int64 [B] on the cache's device, each 0 <= index < B (checked here on a CPU, and by torch's kernel elsewhere).

        Raises:
            TypeError, ValueError: a wrong dtype, shape, device or value.
        """
        check_index(index, self.key)
        for tensor in self._state():
            tensor.copy_(tensor.index_select(0, index))
        if self.recent is not None:
            self.recent.reorder(index)

    def reset(self, rows: Tensor | Sequence[int] | int | None = None) -> None:
        """Makes sequences empty, so that their next token stands at position 0.

        Args:
            rows: bool [B] on the cache's device, True = reset; or the numbers of sequences; default all.

        Raises:
            TypeError, ValueError: neither, or a number that is no sequence's.
        """
        chosen = chosen_rows(rows, self.key)
        empty = (0, 0, -torch.inf, -1, -1, 0, 0)
        for tensor, nothing in zip(self._state(), empty, strict=True):
            tensor.masked_fill_(chosen.view(-1, *[1] * (tensor.dim() - 1)), nothing)
        if self.recent is not None:
            self.recent.reset(chosen)

    @property
    def length(self) -> Tensor:
        """int32 [B]: how many tokens of each sequence were taken in, those included whose keys are gone."""
        return self.steps[:, 0]

    def next_positions(self, tokens: int, lengths: Tensor | None = None, padding_side: PaddingSide = "right") -> Tensor:
        """int64 [B, T]: at which positions the next T tokens will stand, for position embeddings. Call it before :meth:`attend`.

        Where lengths says that a token is not real its number means nothing; it is 0 at least.

        Raises:
            TypeError, ValueError: tokens is not an int >= 0, or lengths or padding_side is not as :meth:`attend` takes it.
        """
        return positions_after(self.length, tokens, lengths, padding_side)

    @property
    def batch_size(self) -> int:
        """Number of sequences B."""
        return self.key.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Number of key heads Hkv."""
        return self.key.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; the same at every length."""
        own = sum(tensor.numel() * tensor.element_size() for tensor in self._state())
        return own + (0 if self.recent is None else self.recent.nbytes)

    def extra_repr(self) -> str:
        batch, heads, _, size = self.key.shape
        sizes = ", ".join(f"{name}={number}" for name, number in self.sizes._asdict().items() if number)
        return f"batch_size={batch}, num_kv_heads={heads}, head_dim={size}, value_dim={self.value.shape[3]}, {sizes}, dtype={self.key.dtype}"

    # Inside ---------------------------------------------------------------------------------------------------------------------

    def _state(self) -> CacheState:
        return CacheState(self.key, self.value, self.score, self.position, self.entered, self.steps, self.kept)

    def _checked_call(
        self, query: Tensor, scores: Tensor | None, slopes: Tensor | None, lengths: Tensor | None, padding_side: PaddingSide,
        select_only: bool, scale: float | None, softcap: float,
    ) -> CacheCall:  # fmt: skip
        """Checks what a call of :meth:`attend` is given in addition to query, key and value, and adds recency to the scores."""
        if lengths is not None:
            checks.per_sequence("lengths", lengths, self.key, "the cache")
        check_side(padding_side)
        scale = query.shape[3] ** -0.5 if scale is None else checks.scale(scale)
        softcap = checks.softcap(softcap)
        if torch.compiler.is_compiling() or torch._C._is_tracing():
            unsupported.refuse_onnx()
        tokens = query.shape[2]
        if slopes is not None:
            slopes = slopes.to(self.score.dtype)
            recency = slopes[:, None] * self.next_positions(tokens, lengths, padding_side)[:, None].to(slopes.dtype)
            scores = recency if scores is None else scores + recency
        shift = None
        if lengths is not None and padding_side == "left" and tokens > 1:
            shift = tokens - lengths.long().clamp(0, tokens)
        return CacheCall(scores, not select_only, slopes, lengths, shift, scale, softcap)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, call: CacheCall) -> tuple[Tensor, Tensor]:
        """Takes in tokens that were checked, and returns (out, lse)."""
        shift = call.shift
        if shift is not None:
            query, key, value = (rolled(x, shift) for x in (query, key, value))
            choice = call.choice
            if choice is not None:
                choice = choice._replace(query=rolled(choice.query, shift), weights=rolled(choice.weights, shift))
            call = call._replace(scores=None if call.scores is None else rolled(call.scores, shift), choice=choice)
        if query.shape[2] <= MOST_STEPS:
            out, lse = self._take_steps(query, key, value, call)
        else:
            out, lse = take_chunk(self._state(), self.sizes, query, key, value, call)
        if shift is not None:
            out, lse = rolled(out, -shift), rolled(lse, -shift)
        return out, lse

    def _take_steps(self, query: Tensor, key: Tensor, value: Tensor, call: CacheCall) -> tuple[Tensor, Tensor]:
        """One token after another: into the cache, and its attention over all slots. Empty slots have a score and a bias of -inf."""
        state, sizes, lengths = self._state(), self.sizes, call.lengths
        if lengths is not None and query.shape[2] > 1:
            lengths = lengths.clamp(min=0)  # the smallest int32 less a step would be the largest
        results = []
        for t in range(query.shape[2]):
            new = (x if x is None or x.shape[2] == 1 else x[:, :, t : t + 1] for x in (query, key, value, call.scores))
            remaining = lengths if lengths is None or t == 0 else lengths - t
            if call.adds_scores:
                step = (*state, *new, remaining, sizes.window, sizes.local, sizes.sink_keys, call.scale, call.softcap)
                out, lse = ops.cache_step(*step)
                results.append((out, lse))
                continue
            token, *rest = new
            ops.cache_update(*state, *rest, remaining, sizes.window, sizes.local, sizes.sink_keys)
            slots = None if remaining is None else torch.where(remaining > 0, sizes.visible(), 0).to(torch.int32)
            seen = state[:4] if sizes.rewind == 0 else tuple(x[:, :, : sizes.visible()] for x in state[:4])
            bias = torch.where(seen[3] >= 0, call.recency(seen[3], seen[2]), -torch.inf)
            if call.choice is not None and sizes.window:
                choice = call.choice.of_token(t)
                certain, one = sizes.sink_keys + sizes.local, query[:, :, t : t + 1]
                results.append(
                    attend_step(choice, one, seen[0], seen[1], seen[3], slots, bias, certain, call.scale, call.softcap)
                )
                continue
            results.append(ops.decode(token, *seen[:2], slots, None, bias, None, None, False, call.scale, call.softcap, *LISTS))
        if len(results) == 1:
            return results[0]
        return torch.cat([out for out, _ in results], 2), torch.cat([lse for _, lse in results], 2)

    def _autocast(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return autocast_to(self.key.dtype, *tensors)

    def _check(
        self, query: Tensor, key: Tensor, value: Tensor, scores: Tensor | None, slopes: Tensor | None, kv_heads: int | None = None
    ) -> None:
        """Refuses tokens that do not fit this cache, or one of so many key heads that this one is a part of."""
        batch, own_heads, _, head_dim = self.key.shape
        kv_heads = own_heads if kv_heads is None else kv_heads
        for name, given in (("query", query), ("key", key), ("value", value)):
            checks.tensor(name, given)
            checks.same_device(name, given, self.key, "the cache")
            if given.dtype != self.key.dtype:
                raise TypeError(f"{name}: expected dtype {self.key.dtype} like the cache, got {given.dtype}")
        if query.dim() != 4 or query.shape[0] != batch or query.shape[3] != head_dim or query.shape[1] % kv_heads != 0:
            raise ValueError(
                f"query: expected [B, H, T, D] with B={batch}, D={head_dim} and a multiple H of Hkv={kv_heads}, got {checks.shape_of(query)}"
            )
        tokens = query.shape[2]
        if tokens < 1 or tokens + self.sizes.visible() > checks.MAX_LENGTH:
            raise ValueError(f"query: expected 1 to {checks.MAX_LENGTH - self.sizes.visible()} tokens a call, got T={tokens}")
        checks.shaped("key", key, "[B, Hkv, T, D]", B=batch, Hkv=kv_heads, T=tokens, D=head_dim)
        checks.shaped("value", value, "[B, Hkv, T, Dv]", B=batch, Hkv=kv_heads, T=tokens, Dv=self.value.shape[3])
        dtypes = checks.DTYPES["cpu"] if self.key.dtype == torch.float64 else checks.DTYPES["cpu"][1:]
        if slopes is not None:
            checks.shaped("slopes", slopes, "[Hkv]", dtypes, self.key, "the cache", Hkv=kv_heads)
        if scores is not None:
            checks.shaped("scores", scores, "[B, Hkv, T]", dtypes, self.key, "the cache", B=batch, Hkv=kv_heads, T=tokens)
        elif self.sizes.window != 0:
            raise ValueError(f"scores: expected [B, Hkv, T] with a window of {self.sizes.window}, got None")

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "recent" not in self._modules:  # caches pickled before layers convolved
            self.__dict__.setdefault("recent", None)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> BoundedCache:
        """What ``to`` and the like do; scores keep the dtype that belongs to the keys'."""
        score = self.score
        super()._apply(fn, recurse)
        dtype = accumulate_dtype(self.key.dtype)
        if self.score.dtype != dtype:
            self.score = score.to(self.score.device, dtype)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        saved = state_dict.get(f"{prefix}sizes_saved")
        theirs = saved.tolist() if isinstance(saved, Tensor) else saved
        if saved is not None and theirs != [*self.sizes]:
            if isinstance(theirs, list) and len(theirs) == len(self.sizes):
                theirs = CacheSizes(*theirs)._asdict()
            raise ValueError(f"{prefix}state_dict: expected that of a cache with {self.sizes._asdict()}, got one with {theirs}")
        check_loaded(prefix, state_dict, self._state(), self.sizes)
        super()._load_from_state_dict(state_dict, prefix, *others)

    __prepare_scriptable__ = unsupported.scripting_refused  # torch.jit.script calls it first


def check_index(index: Tensor, like: Tensor) -> None:
    """Checks numbers of sequences [B] for a cache whose keys are ``like`` [B, ...]."""
    checks.numbers_below(
        "index", checks.per_sequence("index", index, like, "the cache", (torch.int32, torch.int64)), like.shape[0]
    )


def chosen_rows(rows: Tensor | Sequence[int] | int | None, like: Tensor) -> Tensor:
    """bool [B]: the sequences that ``rows`` says, as :meth:`BoundedCache.reset` takes it."""
    batch = like.shape[0]
    checks.instance("rows", rows, Tensor | Iterable | int | None, "bool [B], numbers of sequences or None")
    if rows is None:
        return torch.ones(batch, dtype=torch.bool, device=like.device)
    if isinstance(rows, Tensor):
        return checks.per_sequence("rows", rows, like, "the cache", (torch.bool,))
    numbers = [rows] if isinstance(rows, int) else list(rows)
    for row in numbers:
        checks.natural_int("rows", row)
        if row >= batch:
            raise ValueError(f"rows: expected numbers of sequences from 0 to {batch - 1}, got {row}")
    return torch.tensor([row in numbers for row in range(batch)], device=like.device)


def positions_after(length: Tensor, tokens: int, lengths: Tensor | None, padding_side: PaddingSide) -> Tensor:
    """int64 [B, T]: where the next T tokens of sequences of ``length`` [B] will stand, see :meth:`BoundedCache.next_positions`."""
    checks.natural_int("tokens", tokens)
    check_side(padding_side)
    if lengths is not None:
        checks.per_sequence("lengths", lengths, length, "the cache")
    positions = length[:, None].long() + torch.arange(tokens, device=length.device)
    if lengths is not None and padding_side == "left":
        positions = positions - (tokens - lengths.long().clamp(0, tokens))[:, None]
    return positions.clamp(min=0)


def tokens_back(n: int | Tensor, kept: Tensor, rewind: int) -> Tensor:
    """int32 [B]: how many tokens of each sequence :meth:`BoundedCache.rewind` is to take back, of ``kept`` [B] and ``rewind`` at most."""
    if isinstance(n, Tensor):
        count = checks.per_sequence("n", n, kept, "the cache")
    else:
        checks.natural_int("n", n)
        if n > rewind:
            raise ValueError(
                f"n: expected at most {rewind} tokens, got {n}: the state before them is gone; make the cache with rewind={n}"
            )
        count = torch.full((kept.shape[0],), n, dtype=torch.int32, device=kept.device)
    if checks.values_are_known(count) and checks.values_are_known(kept):
        wrong = (count < 0) | (count > kept)
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0])
            raise ValueError(
                f"n: expected at most {int(kept[row])} tokens for sequence {row}, the last whose state is kept, got {int(count[row])}"
            )
    return count


def check_side(padding_side: object) -> None:
    checks.one_of("padding_side", padding_side, "left", "right")


def rolled(given: Tensor, shift: Tensor) -> Tensor:
    """given [B, heads, T, ..] with row b rolled by shift[b] [B] along T: what was at t + shift comes to t."""
    tokens = given.shape[2]
    index = (torch.arange(tokens, device=given.device) + shift[:, None]) % tokens
    index = index.view(index.shape[0], 1, tokens, *[1] * (given.dim() - 3)).expand_as(given)
    return given.gather(2, index)
