"""The loss that teaches scores, and the queries that look at all keys for it."""

from __future__ import annotations

import math

import dmattn
import pytest
import torch
import torch.nn.functional as F
from dmattn import IntervalMask
from dmattn.nn import score_loss
from dmattn.nn import scores as scores_module
from dmattn.testing import strategies, top_k_visible
from dmattn_bench import two_ways

tensor = strategies.random_tensor


def loss_by_hand(query, key, scores, bias, documents, local, sink_keys, softcap, sharp=False):
    """Every query in turn, in float64."""
    B, H, S, D = query.shape
    kv_heads = key.shape[1]
    first = {j: max(d for d in documents if d <= j) for j in range(S)}
    losses = torch.zeros(kv_heads, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            kv = h // (H // kv_heads)
            for p in range(S):
                seen = [j for j in range(p + 1) if first[j] == first[p]]
                logits = key[b, kv, seen] @ query[b, h, p] * D**-0.5
                logits = (softcap * torch.tanh(logits / softcap) if softcap else logits) + bias[0, kv, seen]
                mass = dict(zip(seen, logits.softmax(0), strict=True))
                competing = [j for j in seen if p - j >= local and j - first[j] >= sink_keys]
                if competing:
                    predicted = scores[b, kv, competing].log_softmax(0)
                    weight = max(mass[j] for j in competing) if sharp else 1.0
                    losses[kv] -= weight * sum(mass[j] * predicted[i] for i, j in enumerate(competing)) / (B * S * H // kv_heads)
    return losses


@pytest.mark.parametrize(
    ("local", "sink_keys", "softcap", "sharp"),
    [(0, 0, 0, False), (5, 0, 2, False), (0, 2, 0, False), (4, 2, 0, False), (4, 2, 0, True)],
)
@pytest.mark.parametrize("documents", [(0,), (0, 7, 20)])
def test_the_loss_and_its_gradient_are_those_of_the_formula(local, sink_keys, softcap, sharp, documents):
    heads = 2 if sharp else 4
    query, key, scores, bias = (
        tensor(shape, i, torch.float64) for i, shape in enumerate(((2, heads, 24, 8), (2, 2, 24, 8), (2, 2, 24), (1, 2, 24)))
    )
    scores.requires_grad_()
    base = IntervalMask.documents(24, torch.tensor([*documents, 24])) if len(documents) > 1 else None
    every_query = 24
    given = {"base": base, "local": local, "sink_keys": sink_keys, "queries": every_query, "softcap": softcap, "sharp": sharp}
    ours = score_loss(query, key, scores, key_bias=bias, **given)
    by_hand = loss_by_hand(query, key, scores, bias, documents, local, sink_keys, softcap, sharp)
    torch.testing.assert_close(ours, by_hand)
    torch.testing.assert_close(score_loss(query, key, scores, key_bias=bias.repeat_interleave(heads // 2, 1), **given), ours)
    weights = torch.tensor([2.0, -3.0], dtype=torch.float64)
    gradients = [torch.autograd.grad((weights * loss).sum(), scores)[0] for loss in (ours, by_hand)]
    assert gradients[1].any()
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize(
    ("of_queries", "of_scores", "compiled"),
    [
        (torch.float64, torch.float32, False),
        (torch.float64, torch.float32, True),
        (torch.float32, torch.float64, False),
        (torch.float64, torch.bfloat16, False),
    ],
)
def test_the_loss_has_the_precision_of_the_scores_whatever_the_queries_are(of_queries, of_scores, compiled):
    query, key, scores = (tensor((2, 2, 24, *size), i, torch.float64) for i, size in enumerate(((8,), (8,), ())))
    query, key, scores = query.to(of_queries), key.to(of_queries), scores.to(of_scores)

    def loss(query, key, scores):
        return score_loss(query, key, scores, local=3, queries=24)

    function = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
    wide = torch.promote_types(of_scores, torch.float32)
    results = {}
    for name, given in (("ours", (query, key, scores)), ("exact", (query.double(), key.double(), scores.double()))):
        leaf = given[2].clone().requires_grad_()
        results[name] = (function if name == "ours" else loss)(*given[:2], leaf)
        results[name + " gradient"] = torch.autograd.grad(results[name].sum(), leaf)[0]
    assert (results["ours"].dtype, results["ours gradient"].dtype) == (wide, of_scores)
    torch.testing.assert_close(results["ours"].float(), results["exact"].float())
    torch.testing.assert_close(results["ours gradient"].to(of_scores), results["exact gradient"].to(of_scores))
    # Nothing is drawn from an empty sequence; the dtype stays.
    assert function(query[:, :, :0], key[:, :, :0], scores[:, :, :0]).dtype == wide
    tangent = torch.func.jvp(lambda scores: loss(query, key, scores), (scores,), (torch.ones_like(scores),))[1]
    assert tangent.dtype == wide


@pytest.mark.parametrize(("bad", "compiled"), [(math.inf, False), (math.inf, True), (-math.inf, False), (math.nan, False)])
def test_keys_whose_place_is_certain_by_their_score_do_not_compete(bad, compiled):
    """The loss is that of a selection without them, and their scores have no gradient."""
    query, key, scores = (tensor((2, 2, 24, *size), i) for i, size in enumerate(((8,), (8,), ())))
    among = torch.arange(24) % 5 != 2
    scores = torch.where(among, scores, bad).requires_grad_()

    def function(scores):
        return score_loss(query, key, scores, local=3, queries=24)

    loss = (torch.compile(function, fullgraph=True, backend="aot_eager") if compiled else function)(scores)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    expected = torch.zeros(2)
    logits = query @ key.transpose(2, 3) * 8**-0.5
    for p in range(24):
        mass = logits[:, :, p, : p + 1].softmax(2)
        competing = among[: p + 1] & (torch.arange(p + 1) <= p - 3)
        if competing.any():
            predicted = scores.detach()[:, :, : p + 1][:, :, competing].log_softmax(2)
            expected -= (mass[:, :, competing] * predicted).sum((0, 2)) / (2 * 24)
    torch.testing.assert_close(loss, expected)
    assert gradient.isfinite().all()
    assert not gradient[:, :, ~among].any()
    assert gradient[:, :, among].any()


def test_a_score_of_plus_inf_that_is_a_logit_is_one_as_in_torch():
    """It wins its place, and the queries that see it are NaN, as softmax of an infinite logit is; others know nothing of it."""
    query, key, value, scores = (tensor((1, 2, 20, *size), i) for i, size in enumerate(((8,), (8,), (8,), ())))
    scores[:, :, 7] = math.inf
    out = dmattn.dynamic_mask_attention(query, key, value, scores, 4)
    visible = top_k_visible(scores, 4)
    bias = torch.where(visible, scores[:, :, None], -math.inf)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value, bias), equal_nan=True)
    assert out[:, :, 7:].isnan().all()
    assert out[:, :, :7].isfinite().all()
    # What selects alone is no logit.
    assert dmattn.attention(query, key, value, IntervalMask.top_k(scores, 4)).isfinite().all()


def test_the_loss_of_queries_whose_scores_are_all_far_below_zero_is_its_formula():
    """Scores of -1e12 hide padding from selection where others are there to be chosen."""
    query, key, scores = (tensor((2, 2, 24, *size), i, torch.float64) for i, size in enumerate(((8,), (8,), ())))
    scores[:, :, :6] = -1e12
    scores.requires_grad_()
    bias = torch.where(torch.arange(24) < 6, -60.0, torch.zeros(1, 2, 24, dtype=torch.float64))
    losses = (
        score_loss(query, key, scores, key_bias=bias, local=2, queries=24),
        loss_by_hand(query, key, scores, bias, (0,), 2, 0, 0.0),
    )
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*(torch.autograd.grad(loss.sum(), scores)[0] for loss in losses))


@pytest.mark.parametrize("of_scores", [torch.float32, torch.bfloat16], ids=str)
def test_scores_of_the_least_number_have_a_finite_loss(of_scores):
    """A mean of what single queries lose, which their sum is too large for."""
    query, key, scores = (tensor((2, 2, 24, *size), i) for i, size in enumerate(((8,), (8,), ())))
    scores = scores.to(of_scores)
    scores[:, :, :12] = torch.finfo(of_scores).min
    wide = (x.double() for x in (query, key, scores))
    expected = loss_by_hand(*wide, torch.zeros(1, 2, 24, dtype=torch.float64), (0,), 0, 0, 0.0)
    torch.testing.assert_close(score_loss(query, key, scores, queries=24), expected.float())


def test_a_query_whose_keys_are_all_hidden_by_a_bias_pays_nothing():
    query, key, scores = (tensor((2, 2, 24, *size), i) for i, size in enumerate(((8,), (8,), ())))
    lengths = torch.tensor([24, 17])
    bias = torch.where(torch.arange(24) < 24 - lengths[:, None, None], -math.inf, 0.0)  # padding on the left
    loss = score_loss(query, key, scores.requires_grad_(), key_bias=bias, local=3, queries=24)
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert loss.isfinite().all()
    assert gradient.isfinite().all()
    # The other sequence is as it is alone, in a mean over two.
    (alone,) = torch.autograd.grad(score_loss(query[:1], key[:1], scores[:1], local=3, queries=24).sum(), scores)
    torch.testing.assert_close(gradient[0], alone[0] / 2)


def test_the_gradient_of_the_loss_cannot_be_differentiated_again():
    query, key, scores = (tensor((1, 2, 30, *size), i) for i, size in enumerate(((8,), (8,), ())))
    loss = score_loss(query, key, scores.requires_grad_(), local=3).sum()
    (gradient,) = torch.autograd.grad(loss + scores.square().sum(), scores, create_graph=True)
    with pytest.raises(RuntimeError, match="score_loss: its gradient cannot be differentiated again"):
        gradient.square().sum().backward()


def test_the_tangent_of_the_loss_is_its_gradient_times_that_of_the_scores():
    query, key, scores, tangent = (tensor((1, 2, 30, *size), i) for i, size in enumerate(((8,), (8,), (), ())))

    def loss(scores):
        return score_loss(query, key, scores, local=3, queries=30).sum()

    def pushed(scores):
        return torch.func.jvp(loss, (scores,), (tangent,))[1]

    for function in (pushed, torch.compile(pushed, fullgraph=True, backend="aot_eager")):
        torch.testing.assert_close(function(scores), (torch.func.grad(loss)(scores) * tangent).sum())
    for second in (lambda: torch.func.grad(pushed)(scores), lambda: torch.func.jvp(torch.func.grad(loss), (scores,), (tangent,))):
        with pytest.raises(RuntimeError, match="score_loss: its gradient cannot be differentiated again"):
            second()


def test_the_loss_of_each_sample_under_func():
    query, key, scores = (tensor((3, 1, 2, 30, *size), i) for i, size in enumerate(((8,), (8,), ())))

    def loss(query, key, scores):
        return score_loss(query, key, scores, local=3, queries=30).sum()

    together = torch.func.vmap(torch.func.grad(loss, argnums=2), randomness="same")(query, key, scores)
    for i in range(3):
        torch.testing.assert_close(together[i], torch.func.grad(loss, argnums=2)(query[i], key[i], scores[i]))


@pytest.mark.parametrize("first_head", [0, 1])
def test_the_loss_of_some_heads_is_theirs_among_all(first_head):
    query, key, scores, bias = (
        tensor(shape, i) for i, shape in enumerate(((2, 4, 24, 8), (2, 2, 24, 8), (2, 2, 24), (1, 4, 24)))
    )
    given = {"key_bias": bias, "base": IntervalMask.padding(24, torch.tensor([24, 9])), "local": 4, "sink_keys": 1, "queries": 24}
    torch.testing.assert_close(
        score_loss(query, key, scores, first_head=first_head, **given), score_loss(query, key, scores, **given)[first_head:]
    )


@pytest.mark.parametrize(("last", "late"), [(0.0, 4), (0.5, 34), (1.0, 64)])
def test_a_part_of_the_queries_is_drawn_from_the_last_sixteenth(last, late):
    torch.manual_seed(0)
    rows = dmattn.nn.scores.drawn_rows(1600, 64, last, torch.device("cpu"))
    assert rows.shape == (64,)
    assert (rows >= 1500).sum() == late
    assert rows.min() >= 0
    assert rows.max() < 1600


def test_a_query_that_is_drawn_more_than_once_explores_as_if_drawn_once():
    query, key, value, out = (tensor((1, 2, 5, 8), i) for i in range(4))
    given = [x.requires_grad_() for x in (query, key, value)]
    explored, _ = dmattn.nn.scores.explored(*given, out, tensor((1, 2, 5), 4), queries=33)
    dense = dmattn.attention(*given, is_causal=True)
    assert torch.equal(explored, dense)
    gradients = [torch.autograd.grad(x.square().sum(), given) for x in (explored, dense)]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("has_base", [False, True])
def test_queries_explore_parts_of_the_keys_side_by_side(monkeypatch, device, has_base):
    dtype = torch.bfloat16
    base = IntervalMask.padding(64, torch.tensor([64, 13])).to(device) if has_base else None
    drawn = [tensor((2, heads, 64, 8), i, dtype, device) for i, heads in enumerate((4, 2, 2, 4))]
    drawn.append(tensor((1, 2, 64), 4, torch.float32, device))
    scores, found = torch.zeros(2, 2, 64, device=device), []
    for parts in (1, 8):
        monkeypatch.setattr(scores_module, "_parts", lambda *_, parts=parts: parts)
        leaves = [x.clone().requires_grad_() for x in drawn]
        torch.manual_seed(0)
        out, _ = scores_module.explored(*leaves[:4], scores, key_bias=leaves[4], base=base, queries=20, softcap=3.0)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    *results, of_bias = zip(*found, strict=True)
    for one, other in results:
        two_ways.assert_same_by_another_way(other, one, dtype)
    two_ways.assert_same_sums_by_another_way(*of_bias[::-1], dtype)


def test_padding_that_holds_nan_leaves_the_loss_and_its_gradient_finite():
    query, key, scores = (tensor((1, 2, 30, *size), i) for i, size in enumerate(((8,), (8,), ())))
    query[:, :, 25:], key[:, :, 25:], scores[:, :, 25:] = math.nan, math.nan, math.nan
    given = [x.requires_grad_() for x in (query, key, key.detach().clone(), torch.zeros(1, 2, 30, 8), scores)]
    out, loss = dmattn.nn.scores.explored(*given, base=IntervalMask.padding(30, 25), local=3, queries=30)
    gradients = torch.autograd.grad(out[:, :, :25].sum() + loss.sum(), [given[i] for i in (0, 1, 2, 4)])
    assert loss.isfinite().all()
    assert out[:, :, :25].isfinite().all()
    assert all(gradient[:, :, :25].isfinite().all() for gradient in gradients)


def test_hidden_keys_and_scores_of_minus_infinity_leave_the_loss_finite():
    query, key, scores = (tensor(shape, i) for i, shape in enumerate(((1, 2, 30, 8), (1, 2, 30, 8), (1, 2, 30))))
    key[:, :, 25:] = math.nan
    scores[..., 3], scores[..., 28:] = -math.inf, math.nan
    scores.requires_grad_()
    loss = score_loss(query, key, scores, base=IntervalMask.padding(30, 25), local=3, queries=30)
    assert loss.isfinite().all()
    (gradient,) = torch.autograd.grad(loss.sum(), scores)
    assert gradient.isfinite().all()
    assert not gradient[..., 25:].any()


@pytest.mark.parametrize(("batch", "heads", "length"), [(1, 2, 0), (0, 2, 5), (1, 0, 5)])
def test_the_loss_of_no_query_is_zero(batch, heads, length):
    key, scores = tensor((batch, 2, length, 8), 0), tensor((batch, 2, length), 1).requires_grad_()
    loss = score_loss(tensor((batch, heads, length, 8), 2), key, scores, local=3)
    assert loss.tolist() == [0.0, 0.0]
    assert torch.autograd.grad(loss.sum(), scores)[0].shape == scores.shape


@pytest.mark.parametrize(
    "options", [{}, {"softcap": 5.0}, {"sharp": True, "last": 0.5}, {"local": 3, "sink_keys": 2}, {"first_head": 1}]
)
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("key_bias", [None, (1, 1), (2, 2), (1, 4)])
def test_the_loss_in_parts_is_the_loss(options, documents, key_bias, monkeypatch):
    """A CPU computes it for one sequence and key head after the other, in compiled code by an op."""
    query, key, scores = tensor((2, 4, 30, 8), 0), tensor((2, 2, 30, 8), 1), tensor((2, 2, 30), 2).requires_grad_()
    base = IntervalMask.documents(30, ids=(torch.arange(30) // torch.tensor([[7], [11]])).int()) if documents else None
    bias = None if key_bias is None else tensor((*key_bias, 30), 3)

    def both(loss_of):
        torch.manual_seed(0)
        loss = loss_of(query, key, scores, base=base, key_bias=bias, queries=9, **options)
        return loss, *torch.autograd.grad(loss.sum(), scores)

    in_parts, by_the_op = both(score_loss), both(torch.compile(score_loss, fullgraph=True, backend="aot_eager"))
    whole = scores_module._loss_and_gradient
    monkeypatch.setattr(scores_module, "_in_parts", lambda *given: whole(*given, batch=given[2].shape[0]))
    expected = both(score_loss)
    torch.testing.assert_close(in_parts, expected)
    torch.testing.assert_close(by_the_op, expected)


class Loss(torch.nn.Module):
    def forward(self, query, key, scores):
        return score_loss(query, key, scores, local=2, queries=8)


def test_the_loss_is_exported_for_any_batch():
    given = [tensor((3, *size), n) for n, size in enumerate(((4, 20, 8), (2, 20, 8), (2, 20)))]
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(Loss(), tuple(x[:2] for x in given), dynamic_shapes=({0: batch},) * 3)
    torch.manual_seed(1)
    exported = program.module()(*given)
    torch.manual_seed(1)
    torch.testing.assert_close(exported, Loss()(*given))
